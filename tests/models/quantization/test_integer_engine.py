"""Engines with integer weights, against transformers with what the integers mean."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_models import dequantized, distance, our_logits, reference_logits
from quantized_checkpoints import CASES, make_quantized
from tiny_checkpoints import (
    DELTA,
    DELTA_MOE,
    GEMMA2,
    GEMMA3,
    GRANITE,
    make_checkpoint,
    make_qwen3,
)
from torch import Tensor, nn
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3NextForCausalLM,
)

pytest.importorskip("numba")

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.kernels.cpu.integer_linear import IntegerPanels
from nanoserve.models.quantization.online import quantize_int4

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # whole groups of 32, which int4 wants
BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_WIDE = {
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
ARCHITECTURES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, {}),
    "qwen3, tied": (Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "llama, biased": (LlamaForCausalLM, BIASED),
    "gemma2": (Gemma2ForCausalLM, GEMMA2),
    "gemma3": (Gemma3ForCausalLM, GEMMA3),
    "phi3": (Phi3ForCausalLM, {"sliding_window": 17}),
    "qwen3-moe": (Qwen3MoeForCausalLM, MOE),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 5}),
    "qwen3-next": (Qwen3NextForCausalLM, DELTA_MOE | DELTA_WIDE),
    "qwen3.5": (Qwen3_5ForCausalLM, DELTA | DELTA_WIDE),
    "glm4": (Glm4ForCausalLM, {}),
    "granite": (GraniteForCausalLM, GRANITE),
    "olmo2": (Olmo2ForCausalLM, {}),
    "qwen2-moe": (Qwen2MoeForCausalLM, MOE | {"shared_expert_intermediate_size": 64}),
}
# Rounded the other way, an input moves by a 254th: seen are parts of a thousandth.
NEAR = 0.01


def int8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round() * scale


def int4(group_size: int, weight: Tensor) -> Tensor:
    return quantize_int4(weight, group_size).dequantize()


FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "int8": ({"quantization": "int8"}, int8),
    "int4": ({"quantization": "int4"}, partial(int4, 32)),
}


@pytest.mark.small(name=["qwen3, tied", "gemma2", "phi3", "mixtral"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("form", FORMATS)
def test_logits_are_those_of_the_dequantized_model(name: str, form: str, tmp_path: Path) -> None:
    architecture, settings = ARCHITECTURES[name]
    make_checkpoint(architecture, tmp_path, **WIDE, **settings)
    options, to_floats = FORMATS[form]
    expected = reference_logits(tmp_path, dequantized(tmp_path, to_floats), tmp_path / "plain")
    found, floats = our_logits(tmp_path, **options), our_logits(tmp_path)
    assert distance(found, expected) < NEAR
    # The weights are rounded for all to see; those of the test would else prove nothing.
    assert distance(found, floats) > (4 * NEAR if form == "int4" else NEAR)


@pytest.mark.parametrize("group_size", [64])
def test_int4_in_groups_that_were_asked_for(group_size: int, tmp_path: Path) -> None:
    make_qwen3(tmp_path, **WIDE | {"intermediate_size": 128})
    weights = dequantized(tmp_path, partial(int4, group_size))
    expected = reference_logits(tmp_path, weights, tmp_path / "plain")
    options = {"quantization": "int4", "quantization_group_size": group_size}
    assert distance(our_logits(tmp_path, **options), expected) < NEAR
    assert distance(our_logits(tmp_path, quantization="int4"), expected) > 4 * NEAR


def is_integer(form: Any) -> bool:
    return isinstance(form, IntegerPanels)


@pytest.mark.parametrize("name", ["qwen3", "qwen3, tied", "qwen3-moe", "mixtral"])
def test_linears_are_integers_and_nothing_else_is(name: str, tmp_path: Path) -> None:
    architecture, settings = ARCHITECTURES[name]
    make_checkpoint(architecture, tmp_path, **WIDE, **settings)
    options = {"dtype": "bfloat16", "device": "cpu", "skip_tokenizer_init": True}
    with LLM(tmp_path, quantization="int8", **options) as llm:
        model = llm.engine.executor.model
        layers = [model.model.layers[0].self_attn.qkv_proj, model.model.layers[1].self_attn.o_proj]
        assert all(is_integer(layer.form) and layer.weight is None for layer in layers)
        assert is_integer(model.lm_head.form) and model.lm_head.weight is None
        moe = model.model.layers[1].mlp
        if "mo" in name or "mix" in name:
            experts = [*moe.gate_up, *moe.down]
            assert len(experts) == 2 * moe.num_experts and all(map(is_integer, experts))
        else:
            assert is_integer(moe.gate_up_proj.form) and is_integer(moe.down_proj.form)
        left = dict(model.named_parameters())
        assert not any(parameter.is_meta for parameter in left.values())
        assert {p.dtype for p in left.values()} == {torch.bfloat16}
        kinds = {"norm", "embed_tokens", "router"}
        assert all(any(kind in name for kind in kinds) for name in left), left.keys()
        assert ("model.embed_tokens.weight" in left) and isinstance(model, nn.Module)


# ---------------------------------------------------------------- with everything else


@pytest.fixture(scope="module", params=["int8", "int4"])
def integer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Weights whose answers have no near-ties. Attention over a chunk of another length differs in
    the last bit, by which an input may be rounded the other way: 1/254 of its row's largest.
    """
    path = tmp_path_factory.mktemp("qwen3")
    make_qwen3(path, seed=1, **WIDE)
    options = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    options |= {"quantization": request.param, "num_kv_blocks": 64, "attention_backend": "torch"}
    asked = [[(j * j + i % 3) % 300 for j in range(1 + 9 * i % 37)] for i in range(10)]
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=6, ignore_eos=True),
    ]
    params = [params[i % 3] for i in range(len(asked))]
    with LLM(path, enable_prefix_caching=False, **options) as llm:
        alone = [
            llm.generate([prompt], p, use_tqdm=False)[0]
            for prompt, p in zip(asked, params, strict=True)
        ]
    return path, options, asked, params, alone


@pytest.mark.small(integer=["int8"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"num_kv_blocks": 5, "max_model_len": 64},
        {"async_scheduling": True, "block_size": 4},
        {"long_prefill_token_threshold": 7, "scheduling_policy": "priority"},
    ],
    ids=str,
)
def test_an_answer_is_the_same_alone_and_among_others(integer, changes: dict[str, Any]) -> None:
    """A row's scale is its own, and its products do not depend on the rows beside it."""
    path, options, asked, params, alone = integer
    with LLM(path, **options | changes) as llm:
        for _ in range(2):
            outputs = llm.generate(asked, params, use_tqdm=False)
            for output, expected in zip(outputs, alone, strict=True):
                found = [completion.token_ids for completion in output.outputs]
                assert found == [completion.token_ids for completion in expected.outputs]
                for a, b in zip(output.outputs, expected.outputs, strict=True):
                    for ours, theirs in zip(a.logprobs or [], b.logprobs or [], strict=True):
                        assert all(abs(ours[t].logprob - theirs[t].logprob) < 1e-3 for t in theirs)
        assert llm.stats.prefix_cache_hits > 0
        assert llm.stats.num_preemptions > 0 or changes.get("num_kv_blocks") != 5


@pytest.mark.small(integer=["int8"])
def test_k_and_v_may_be_integers_too(integer) -> None:
    path, options, asked, params, alone = integer
    with LLM(path, kv_cache_dtype="int8", **options) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
    same = [
        ours.outputs[0].token_ids[0] == theirs.outputs[0].token_ids[0]
        for ours, theirs in zip(outputs, alone, strict=True)
    ]
    assert sum(same) >= 8, same


# ---------------------------------------------------------------- checkpoints of integers


@pytest.mark.small(
    case=["gptq, act order", "awq", "fp8, blocks", "bitsandbytes NF4", "gptq, uneven groups"]
)
@pytest.mark.parametrize("case", CASES)
def test_a_quantized_checkpoint_runs_as_integers(case: str, tmp_path: Path) -> None:
    """FP8 and NF4, whose values are no integers, are rounded to 8 bits in groups of 32."""
    weights = make_quantized(tmp_path, *CASES[case])
    if "fp8" in case or "NF4" in case:
        for name, weight in weights.items():
            if "_proj.weight" in name:
                weights[name] = int8(weight.view(-1, 32)).view(weight.shape)
    elif "uneven" in case:  # no groups that a product could have: a scale for each row
        weights |= {name: int8(w) for name, w in weights.items() if "_proj.weight" in name}
    plain = frozenset([len(weights["lm_head.weight"])])
    # Activations have groups that weights have, up to 32.
    most = 16 if CASES[case][1].get("group_size") == 16 else 32
    options: dict[str, Any] = {}
    if "act order" in case:  # groups are of inputs that lie apart
        most, options = 0, {"quantization_activations": "none"}
    expected = reference_logits(tmp_path, weights, tmp_path / "plain", plain, most)
    assert distance(our_logits(tmp_path, **options), expected) < NEAR


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "quantization='int8' must be 'gptq'"),
        ({"quantization": "awq"}, "quantization='awq' must be 'gptq'"),
    ],
    ids=str,
)
def test_what_the_checkpoint_contradicts_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_quantized(tmp_path, *CASES["gptq"])
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, device="cpu", skip_tokenizer_init=True, **options)
    llm = LLM(tmp_path, device="cpu", skip_tokenizer_init=True, quantization="gptq")
    llm.close()


def test_options_that_name_nothing_are_refused(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    refused = {
        "quantization='int3'.*'int8'.*'int4'": {"quantization": "int3"},
        "quantization_group_size=48.*32.*64.*128": {"quantization_group_size": 48},
        "quantization_group_size=64 needs quantization='int4'": {
            "quantization": "int8",
            "quantization_group_size": 64,
        },
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            EngineConfig(str(tmp_path), **options)
    with pytest.raises(ValueError, match=r"'gptq' is a checkpoint format.*int8 or int4"):
        LLM(tmp_path, device="cpu", skip_tokenizer_init=True, quantization="gptq")
    with pytest.raises(ValueError, match=r"48 inputs .* cannot be divided into groups of 32 to 32"):
        LLM(tmp_path, device="cpu", skip_tokenizer_init=True, quantization="int4")
