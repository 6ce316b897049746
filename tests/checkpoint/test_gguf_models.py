"""Models from GGUF files against transformers' with the same dequantized weights, in float32."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="pip install 'nanoserve[gguf]'")

from gguf_latent import old_settings
from gguf_models import KINDS, ModelWriter
from minicpm_reference import MINICPM4, MiniCPMForCausalLM
from tiny_checkpoints import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DELTA,
    DELTA_MOE,
    GPT_OSS,
    GRANITE,
    make_checkpoint,
    prompt_logits,
)
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
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
from nanoserve.checkpoint.gguf.source import GGUFSource
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.quantized_loader import load_deferred
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.registry import model_class

PROMPT = [(7 * i * i + i) % 300 for i in range(40)]
SMALL = {"hidden_size": 64, "intermediate_size": 96}  # blocks of 32
LARGE = {"hidden_size": 256, "intermediate_size": 512}  # and of 256
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9}
GEMMA |= {"tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)],
}  # fmt: skip
# A file has one of YaRN's two factors. Rows are blocks of 32.
DEEPSEEK = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16, "moe_intermediate_size": 32,
    "rope_parameters": DEEPSEEK_V2["rope_parameters"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
HEADS = {  # whose rows are blocks of 32, or that share some
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def llama3_factors() -> np.ndarray:
    """As the converter computes them (LlamaModel.generate_extra_tensors), for heads of 16."""
    factors = []
    for i in range(0, 16, 2):
        wavelength = 2 * math.pi * 1e4 ** (i / 16)
        if wavelength < 256 / 4.0:
            factors.append(1.0)
        elif wavelength > 256 / 1.0:
            factors.append(8.0)
        else:
            smooth = (256 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(factors, np.float32)


# arch, transformers' model, its settings, and what the file says beside the usual
CASES: dict[str, tuple[str, type[PreTrainedModel], dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", LlamaForCausalLM, {}, {}),
    "llama, biased, tied": (
        "llama", LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, {},
    ),
    "llama 3.1": (
        "llama", LlamaForCausalLM, {"rope_parameters": LLAMA3},
        {"rope_freqs.weight": llama3_factors()},
    ),
    "llama, linear": (
        "llama", LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    "mixtral": (
        "llama", MixtralForCausalLM, {"num_local_experts": 3},
        {"expert_count": 3, "expert_used_count": 2},
    ),
    "minicpm": (
        "minicpm", MiniCPMForCausalLM, MINICPM4,
        {"embedding_scale": 12.0, "residual_scale": 1.4 / math.sqrt(2), "logit_scale": 64 / 16},
    ),
    "qwen2": ("qwen2", Qwen2ForCausalLM, {}, {}),
    "qwen2, yarn": (
        "qwen2", Qwen2ForCausalLM, {"rope_parameters": YARN},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 128},
    ),
    "qwen3": ("qwen3", Qwen3ForCausalLM, {}, {}),
    "qwen3-moe": (
        "qwen3moe", Qwen3MoeForCausalLM, MOE | {"norm_topk_prob": True},
        {"expert_count": 6, "expert_used_count": 2},
    ),
    "gemma2": (
        "gemma2", Gemma2ForCausalLM,
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "gemma3", Gemma3ForCausalLM,
        GEMMA
        | {"num_hidden_layers": 7, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gpt-oss": (
        "gpt-oss", GptOssForCausalLM,
        GPT_OSS | {"rope_parameters": YARN | {"truncate": False}, "swiglu_alpha": 1.702}
        | {"swiglu_limit": 7.0},
        {"expert_count": 6, "expert_used_count": 3, "rope.scaling.type": "yarn",
         "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
    ),
    "phi3": (
        "phi3", Phi3ForCausalLM, {"sliding_window": 17},
        {"attention.sliding_window": 17, "attention.key_length": None, "vocab_size": None},
    ),
    "glm4": (
        "glm4", Glm4ForCausalLM,
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, {},
    ),
    "granite": (
        "granite", GraniteForCausalLM, GRANITE,
        {"attention.scale": 0.15, "embedding_scale": 12.0, "residual_scale": 0.22,
         "logit_scale": 8.0},
    ),
    "granite, biased, without scales": (
        "granite", GraniteForCausalLM, {"attention_multiplier": 0.25, "attention_bias": True},
        {"logit_scale": 1.0},
    ),
    "olmo2": ("olmo2", Olmo2ForCausalLM, {}, {}),
    "qwen2-moe": (
        "qwen2moe", Qwen2MoeForCausalLM,
        MOE | {"head_dim": 16, "shared_expert_intermediate_size": 64},
        {"expert_count": 6, "expert_used_count": 2},
    ),
    "smollm3": (  # every fourth layer has no RoPE
        "smollm3", SmolLM3ForCausalLM, {"num_hidden_layers": 5, "tie_word_embeddings": True}, {},
    ),
    "deepseek-v2": ("deepseek2", DeepseekV2ForCausalLM, DEEPSEEK_V2 | DEEPSEEK, {}),
    "deepseek-v2, before 2025": (
        "deepseek2", DeepseekV2ForCausalLM,
        DEEPSEEK_V2 | DEEPSEEK
        | {"q_lora_rank": 32, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        {"expert_gating_func": None},
    ),
    "deepseek-v3": (
        "deepseek2", DeepseekV3ForCausalLM, DEEPSEEK_V3 | DEEPSEEK | {"q_lora_rank": 32}, {},
    ),
    "deepseek-v3, without yarn": (
        "deepseek2", DeepseekV3ForCausalLM,
        DEEPSEEK_V3 | DEEPSEEK | {"n_shared_experts": 1, "rope_parameters": {"rope_theta": 1e4}},
        {"expert_gating_func": None},
    ),
    "qwen3-next": (
        "qwen3next", Qwen3NextForCausalLM, DELTA_MOE | HEADS,
        {"expert_count": 6, "expert_used_count": 2},
    ),
    "qwen3.5": (
        "qwen35", Qwen3_5ForCausalLM, DELTA | HEADS | {"linear_num_value_heads": 6},
        {"attention.recurrent_layers": None},
    ),
    "qwen3.5-moe": (
        "qwen35moe", Qwen3_5MoeForCausalLM, DELTA_MOE | HEADS,
        {"expert_count": 6, "expert_used_count": 2},
    ),
    "phi3, longrope": (
        "phi3", Phi3ForCausalLM,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32,
         "sliding_window": None},
        {
            "attention.sliding_window": 0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / 32) / math.log(32)),
            "rope_factors_short.weight": np.ones(8, np.float32),
            "rope_factors_long.weight": np.arange(1, 9, dtype=np.float32),
        },
    ),
}  # fmt: skip


def write(case: str, folder: Path, kind: str = "F32", **sizes: Any) -> tuple[PreTrainedModel, Path]:
    """transformers' model, and the file, with the same weights in both."""
    arch, architecture, settings, extra = CASES[case]
    settings = SMALL | settings | sizes
    model = make_checkpoint(architecture, folder / "checkpoint", **settings)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    if "before 2025" in case:
        extra = old_settings(model.config) | extra
    ModelWriter(model, arch, kind).write(folder / "model.gguf", extra)
    return model, folder / "model.gguf"


@torch.inference_mode()
def our_logits(path: Path) -> torch.Tensor:
    config = ModelConfig.from_checkpoint(path, "float32")
    model = model_class(config.architecture)(config, LayerContext())
    load_deferred(model, path)  # of which nothing is deferred: integers become plain numbers
    return prompt_logits(model, PROMPT)


@torch.inference_mode()
def assert_agrees(model: PreTrainedModel, path: Path) -> None:
    expected = model(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 0.1 and expected.isfinite().all()
    torch.testing.assert_close(our_logits(path), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.small(case=CASES.keys() - {"granite, biased, without scales", "olmo2"})
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    assert_agrees(*write(case, tmp_path))


@pytest.mark.small(case=["llama", "mixtral", "phi3"], kind=["BF16", "Q4_0"])
@pytest.mark.parametrize(
    "case",
    [
        *("llama", "qwen3", "gemma3", "glm4", "gpt-oss", "mixtral", "olmo2", "phi3", "qwen2-moe"),
        *("deepseek-v2, before 2025", "deepseek-v3", "qwen3-next", "qwen3.5", "qwen3.5-moe"),
    ],
)
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "MXFP4"])
def test_so_they_are_from_smaller_types(case: str, kind: str, tmp_path: Path) -> None:
    assert_agrees(*write(case, tmp_path, kind))


@pytest.mark.small(case=["llama"])
@pytest.mark.parametrize("case", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("_K")])
def test_so_they_are_from_blocks_of_256(case: str, kind: str, tmp_path: Path) -> None:
    sizes = LARGE | {"head_dim": 64} | ({"moe_intermediate_size": 256} if "moe" in case else {})
    model, path = write(case, tmp_path, kind, **sizes)
    assert_agrees(model, path)


@pytest.mark.small(case=["llama", "qwen2", "qwen3"], kind=["Q4_0"])
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen2-moe", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@torch.inference_mode()
def test_transformers_reads_the_same_from_the_file(case: str, kind: str, tmp_path: Path) -> None:
    """Its own reader of GGUF, where it knows the architecture: names, permutation, settings."""
    pytest.importorskip("accelerate")
    # There are sizes that it does not read, and takes from its defaults.
    sizes = {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    sizes = {"qwen2-moe": sizes, "qwen3": {"head_dim": 128}}.get(case, {})
    _, path = write(case, tmp_path, kind, **sizes)
    options = {"gguf_file": path.name, "dtype": torch.float32}
    assert_agrees(AutoModelForCausalLM.from_pretrained(tmp_path, **options), path)


@pytest.mark.small(ranks=[1])
@pytest.mark.parametrize(
    ("case", "kind", "ranks"),
    [
        *(("llama", "F32", 1), ("llama", "Q8_0", 2), ("mixtral", "Q4_0", 2)),
        *(("deepseek-v2", "F32", 1), ("deepseek-v3", "Q8_0", 2)),
    ],
)
@torch.inference_mode()
def test_an_engine_generates_from_a_file(case: str, kind: str, ranks: int, tmp_path: Path) -> None:
    """On two ranks, each takes its part of the heads or its experts, one more or one less."""
    model, path = write(case, tmp_path, kind)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = {"skip_tokenizer_init": True, "device": "cpu", "num_kv_blocks": 8}
    options |= {"tensor_parallel_size": ranks}
    with LLM(path, dtype="float32", max_num_seqs=4, **options) as llm:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    ours = output.outputs[0].token_ids
    logits = model(torch.tensor([PROMPT + ours])).logits[0, len(PROMPT) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ours)[:, None])[:, 0]
    # The inputs of products with integers are rounded to integers, too.
    tolerance = 1e-4 if kind == "F32" else 0.1 * float(logits.std())
    assert (logits.amax(dim=1) - chosen).max() <= tolerance


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")],
)
def test_the_data_type_follows_the_matrices(kind: str, dtype: str, tmp_path: Path) -> None:
    _, path = write("qwen3", tmp_path, kind)
    assert ModelConfig.from_checkpoint(path).dtype == dtype


def test_no_gemma_computes_in_float16_by_itself(tmp_path: Path) -> None:
    _, path = write("gemma2", tmp_path, "F16")
    assert ModelConfig.from_checkpoint(path).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("case", "extra", "message"),
    [
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned=False"),
        ("granite", {"logit_scale": 0.0}, "logit_scale=0.0"),
        ("granite", {"embedding_scale": "12"}, "embedding_multiplier='12'"),
        ("glm4", {"rope.dimension_count": 18}, "partial_rotary_factor=1.125"),
        ("glm4", {"rope.dimension_count": 5}, "of head_dim=16 is 5, which must be even"),
        ("olmo2", {"attention.sliding_window": 4096}, "attention.sliding_window"),  # OLMo 3
        ("smollm3", {"rope.dimension_count": 8}, "dimension_count=8 is not supported"),
        ("deepseek-v2", {"expert_gating_func": 3}, "expert_gating_func=3 is not one of"),
        ("deepseek-v2", {"expert_weights_norm": True}, "norm_topk_prob=True with topk_method"),
        ("deepseek-v2", {"attention.key_length": 48}, r"must be \(1, 40, 32\), not \(1, 48, 32\)"),
        (
            "deepseek-v2",
            {"attention.head_count_kv": 4},
            r"must be \(1, 40, 32\), not \(4, 40, 32\)",
        ),
        ("deepseek-v2", {"attention.key_length_mla": 8}, "must be below 8, the size of a head"),
        ("deepseek-v2", {"rope.scaling.yarn_log_multiplier": "a"}, "log_multiplier='a'"),
        ("deepseek-v2", {"nextn_predict_layers": 3}, "nextn_predict_layers=3"),
        ("deepseek-v3", {"attention.temperature_scale": 0.1}, "temperature_scale"),  # Mistral 3
        ("qwen3", {"nextn_predict_layers": 1}, "nextn_predict_layers"),
    ],
)
def test_what_another_computation_needs_is_refused_by_name(
    case: str, extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arch, architecture, settings, usual = CASES[case]
    model = make_checkpoint(architecture, tmp_path / "checkpoint", **(SMALL | settings))
    ModelWriter(model, arch, "F32").write(tmp_path / "model.gguf", usual | extra)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_checkpoint(tmp_path / "model.gguf")


def test_layers_for_multi_token_prediction_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in files of GLM-4.7-Flash, which has the same computation as DeepSeek-V3."""
    model, path = write("deepseek-v3", tmp_path)
    extra = {"block_count": 4, "nextn_predict_layers": 1}
    tensors = {"attn_norm": (64,), "attn_k_b": (4, 32, 32), "nextn.eh_proj": (64, 128)}
    extra |= {f"blk.3.{name}.weight": np.ones(size, np.float32) for name, size in tensors.items()}
    ModelWriter(model, "deepseek2", "F32").write(path, extra)
    config = ModelConfig.from_checkpoint(path)
    assert (config.num_hidden_layers, config.num_nextn_predict_layers) == (3, 1)
    assert_agrees(model, path)
    assert "3 tensors are not used, and not read: those of model.layers.3." in caplog.text


@pytest.mark.parametrize("case", ["deepseek-v2", "deepseek-v2, before 2025"])
def test_one_form_of_latent_attention_or_the_other(case: str, tmp_path: Path) -> None:
    model, path = write(case, tmp_path)
    extra = old_settings(model.config) if "before" in case else {}
    both = {"blk.1.attn_k_b.weight": (4, 32, 32), "blk.1.attn_v_b.weight": (4, 16, 32)}
    both = both if extra else {"blk.1.attn_kv_b.weight": (192, 32)}
    both = {name: np.ones(size, np.float32) for name, size in both.items()}
    writer = ModelWriter(model, "deepseek2", "F32")
    writer.write(path, extra | both)
    with pytest.raises(ValueError, match=r"has blk\.1\.attn_k_b\.weight, and also attn_kv_b"):
        GGUFSource(path)
    if extra:
        del both["blk.1.attn_v_b.weight"]
        writer.write(path, extra | both)
        with pytest.raises(ValueError, match=r"has blk\.1\.attn_k_b\.weight, but no attn_v_b"):
            GGUFSource(path)
        both["blk.1.attn_v_b.weight"] = np.ones((4, 16, 31), np.float32)
        del writer.model.model.layers[1].self_attn.kv_b_proj
        writer.write(path, extra | both)
        with pytest.raises(
            ValueError, match=r"kv_lora_rank\], not \[\(4, 32, 32\), \(4, 16, 31\)\]"
        ):
            GGUFSource(path)


def test_groups_that_older_files_do_not_name(tmp_path: Path) -> None:
    """Those of DeepSeek V2 and V3 follow from their numbers of experts; others have one group."""
    sizes = {"n_group": None, "topk_group": None, "moe_intermediate_size": 32}
    for count, groups in ((8, 1), (160, 8), (256, 8)):
        _, path = write("deepseek-v3", tmp_path, n_routed_experts=count, **sizes)
        config = ModelConfig.from_checkpoint(path)
        assert config.moe.routing.num_groups == groups


@pytest.mark.parametrize("returns", [True, False])
def test_in_harmony_the_end_of_a_message_is_not_the_end(returns: bool, tmp_path: Path) -> None:
    model = make_checkpoint(Qwen3ForCausalLM, tmp_path, **SMALL)
    words = ["a", "<|end|>", "<|return|>" if returns else "b", "<|call|>", "<|endoftext|>"]
    tokens = {"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": [1, 3, 3, 3, 3]}
    ModelWriter(model, "qwen3", "F32").write(tmp_path / "model.gguf", absolute=tokens)
    config = ModelConfig.from_checkpoint(tmp_path / "model.gguf")
    assert config.eos_token_ids == ({2, 3, 4} if returns else {1, 3, 4})
