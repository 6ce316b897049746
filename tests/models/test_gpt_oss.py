"""gpt-oss in engines of all kinds against transformers; its real config.json; other backends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import GPT_OSS, make_checkpoint
from transformers import GptOssForCausalLM, PreTrainedModel

from nanoserve import LLM, SamplingParams
from nanoserve.attention.flash import FlashAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.moe_config import SwiGLU
from nanoserve.models.gpt_oss import GptOssForCausalLM as OurGptOss
from nanoserve.models.layers.context import LayerContext

REAL = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def test_the_file_of_the_real_gpt_oss_20b() -> None:
    config = ModelConfig.from_hf(REAL, {"eos_token_id": [200002, 199999, 200012]})
    assert config.sliding_windows == (128, None) * 12
    assert config.rope.rope_type == "yarn" and not config.rope.truncate
    assert config.max_position_embeddings == 131072 and config.qkv_bias and config.o_bias
    assert config.moe.swiglu == SwiGLU(1.702, 7.0, 1.0) and config.moe.num_experts == 32
    assert config.moe.intermediate_size == 2880 and config.moe.num_experts_per_tok == 4
    assert config.eos_token_ids == {200002, 199999, 200012}
    left_out = {"layer_types", "rope_scaling", "rope_theta", "swiglu_limit", "sliding_window"}
    implied = {name: value for name, value in REAL.items() if name not in left_out}
    assert ModelConfig.from_hf(implied, {}) == ModelConfig.from_hf(REAL, {})


def test_flash_attention_rejects_the_model() -> None:
    raw = REAL | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = ModelConfig.from_hf(raw | {"vocab_size": 300}, {})
    context = LayerContext(device=torch.device("meta"), num_positions=1)
    model = OurGptOss(config, context)
    assert all(layer.self_attn.layer.sinks.shape == (64,) for layer in model.model.layers)
    meta = LayerContext(device=torch.device("meta"), num_positions=1, attention=FlashAttention())
    with pytest.raises(ValueError, match=r"FlashAttention does not support attention sinks"):
        OurGptOss(config, meta)


# ---------------------------------------------------------------- engines


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    path = tmp_path_factory.mktemp("gpt-oss")
    return make_checkpoint(GptOssForCausalLM, path, **GPT_OSS), path


def prompts(count: int) -> list[list[int]]:
    """Ragged; many begin alike, so that prefixes are hit."""
    common = [(3 * i * i + 1) % 300 for i in range(40)]
    return [
        common[: 7 * (i % 6)] + [(i * i + 7 * j + j * j % 5) % 300 for j in range(1 + 13 * i % 47)]
        for i in range(count)
    ]


def generate(path: Path, asked: list[list[int]], **options: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
    options = {"skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 30} | options
    with LLM(path, **options) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        num_preemptions = llm.engine.scheduler.num_preemptions
    assert num_preemptions or options["max_num_seqs"] < 7 or "num_kv_blocks" not in options
    return [one.outputs[0] for one in outputs]


@pytest.mark.size("full")
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_num_batched_tokens": 64, "attention_backend": "torch"},
        {"max_num_batched_tokens": 64, "tensor_parallel_size": 2},
        {"max_num_batched_tokens": 64, "pipeline_parallel_size": 2},
    ],
    ids=["1 token", "numba, 7 tokens", "torch, 64 tokens", "two ranks", "two stages"],
)
@torch.inference_mode()
def test_in_a_small_pool_all_is_as_in_transformers(
    options: dict[str, Any], made: tuple[PreTrainedModel, Path]
) -> None:
    """Chunks, prefix hits and preemptions, in a pool for the longest prompt and little more."""
    model, path = made
    asked = prompts(100)
    outputs = generate(path, asked, block_size=4, num_kv_blocks=66, max_model_len=100, **options)
    num_near_ties = 0
    for prompt, output in zip(asked, outputs, strict=True):
        logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(dim=-1)
        for row, entries, chosen in zip(logprobs, output.logprobs, output.token_ids, strict=True):
            for token_id, entry in entries.items():
                assert abs(entry.logprob - float(row[token_id])) < 1e-4
            num_near_ties += chosen != int(row.argmax())
            assert float(row.max() - row[chosen]) < 1e-5
    assert num_near_ties <= 1


@pytest.mark.size("full")
def test_batch_invariance_holds_with_sinks_and_biases(made: tuple[PreTrainedModel, Path]) -> None:
    pytest.importorskip("numba", reason="pip install 'nanoserve[cpu]'")
    path, asked = made[1], prompts(12)
    together = generate(path, asked, batch_invariant=True)
    alone = generate(path, asked, batch_invariant=True, max_num_seqs=1, max_num_batched_tokens=5)
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
