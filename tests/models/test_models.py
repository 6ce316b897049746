"""Every architecture against transformers' own model, on checkpoints that transformers writes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_model
from minicpm_reference import MINICPM4, MiniCPMForCausalLM
from tiny_checkpoints import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DELTA,
    DELTA_MOE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    SMOLLM3,
    edit_json,
    make_checkpoint,
)
from torch import nn
from toy_model import LoudForCausalLM
from transformers import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    GlmForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3NextForCausalLM,
    SmolLM3ForCausalLM,
)

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models import registry
from nanoserve.models.registry import model_class, register_model, supported_architectures

QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 36,
    "head_dim": 12,
}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
NEAR_TIE = 1e-5  # a gap that transformers itself may see the other way round
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 512,  # all of it, as in MiniCPM4: the short factors
    "factor": 4.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CASES = {
    "deepseek-v2": (DeepseekV2ForCausalLM, DEEPSEEK_V2),
    "deepseek-v2, groups": (
        DeepseekV2ForCausalLM,
        DEEPSEEK_V2 | GROUPS | {"q_lora_rank": 28, "mlp_bias": True, "attention_bias": True},
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DEEPSEEK_V3),
    "gemma2": (Gemma2ForCausalLM, GEMMA2),
    "gemma3": (Gemma3ForCausalLM, GEMMA3),
    "glm": (GlmForCausalLM, {}),
    "glm4": (Glm4ForCausalLM, {"tie_word_embeddings": True}),
    "glm4, 1 KV head, a quarter": (
        Glm4ForCausalLM,
        {
            "num_key_value_heads": 1,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.25},
        },
    ),
    "gpt-oss": (GptOssForCausalLM, GPT_OSS),
    "gpt-oss, as implied": (GptOssForCausalLM, {"num_local_experts": 5, "head_dim": 64}),
    "granite": (GraniteForCausalLM, GRANITE | {"tie_word_embeddings": True}),
    "granite, biased": (GraniteForCausalLM, GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "llama": (LlamaForCausalLM, {}),
    "llama, biased": (
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, 1 KV head": (LlamaForCausalLM, {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "minicpm4": (
        MiniCPMForCausalLM,
        MINICPM4 | {"rope_parameters": LONGROPE, "tie_word_embeddings": True},
    ),
    "minicpm, biased": (MiniCPMForCausalLM, MINICPM4 | {"attention_bias": True}),
    "mistral": (MistralForCausalLM, {"sliding_window": None}),
    "mistral, window": (MistralForCausalLM, {"sliding_window": 21}),
    "olmo2": (Olmo2ForCausalLM, {}),
    "olmo2, 1 KV head": (
        Olmo2ForCausalLM,
        {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "phi3": (Phi3ForCausalLM, {"sliding_window": 17}),
    "phi3, longrope": (
        Phi3ForCausalLM,
        {"rope_parameters": LONGROPE, "num_key_value_heads": 1, "hidden_size": 64},
    ),
    "qwen2": (Qwen2ForCausalLM, {"head_dim": 12}),  # 48 / 4; its config.json need not say so
    "qwen2, tied": (
        Qwen2ForCausalLM,
        {"head_dim": 12, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "qwen2-moe": (Qwen2MoeForCausalLM, QWEN2_MOE),
    "qwen2-moe, normalised, tied": (
        Qwen2MoeForCausalLM,
        QWEN2_MOE
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
        | {"norm_topk_prob": True, "tie_word_embeddings": True, "qkv_bias": False}
        | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "qwen3": (Qwen3ForCausalLM, {}),
    "qwen3, window in layer 1": (
        Qwen3ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 3}),
    "mixtral, tied, window": (
        MixtralForCausalLM,
        {"num_local_experts": 5, "sliding_window": 21, "tie_word_embeddings": True},
    ),
    "qwen3-moe": (Qwen3MoeForCausalLM, QWEN3_MOE),
    "qwen3-moe, normalised, tied": (
        Qwen3MoeForCausalLM,
        QWEN3_MOE
        | {"num_experts": 40, "num_experts_per_tok": 3, "norm_topk_prob": True}  # some never chosen
        | {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9},
    ),
    "qwen3-moe, dense layers": (  # all but layer 1
        Qwen3MoeForCausalLM,
        QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3-next": (Qwen3NextForCausalLM, DELTA_MOE),
    "qwen3-next, few dense layers": (
        Qwen3NextForCausalLM,
        DELTA_MOE
        | {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False}
        | {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
        | {"linear_conv_kernel_dim": 2, "linear_num_key_heads": 4, "attention_bias": True},
    ),
    "qwen3.5": (Qwen3_5ForCausalLM, DELTA),
    "qwen3.5, tied": (
        Qwen3_5ForCausalLM,
        DELTA
        | {"tie_word_embeddings": True, "linear_num_value_heads": 6}
        | {"rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.5}},
    ),
    "qwen3.5-moe": (Qwen3_5MoeForCausalLM, DELTA_MOE),
    "smollm3": (SmolLM3ForCausalLM, SMOLLM3),
    "smollm3, window": (  # in the layers without RoPE
        SmolLM3ForCausalLM,
        SMOLLM3
        | {"no_rope_layers": [0, 1, 0, 1], "use_sliding_window": True, "sliding_window": 9}
        | {"attention_bias": True, "mlp_bias": True},
    ),
}

VARIANTS = {  # of architectures that have another case
    "deepseek-v2", "glm", "glm4, 1 KV head, a quarter", "gpt-oss, as implied",
    "granite, biased", "llama, biased",
    "llama, 1 KV head", "minicpm, biased", "mistral",
    "olmo2, 1 KV head", "phi3, longrope", "qwen2, tied", "qwen2-moe, normalised, tied", "qwen3",
    "mixtral", "qwen3-moe",
    "qwen3-moe, normalised, tied", "smollm3",
    "qwen3-next, few dense layers", "qwen3.5, tied", "qwen3.5-moe",
}  # fmt: skip


Made = Callable[[str], tuple[PreTrainedModel, Path]]


def make(case: str, path: Path) -> PreTrainedModel:
    architecture, overrides = CASES[case]
    return make_checkpoint(architecture, path, **overrides)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Make the checkpoint of a case, once for all tests that only read it."""

    @cache
    def make_once(case: str) -> tuple[PreTrainedModel, Path]:
        path = tmp_path_factory.mktemp("case")
        return make(case, path), path

    return make_once


def prompts(count: int) -> list[list[int]]:
    return [
        [(i * i + 7 * j + j * j % 5) % 300 for j in range(1 + 13 * i % 60)] for i in range(count)
    ]


@torch.inference_mode()
def expected_tokens(model: PreTrainedModel, prompt: list[int], ours: list[int]) -> tuple[bool, int]:
    """Whether `ours` are transformers' greedy tokens, but for near-ties, and how many of those."""
    logits = model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(ours).unsqueeze(1)).squeeze(1)
    gaps = best - chosen
    return bool((gaps < NEAR_TIE).all()), int((gaps > 0).sum())


def check(
    model: PreTrainedModel, path: Path, count: int, max_tokens: int = 6, **options: Any
) -> None:
    asked = prompts(count)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(path, skip_tokenizer_init=True, device="cpu", **options) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
    near_ties = 0
    for prompt, output in zip(asked, outputs, strict=True):
        agrees, ties = expected_tokens(model, prompt, output.outputs[0].token_ids)
        assert agrees, (prompt, output.outputs[0].token_ids)
        near_ties += ties
    assert near_ties <= 1


# At small size, the variants are those of log-probabilities.
@pytest.mark.small(case=CASES.keys() - VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(
    case: str, made: Made, by_size: Callable[..., int]
) -> None:
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 50}
    count = by_size(6, 20, 30 if case in VARIANTS else 100)
    check(*made(case), count, attention_backend="torch", **options)


@pytest.mark.small(case=VARIANTS)
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_log_probabilities_are_those_of_transformers(case: str, made: Made) -> None:
    model, path = made(case)
    prompt = prompts(50)[31]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    with LLM(path, skip_tokenizer_init=True, device="cpu") as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    # Rounding grows in a recurrent state. From the values in float64, transformers' in float32
    # differ by 6e-5, and ours by 6e-5 to 1.6e-4, depending on backend and processor. (With other
    # prompts both differ by up to 5e-4.)
    bound = 3e-4 if model.config.model_type.startswith(("qwen3_next", "qwen3_5")) else 1e-4
    for position, entries in enumerate(output.prompt_logprobs[1:]):
        for token_id, entry in entries.items():
            assert abs(entry.logprob - float(expected[position, token_id])) < bound


@pytest.mark.full(
    case=[
        "deepseek-v3",
        "gemma3",
        "gpt-oss",
        "llama, biased",
        "mixtral",
        "olmo2, 1 KV head",
        "phi3",
        "qwen3-next",
        "qwen3.5, tied",
    ]
)
# Mixtral: three experts on two ranks.
@pytest.mark.size("full")
@pytest.mark.parametrize(
    "case",
    [
        "deepseek-v2, groups", "deepseek-v3",
        "gemma2", "gemma3", "glm4", "gpt-oss", "llama, biased", "minicpm4", "mixtral", "olmo2",
        "olmo2, 1 KV head",
        "phi3", "qwen2", "qwen2-moe", "qwen3", "qwen3-moe",
        "qwen3-next", "qwen3.5, tied", "qwen3.5-moe",
    ],
)  # fmt: skip
def test_so_are_those_of_two_ranks(case: str, made: Made) -> None:
    check(*made(case), 12, tensor_parallel_size=2)


@pytest.mark.small(case=["qwen3, window in layer 1"])
@pytest.mark.full(
    case=[
        "deepseek-v3",
        "gemma2",
        "gemma3",
        "gpt-oss",
        "mixtral, tied, window",
        "qwen2",
        "qwen3, window in layer 1",
        "qwen3.5",
    ]
)
@pytest.mark.parametrize(
    "case",
    [
        "deepseek-v2, groups", "deepseek-v3",
        "gemma2", "gemma3", "glm4", "gpt-oss", "llama", "minicpm4",
        "mistral, window", "mixtral, tied, window",
        "olmo2", "phi3", "qwen2", "qwen3, window in layer 1", "qwen3-moe, dense layers",
        "smollm3, window", "qwen3.5",
    ],
)  # fmt: skip
def test_so_are_those_of_the_interpreted_kernels(
    case: str, made: Made, by_size: Callable[..., int]
) -> None:
    """A prefill and a few decodes; a prompt of the larger sizes is longer than any window."""
    options = {"attention_backend": "triton", "max_num_seqs": 3}
    check(*made(case), by_size(2, 3), max_tokens=by_size(2, 3, 6), **options)


# ---------------------------------------------------------------- a model of one's own


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PreTrainedModel:
    """transformers' Llama with louder weights, and a checkpoint that says that it is LoudLlama."""
    monkeypatch.setattr(registry.MODELS, "_entries", registry.MODELS.entries())
    model = make_checkpoint(LlamaForCausalLM, tmp_path)
    edit_json(tmp_path / "config.json", architectures=["LoudLlama"])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight *= 2
    return model


@pytest.mark.small(size=[1])
@pytest.mark.parametrize("size", [1, 2])
def test_a_registered_model_runs_like_any_other(
    loud: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    with pytest.raises(ValueError, match=r"LoudLlama.*supported.*Qwen3ForCausalLM"):
        LLM(tmp_path, skip_tokenizer_init=True)
    # Where the ranks find the class.
    monkeypatch.setenv("PYTHONPATH", str(Path(toy_model.__file__).parent))
    register_model("LoudLlama", LoudForCausalLM)
    check(loud, tmp_path, 12, tensor_parallel_size=size)


def test_a_model_may_be_registered_by_where_it_is(loud: PreTrainedModel, tmp_path: Path) -> None:
    register_model("LoudLlama", "toy_model:LoudForCausalLM")
    assert model_class("LoudLlama") is LoudForCausalLM and "LoudLlama" in supported_architectures()
    check(loud, tmp_path, 3)


def test_the_window_of_a_registered_model_needs_its_flag(tmp_path: Path) -> None:
    """Mistral's files have a window without a flag, and Qwen's have one that is off."""
    model = make_checkpoint(MistralForCausalLM, tmp_path, sliding_window=8)
    edit_json(tmp_path / "config.json", architectures=["OwnMistral"])
    register_model("OwnMistral", "nanoserve.models.llama:LlamaForCausalLM")
    with pytest.raises(ValueError, match="sliding_window=8 without use_sliding_window"):
        LLM(tmp_path, skip_tokenizer_init=True)
    edit_json(tmp_path / "config.json", use_sliding_window=True)
    check(model, tmp_path, 12)


@pytest.mark.usefixtures("loud")
def test_what_cannot_be_registered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*already"):
        register_model("LlamaForCausalLM", LoudForCausalLM)
    with pytest.raises(ValueError, match=r"package\.module:Class"):
        register_model("LoudLlama", "toy_model.LoudForCausalLM")

    class Local(LoudForCausalLM):
        pass

    register_model("LoudLlama", Local)
    with pytest.raises(ValueError, match="other processes cannot import"):
        LLM(tmp_path, skip_tokenizer_init=True, device="cpu", tensor_parallel_size=2)


# ---------------------------------------------------------------- what config.json says


def test_biases_and_head_dim_as_each_architecture_has_them(tmp_path: Path) -> None:
    expected = {
        "llama": (False, False),
        "llama, biased": (True, True),
        "qwen2": (True, False),
    }
    for case, biases in expected.items():
        make(case, tmp_path)
        config = ModelConfig.from_checkpoint(tmp_path)
        assert (config.qkv_bias, config.o_bias) == biases
    edit_json(tmp_path / "config.json", head_dim=..., num_key_value_heads=...)
    config = ModelConfig.from_checkpoint(tmp_path)
    assert (config.head_dim, config.num_key_value_heads) == (12, 4)


def test_a_pickled_checkpoint_is_refused_with_advice(tmp_path: Path) -> None:
    make("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*convert them with transformers"):
        LLM(tmp_path, skip_tokenizer_init=True)


def test_every_supported_architecture_is_there() -> None:
    for architecture in supported_architectures():
        assert issubclass(model_class(architecture), nn.Module)
