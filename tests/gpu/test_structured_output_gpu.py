"""Grammars on an NVIDIA GPU: masks in the sampling kernel, and the tokens of a CPU, in float32.

pytest -m gpu tests/gpu/test_structured_output_gpu.py   (engines need the extra nanoserve[guided])
"""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.kernels.triton.choose_tokens import choose_tokens, pack_settings
from nanoserve.sampling.token_masks import bits_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GUIDES: list[dict[str, Any]] = [
    {"regex": r"(yes|no), [0-9]{2,4}!"},
    {"choice": ["block table", "block", "KV cache"]},
    {
        "json": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "is_active": {"type": "boolean"},
            },
            "required": ["name", "is_active"],
            "additionalProperties": False,
        }
    },
]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.1},
]


def device_array(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.int32)).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [2048, 5001, 151_936])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_mask_is_as_if_its_logits_were_not_there(
    temperature: float, vocab_size: int, dtype: torch.dtype
) -> None:
    rng, num_rows = np.random.default_rng(vocab_size), 12
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size)) * 3).to(dtype).cuda()
    num_words = -(-vocab_size // 32)
    masks = rng.integers(-(2**31), 2**31, (5, num_words), dtype=np.int64).astype(np.int32)
    masks[0], masks[1] = 0, 1 << 5
    mask_rows = rng.permutation([0, 1, 2, 3, 4, -1, -1, 2, 3, 4, 1, 0])
    settings = torch.from_numpy(pack_settings(temperature, 5, 0)).view(1, 8).cuda()
    rows = np.arange(num_rows)
    places = device_array(0 * rows), device_array(rows), settings
    chosen = choose_tokens(
        logits, *places, masks=torch.from_numpy(masks).cuda(), mask_rows=device_array(mask_rows)
    )
    changed = logits.float()
    for row, mask_row in enumerate(mask_rows):
        if mask_row >= 0:
            changed[row] = changed[row].masked_fill(
                ~bits_of(masks[[mask_row]], changed[[row]])[0], -torch.inf
            )
    assert chosen.tolist() == choose_tokens(changed, *places).tolist()
    assert (chosen.cpu().numpy()[mask_rows == 0] == -1).all()


def answers(llm: LLM) -> list[str]:
    params = [
        SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(**guide), **kind)
        for guide in GUIDES
        for kind in KINDS
    ]
    params += [SamplingParams(temperature=0, max_tokens=40)] * 3  # beside them, one without
    question = [{"role": "user", "content": "What is a KV cache?"}]
    outputs = llm.chat([question] * len(params), params, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("jumps", [False, True], ids=["token by token", "forced runs"])
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"async_scheduling": True, "capture_sampling": True},
        {"enforce_eager": True, "max_num_seqs": 3, "num_kv_blocks": 30, "max_model_len": 128},
    ],
    ids=str,
)
def test_answers_are_those_of_a_cpu(options: dict[str, Any], jumps: bool) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    common: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 400}
    with LLM("tiny-qwen3", device="cpu", **common) as llm:
        expected = answers(llm)
    guiding = {"structured_outputs_config": {"jump_forward": jumps}}
    with LLM("tiny-qwen3", device="cuda", **common | options | guiding) as llm:
        assert answers(llm) == expected
        assert (llm.stats.num_accepted_tokens > 0) is jumps
