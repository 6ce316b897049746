"""Latent attention and the routers of DeepSeek V2 and V3, beyond what is in tables of all models.

`test_models.py` and `test_config_flips.py` compare both models with transformers'.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_outputs import PARAMS, assert_like
from quantized_checkpoints import FP8, write_fp8
from safetensors.torch import load_file, save_file
from tiny_checkpoints import DEEPSEEK_V2, DEEPSEEK_V3, edit_json, make_checkpoint, prompt_logits
from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, PreTrainedModel

from nanoserve import LLM, SamplingParams
from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.registry import ATTENTION_BACKENDS, OPERATIONS, register_attention_backend
from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.quantized_loader import load_deferred
from nanoserve.cli.bench.roofline import attention_weights
from nanoserve.cli.describe import describe
from nanoserve.cli.info import as_text
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.registry import model_class

PROMPTS = [[(i * i + 7 * j + j * j % 11) % 300 for j in range(1 + 13 * i % 60)] for i in range(20)]
SHORT = SamplingParams(temperature=0, max_tokens=1)
PLAIN: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu"}
OPTIONS = PLAIN | {"attention_backend": "torch"}
# DeepSeek-V2-Lite and DeepSeek-V3, as published.
YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
COMMON = {
    "attention_bias": False, "hidden_act": "silu", "kv_lora_rank": 512, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840, "moe_layer_freq": 1, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000, "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1, "ep_size": 1, "seq_aux": True, "tie_word_embeddings": False,
}  # fmt: skip
V2_LITE = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": None, "first_k_dense_replace": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "first_k_dense_replace": 3,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def make(path: Path, architecture: str = "v3", **overrides: Any) -> PreTrainedModel:
    if architecture == "v2":
        return make_checkpoint(DeepseekV2ForCausalLM, path, **(DEEPSEEK_V2 | overrides))
    return make_checkpoint(DeepseekV3ForCausalLM, path, **(DEEPSEEK_V3 | overrides))


# ---------------------------------------------------------------- one engine, many ways

WAYS: dict[str, dict[str, Any]] = {
    "one token at a time": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks, preemption": {
        "max_num_batched_tokens": 7, "max_num_seqs": 6, "block_size": 4, "num_kv_blocks": 24,
        "max_model_len": 80,
    },
    "blocks of one token": {
        "max_num_batched_tokens": 64, "max_num_seqs": 40, "block_size": 1, "max_model_len": 80,
    },
    "draft tokens": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "a draft model": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
    "synchronous": {"async_scheduling": False, "max_num_batched_tokens": 20, "max_num_seqs": 9},
    "numba": {"attention_backend": "numba", "max_num_batched_tokens": 50, "max_num_seqs": 20},
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks, numba": {"tensor_parallel_size": 2, "attention_backend": "numba"},
    "two stages": {"pipeline_parallel_size": 2},
}  # fmt: skip


@pytest.mark.small(way=["chunks, preemption", "draft tokens"])
@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_computed_it_is_the_same(
    way: str, tmp_path: Path, by_size: Callable[..., int]
) -> None:
    if "numba" in way:
        pytest.importorskip("numba")
    model = make(tmp_path)
    options = OPTIONS | WAYS[way]
    if way == "a draft model":  # with a cache of another shape in the same blocks
        make(tmp_path / "draft", "v2", kv_lora_rank=12, num_hidden_layers=2)
        drafts = options["speculative_config"] | {"model": str(tmp_path / "draft")}
        options |= {"speculative_config": drafts}
    with LLM(tmp_path, **options) as llm:
        assert_like(model, llm, PROMPTS[: by_size(6, 20)])


def test_prefix_hits_and_new_weights(tmp_path: Path) -> None:
    model = make(tmp_path)
    longest = max(PROMPTS, key=len)
    with LLM(tmp_path, **OPTIONS, block_size=4) as llm:
        assert_like(model, llm, [longest])
        (output,) = llm.generate([[*longest[:30], 5, 7]], PARAMS, use_tqdm=False)
        assert output.num_cached_tokens == 28
        assert_like(model, llm, [[*longest[:30], 5, 7]])
        other = make(tmp_path / "other", **{"seed": 1})
        llm.update_weights(tmp_path / "other")
        assert_like(other, llm, PROMPTS[:6])


@torch.inference_mode()
def test_chunks_of_one_token_are_as_good_as_one_chunk(tmp_path: Path) -> None:
    """vLLM once had outputs that got worse as chunks got smaller (its issue 26042)."""
    model = make(tmp_path)
    prompt = PROMPTS[14]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    for budget in (1, 64):
        with LLM(tmp_path, **OPTIONS, max_num_batched_tokens=budget, max_num_seqs=1) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        for position, entries in enumerate(output.prompt_logprobs[1:]):
            for token_id, entry in entries.items():
                assert abs(entry.logprob - float(expected[position, token_id])) < 2e-5


# ---------------------------------------------------------------- the cache


def test_the_cache_of_a_token_is_one_latent(tmp_path: Path) -> None:
    lite = ModelConfig.from_hf(V2_LITE, {})
    assert lite.kv_bytes_per_token() == 27 * (512 + 64) * 2
    assert lite.kv_bytes_per_token("int8") == 27 * (512 + 64 + 4)
    assert ModelConfig.from_hf(V3, {}).kv_bytes_per_token() == 61 * (512 + 64) * 2
    make(tmp_path)
    facts = describe(str(tmp_path), **OPTIONS, num_kv_blocks=10)
    assert facts["refused"] == [] and facts["kv_block_bytes"] == 16 * 3 * (20 + 8) * 4
    assert "4 (one latent, of 20 + 8 numbers), of 20" in as_text(facts)
    with LLM(tmp_path, **OPTIONS, num_kv_blocks=10) as llm:
        (cache, *_) = llm.engine.executor.kv_caches
        assert cache.values.shape == (1, 11, 1, 16, 28)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_cache_in_8_bits(kind: str, tmp_path: Path) -> None:
    """Its log-probabilities are near those of floats; the exact ones are tests of attention."""
    make(tmp_path, first_k_dense_replace=3)  # no router, which would decide otherwise
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for kv_cache_dtype in ("auto", kind):
        with LLM(tmp_path, **OPTIONS, kv_cache_dtype=kv_cache_dtype) as llm:
            outputs = llm.generate(PROMPTS[4:10], params, use_tqdm=False)
        rows = [row for output in outputs for row in output.prompt_logprobs[1:]]
        found.append(torch.tensor([entry.logprob for row in rows for entry in row.values()]))
    assert 1e-5 < (found[0] - found[1]).abs().mean() < {"int8": 0.04, "fp8": 0.15}[kind]


def test_a_backend_without_such_attention_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for registry in (ATTENTION_BACKENDS, OPERATIONS):
        monkeypatch.setattr(registry, "_entries", registry.entries())
    make(tmp_path)
    register_attention_backend("mine", AttentionBackend)
    with pytest.raises(
        ValueError, match=r"attention_backend='mine' does not support.*latent.*'torch'"
    ):
        LLM(tmp_path, **OPTIONS | {"attention_backend": "mine"})


def test_a_variant_of_a_kernel_that_there_is_not_is_rejected(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs the package: pip install triton")
    make(tmp_path)
    options = {"attention_backend": "triton", "kernel_config": {"merge_in_attention": True}}
    with pytest.raises(ValueError, match=r"merge_in_attention=True does not support.*latent"):
        LLM(tmp_path, **OPTIONS | options)


def test_bits_that_do_not_depend_on_the_batch_are_rejected(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ValueError, match=r"batch_invariant=True does not support.*latent"):
        LLM(tmp_path, **OPTIONS, batch_invariant=True)


# ---------------------------------------------------------------- config.json


def test_the_files_of_published_checkpoints() -> None:
    lite, v3 = ModelConfig.from_hf(V2_LITE, {}), ModelConfig.from_hf(V3, {})
    assert lite.mla.q_lora_rank is None and v3.mla.q_lora_rank == 1536
    assert lite.head_dim == v3.head_dim == 192
    # 0.1 x 0.707 x ln 40 + 1 = 1.2608, and 0.1 x ln 40 + 1 = 1.3689
    assert lite.attention_scale == pytest.approx(192**-0.5 * 1.26080 * 1.26080, rel=1e-5)
    assert v3.attention_scale == pytest.approx(192**-0.5 * 1.36889 * 1.36889, rel=1e-5)
    assert lite.moe.dense_layers == {0} and v3.moe.dense_layers == {0, 1, 2}
    assert lite.moe.routing.topk_method == "greedy"
    assert (v3.moe.routing.num_groups, v3.moe.routing.topk_group) == (8, 4)
    assert (lite.num_nextn_predict_layers, v3.num_nextn_predict_layers) == (0, 1)
    meta = LayerContext(torch.bfloat16, torch.device("meta"), num_positions=1)
    for config, billions in ((lite, 15.7), (v3, 671)):
        parameters = list(model_class(config.architecture)(config, meta).parameters())
        assert sum(p.numel() for p in parameters) == pytest.approx(billions * 1e9, rel=1e-3)


@pytest.mark.parametrize("raw", [V2_LITE, V3 | {"num_hidden_layers": 4}], ids=["lite", "v3"])
def test_the_weights_of_its_attention_are_counted(raw: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(raw, {})
    meta = LayerContext(torch.bfloat16, torch.device("meta"), num_positions=1)
    attention = model_class(config.architecture)(config, meta).model.layers[0].self_attn
    matrices = [p for p in attention.parameters() if p.dim() == 2]
    assert sum(p.numel() for p in matrices) == attention_weights(config)


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (V3, {"num_key_value_heads": 16}, "num_key_value_heads=16 must be num_attention_heads=128"),
        (V3, {"scoring_func": "softmax"}, "scoring_func='softmax' with topk_method='noaux_tc'"),
        (V3, {"topk_method": "auxtc"}, "topk_method='auxtc' is not one of"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        (V3, {"n_group": 7}, "n_routed_experts=256, n_group=7 and topk_group=4"),
        (V3, {"n_group": 256}, "of 2 experts or more"),
        (V3, {"topk_group": 9}, "topk_group=9"),
        (V3, {"n_group": None}, "n_group"),
        (V3, {"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok=33 exceeds the 32"),
        (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 must be even"),
        (V3, {"first_k_dense_replace": None}, "first_k_dense_replace=None"),
        (V3, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1"),
        (V3, {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "must be set together"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob=True with topk_method='greedy'"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_rejected(
    raw: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(raw | change, {})


@pytest.mark.parametrize(
    ("raw", "change"),
    [
        (V3, {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}),
        (V2_LITE, {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 8}),
    ],
)
def test_each_has_its_own_router(raw: dict[str, Any], change: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(raw | change | {"num_hidden_layers": 4}, {})
    meta = LayerContext(torch.bfloat16, torch.device("meta"), num_positions=1)
    with pytest.raises(ValueError, match=f"topk_method='{change['topk_method']}' is not one of"):
        model_class(config.architecture)(config, meta)


# ---------------------------------------------------------------- checkpoints


def test_layers_of_multi_token_prediction_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(48, 96)}
    extra["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.ones(2, 2)
    save_file(tensors | extra, file, {"format": "pt"})
    with caplog.at_level(logging.WARNING), LLM(tmp_path, **OPTIONS) as llm:
        assert_like(model, llm, PROMPTS[:4])
    (message,) = [m for m in caplog.messages if "not read" in m]
    assert message == "2 tensors are not used, and not read: those of model.layers.3."
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.3\.eh_proj"):
        LLM(tmp_path, **OPTIONS)


@torch.inference_mode()
def test_weights_in_blocks_of_fp8(tmp_path: Path, full_size: bool) -> None:
    """As V3 is published: every linear, kv_b_proj among them, but neither router nor norms."""
    make(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.3.eh_proj.weight"] = torch.randn(48, 96)  # of multi-token prediction
    plain = dict(stored)
    for name in list(plain):
        if "_proj" in name and name.endswith(".weight"):
            parts, plain[name] = write_fp8(stored.pop(name), block=(16, 32))
            stored |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
    logits = []
    for tensors, config in ((plain, None), (stored, FP8 | {"weight_block_size": [16, 32]})):
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        edit_json(tmp_path / "config.json", quantization_config=config)
        model_config = ModelConfig.from_checkpoint(tmp_path)
        model = model_class(model_config.architecture)(model_config, LayerContext())
        load = load_weights if config is None else load_deferred
        load(model, tmp_path, shows_progress=False)
        logits.append(prompt_logits(model, PROMPTS[14]))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    if not full_size:
        return
    with LLM(tmp_path, **OPTIONS) as llm:  # which rounds them to integers of 8 bits
        (output,) = llm.generate([PROMPTS[14]], PARAMS, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.size("full")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_are_quantized_while_they_are_loaded(
    quantization: str, ranks: int, tmp_path: Path
) -> None:
    """W_UK and W_UV stay floats; most tokens are those of the plain model."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    make(tmp_path, q_lora_rank=32, v_head_dim=16, **sizes)
    answers = []
    for options in ({}, {"quantization": quantization, "tensor_parallel_size": ranks}):
        with LLM(tmp_path, **OPTIONS | options) as llm:
            outputs = llm.generate(PROMPTS, SHORT, use_tqdm=False)
        answers.append([output.outputs[0].token_ids[0] for output in outputs])
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same >= {"int8": 15, "int4": 5}[quantization]
