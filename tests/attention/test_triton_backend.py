"""`attention_backend="triton"` end to end, in Triton's interpreter, against the torch backend."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.torch import TorchAttention

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def greedy_tokens(
    model: Path | str, prompts: list[list[int]], max_tokens: int, **options: Any
) -> list[list[int]]:
    params = replace(GREEDY, max_tokens=max_tokens)
    with LLM(model, dtype="float32", skip_tokenizer_init=True, device="cpu", **options) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.size("full")
@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ({}, {"block_size": 16}),
        ({"num_key_value_heads": 1}, {"block_size": 32, "max_num_batched_tokens": 16}),
        ({"num_attention_heads": 6, "head_dim": 8}, {"num_kv_blocks": 6, "max_model_len": 64}),
        ({"num_key_value_heads": 4, "head_dim": 40}, {"enable_prefix_caching": False}),
        ({}, {"kernel_config": {"merge_in_attention": True, "dependent_launch": True}}),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_the_torch_backend(
    tmp_path: Path, overrides: dict[str, int], options: dict[str, Any]
) -> None:
    make_qwen3(tmp_path, **overrides)
    prompts = [[1], [2] * 17, list(range(40)), [*range(32), 9], [5, 6, 7]]
    options = {"max_num_seqs": 4, "max_tokens": 3} | options
    ours = greedy_tokens(tmp_path, prompts, attention_backend="triton", **options)
    # Options of a GPU are checked and change nothing elsewhere.
    assert ours == greedy_tokens(tmp_path, prompts, **options)


@pytest.mark.size("full")  # the interpreter takes seconds; the test above is of the same kind
def test_so_are_those_of_the_bundled_model() -> None:
    with LLM("tiny-qwen3", device="cpu") as llm:
        question = [{"role": "user", "content": "What is a block table?"}]
        first = llm.chat(question, replace(GREEDY, max_tokens=1), use_tqdm=False)[0]
    prompts = [first.prompt_token_ids]
    ours = greedy_tokens("tiny-qwen3", prompts, max_tokens=5, attention_backend="triton")
    assert ours == greedy_tokens("tiny-qwen3", prompts, max_tokens=5)


@pytest.mark.parametrize(
    ("sliding_window", "soft_cap"), [(None, None), (5, None), (None, 0.5), (20, 0.5)]
)
def test_windows_and_soft_caps_are_those_of_the_torch_backend(
    sliding_window: int | None, soft_cap: float | None
) -> None:
    """A decode row and a chunk behind a prefix."""
    from nanoserve.attention.triton import TritonAttention

    torch.manual_seed(0)
    metadata = AttentionMetadata(
        positions=torch.empty(0),
        slot_mapping=torch.empty(0),  # all is stored already
        cu_seqlens_q=torch.tensor([0, 1, 10], dtype=torch.int32),
        context_lens=torch.tensor([30, 40], dtype=torch.int32),
        block_tables=torch.tensor([[2, 1, 0], [5, 3, 4]], dtype=torch.int32),
        num_decode_rows=1,
        max_query_len=9,
        max_context_len=40,
    )
    layer = AttentionLayer(4, 2, 16, 0.25, sliding_window, soft_cap)
    q, kv_cache = torch.randn(10, 4, 16), KVCache(torch.randn(2, 6, 2, 16, 16))
    attended = TritonAttention().attend(layer, q, kv_cache, metadata)
    expected = TorchAttention().attend(layer, q, kv_cache, metadata)
    assert torch.allclose(attended, expected, atol=2e-6)
