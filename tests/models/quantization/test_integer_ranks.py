"""Engines with integer weights on two ranks answer as on one.

Weights are made integers whole, and where ranks have multiples of 32 inputs, each 32 have the scale
that they have on one rank: so the ranks' integers are those of one, and so are the sums of their
products. A rank that cuts a group has smaller ones, which are rounded less.

Sums of ranks still differ in the last bit. It decides how an activation halfway between two
integers is rounded, and which activations lie there depends on the weights and on the processor:
some request has one with 2 of 24 seeds of five experts, and with 6 of 12 of a GPTQ checkpoint of 8
bits; log-probabilities shift by up to 0.03. So where activations are integers, up to eight seeds of
weights are tried: each request must have equal answers with one of them, and nearly the same
log-probabilities of its prompt with all that are tried.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import CASES, make_quantized, write_awq
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_checkpoint, make_qwen3
from torch import Tensor
from transformers import MixtralForCausalLM

pytest.importorskip("numba")

from nanoserve import LLM, SamplingParams
from nanoserve.outputs import RequestOutput

# Every test starts processes. At small size, tests/models/test_models.py has two ranks that answer
# as one does, and test_integer_engine.py has integers.
pytestmark = pytest.mark.size("full")

NUM_REQUESTS = 6
COMMON: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, **COMMON),
    SamplingParams(temperature=0.8, seed=3, n=2, **COMMON),
]
WIDE = {"hidden_size": 64, "intermediate_size": 128}


def answers(path: Path, size: int, **options: Any) -> list[RequestOutput]:
    asked = [[(j * j + i % 4) % 297 for j in range(1 + 9 * i % 37)] for i in range(NUM_REQUESTS)]
    options = {"dtype": "float32", "max_num_batched_tokens": 16, "max_num_seqs": 5} | options
    llm = LLM(path, tensor_parallel_size=size, device="cpu", skip_tokenizer_init=True, **options)
    with llm:
        params = [PARAMS[i % 2] for i in range(len(asked))]
        return llm.generate(asked, params, use_tqdm=False)


def logprobs_of(output: RequestOutput) -> Tensor:
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return torch.tensor([entry.logprob for position in positions for entry in position.values()])


def assert_same(write: Callable[..., Any], path: Path, size: int = 2, **options: Any) -> None:
    """Assert that `size` ranks answer as one does, with what `write(seed=...)` writes to `path`."""
    seeds = [1] if options.get("quantization_activations") == "none" else range(1, 9)
    unequal = set(range(NUM_REQUESTS))
    for seed in seeds:
        write(seed=seed)
        pairs = zip(answers(path, size, **options), answers(path, 1, **options), strict=True)
        unequal -= {i for i, pair in enumerate(pairs) if have_same_answers(*pair)}
        if not unequal:
            return
    pytest.fail(f"requests {sorted(unequal)} have other answers on {size} ranks with every seed")


def have_same_answers(ours: RequestOutput, theirs: RequestOutput) -> bool:
    same_tokens = [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
    if ours.prompt_logprobs is None:
        return same_tokens
    # One activation that is rounded otherwise shifts these a little; which tokens are the likeliest
    # may change, so only the prompt's own are compared.
    torch.testing.assert_close(prompt_of(ours), prompt_of(theirs), rtol=0.02, atol=0.05)
    a, b = logprobs_of(ours), logprobs_of(theirs)
    return same_tokens and a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def prompt_of(output: RequestOutput) -> Tensor:
    """Return the log-probabilities of the prompt's own tokens, but its first."""
    given = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([position[token].logprob for token, position in given])


UNEVEN: dict[str, Any] = {"vocab_size": 301, "tie_word_embeddings": True}


FEW_HEADS: dict[str, Any] = {"num_key_value_heads": 1, "vocab_size": 297}
# Each of two ranks has 48 inputs of attention's output, which cut a group of 32.
SIX_HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.mark.full(overrides=[UNEVEN, FEW_HEADS])
@pytest.mark.parametrize(
    ("form", "overrides"),
    [
        ("int8", {}),
        ("int8", UNEVEN),
        ("int8", FEW_HEADS),
        ("int4", {}),
        ("int4", UNEVEN),
    ],
    ids=str,
)
def test_ranks_together_answer_as_one_does(
    form: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    write = partial(make_qwen3, tmp_path, **WIDE, **overrides)
    assert_same(write, tmp_path, quantization=form)


@pytest.mark.full(num_experts=[5])
@pytest.mark.parametrize("num_experts", [5, 2])
def test_experts_are_shared(num_experts: int, tmp_path: Path) -> None:
    write = partial(make_checkpoint, MixtralForCausalLM, tmp_path, num_local_experts=num_experts)
    assert_same(write, tmp_path, quantization="int8")


@pytest.mark.parametrize("size", [4])
def test_more_ranks_than_experts(size: int, tmp_path: Path) -> None:
    """A rank without any has nothing to make integers of."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}  # 32 inputs for each of 4 ranks
    write = partial(make_checkpoint, MixtralForCausalLM, tmp_path, num_local_experts=2, **heads)
    assert_same(write, tmp_path, size, quantization="int8")


@pytest.mark.parametrize(
    ("form", "overrides"), [("int8", {}), ("int8", SIX_HEADS), ("int4", {})], ids=str
)
def test_ranks_whose_activations_are_floats_answer_as_one_does(
    form: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """They share no scale, and where they cut a group, both have its scale."""
    write = partial(make_qwen3, tmp_path, **WIDE, **overrides)
    assert_same(write, tmp_path, quantization=form, quantization_activations="none")


@pytest.mark.full(case=["awq", "bitsandbytes NF4"])
@pytest.mark.parametrize("case", ["awq", "gptq, 8 bits", "fp8, blocks", "bitsandbytes NF4"])
def test_a_quantized_checkpoint_is_shared(case: str, tmp_path: Path) -> None:
    # A rank's 48 inputs cut a group of 32, where weights have groups of 32.
    cuts = "fp8" in case or "NF4" in case
    options = {"quantization_activations": "none"} if cuts else {}
    assert_same(partial(make_quantized, tmp_path, *CASES[case]), tmp_path, **options)


@pytest.mark.full(case=["gptq, act order"])
@pytest.mark.parametrize("case", ["gptq, act order", "gptq, uneven groups"])
def test_groups_that_are_spread_over_the_inputs_become_others(case: str, tmp_path: Path) -> None:
    """A rank has some inputs of every group: what it has is rounded once more, to 8 bits."""
    make_quantized(tmp_path, *CASES[case])
    for ours, theirs in zip(answers(tmp_path, 2), answers(tmp_path, 1), strict=True):
        if ours.prompt_logprobs is not None:
            a, b = (logprobs_of(o)[:1] for o in (ours, theirs))
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.3)


def test_a_plain_linear_among_integers(tmp_path: Path) -> None:
    """As checkpoints have it whose makers left some modules as they were."""
    config = CASES["awq"][1] | {"modules_to_not_convert": ["o_proj"]}

    def write(seed: int) -> None:
        make_quantized(tmp_path, write_awq, config, seed=seed)
        tensors = load_file(tmp_path / "model.safetensors")
        for name in [name for name in tensors if name.endswith("o_proj.qweight")]:
            own = name.removesuffix("qweight")
            for part in ("qweight", "qzeros", "scales"):
                del tensors[own + part]
            generator = torch.Generator().manual_seed(seed)
            tensors[own + "weight"] = torch.randn(64, 64, generator=generator) / 5
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    assert_same(write, tmp_path)
