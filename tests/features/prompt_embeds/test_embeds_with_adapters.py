"""Prompt embeddings together with LoRA adapters: equal embeddings, one answer for each adapter."""

from pathlib import Path
from typing import Any

import pytest
from embedded_prompts import Prompt, expected_tokens, greedy, mixed_prompts
from lora_models import request_for, write_adapter
from tiny_checkpoints import make_qwen3
from torch import nn

from nanoserve import LLM

OPTIONS: dict[str, Any] = {
    **{"skip_tokenizer_init": True, "enable_prompt_embeds": True, "dtype": "float32"},
    **{"enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "max_cpu_loras": 2},
    **{"block_size": 4, "max_model_len": 120, "num_kv_blocks": 200, "max_num_seqs": 4},
    **{"max_num_batched_tokens": 20},
}
CASES: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True, "num_kv_blocks": 31},
    {"speculative_config": {"method": "ngram", "adaptive": False}, "max_loras": 1},
    {"kv_offloading_size": 0.001, "num_kv_blocks": 31},
    {"tensor_parallel_size": 2},
]


@pytest.mark.small(options=CASES[:2])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_each_adapter_answers_for_itself(options: dict[str, Any], tmp_path: Path) -> None:
    base = make_qwen3(tmp_path / "base")
    models: list[nn.Module] = [base]
    adapters = [None]
    for index in (1, 2):
        folder = tmp_path / f"adapter{index}"
        models.append(write_adapter(base, folder, index, size=0.15))
        adapters.append(request_for(folder, f"adapter{index}", index))
    prompts: list[Prompt] = mixed_prompts(base)
    with LLM(str(tmp_path / "base"), **OPTIONS | options) as llm:
        for _ in range(2):
            given = [(prompt, each) for prompt in prompts for each in adapters]
            several = [prompt for prompt, _ in given]
            outputs = llm.generate(
                several, greedy(), use_tqdm=False, lora_request=[each for _, each in given]
            )
            found = [list(output.outputs[0].token_ids) for output in outputs]
            expected = [expected_tokens(model, prompt) for prompt in prompts for model in models]
            assert found == expected
        assert llm.stats.prefix_cache_hits > 0
    assert len({tuple(tokens) for tokens in expected}) > 2 * len(prompts)
