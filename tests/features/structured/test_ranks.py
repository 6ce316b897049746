"""Guided requests on several ranks: the grammar is rank 0's, and the tokens are those of one."""

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams, StructuredOutputsParams

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
from grammars import PERSON


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    make_qwen3(tmp_path, vocab_size=2048)
    guides: list[dict[str, Any]] = [{"json": PERSON}, {"regex": "[0-9]{3}-[a-z]+"}]
    params = [
        SamplingParams(
            max_tokens=60,
            temperature=temperature,
            top_k=top_k,
            seed=1,
            structured_outputs=StructuredOutputsParams(**guide),
        )
        for temperature, top_k in ((0, 0), (1.0, 0), (1.0, 20))
        for guide in guides
    ]
    found = []
    for num_ranks in (1, 2):
        options: dict[str, Any] = {"tokenizer": "tiny-qwen3", "num_kv_blocks": 100}
        with LLM(tmp_path, **options, tensor_parallel_size=num_ranks) as llm:
            outputs = llm.generate([[5, 6]] * len(params), params, use_tqdm=False)
            assert all(output.error is None for output in outputs)
            assert llm.stats.num_accepted_tokens > 10  # forced runs
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
