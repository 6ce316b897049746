"""What the `config.json` of published checkpoints says, and how many weights the model then has."""

from typing import Any

import pytest

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.registry import weight_bytes
from nanoserve.worker.recurrent_states import RecurrentStates

COMMON = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02}
COMMON |= {"rope_scaling": None, "torch_dtype": "bfloat16", "use_cache": True}
# As transformers 4 wrote them.
GRANITE = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False,
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
    "residual_multiplier": 0.22, "hidden_size": 2048, "intermediate_size": 8192,
    "max_position_embeddings": 131_072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e7,
    "tie_word_embeddings": True, "vocab_size": 49_159, "eos_token_id": 0,
}  # fmt: skip
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False,
    "hidden_size": 2048, "intermediate_size": 11_008, "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65_536, "max_window_layers": 28, "mlp_bias": False,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-6,
    "rope_theta": 5e6, "sliding_window": None, "use_sliding_window": False,
    "vocab_size": 128_256, "eos_token_id": 128_012,
}  # fmt: skip
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False,
    "hidden_size": 4096, "intermediate_size": 11_008, "max_position_embeddings": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 500_000, "tie_word_embeddings": False,
    "vocab_size": 100_352, "eos_token_id": 100_257,
}  # fmt: skip
GLM4 = {
    "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True,
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13_696,
    "max_position_embeddings": 32_768, "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0, "tie_word_embeddings": False, "vocab_size": 151_552,
    "eos_token_id": [151_329, 151_336, 151_338],
}  # fmt: skip
QWEN_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1,
    "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
    "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32_768,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151_936,
    "eos_token_id": 151_643,
}  # fmt: skip
LINEAR = {
    "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "partial_rotary_factor": 0.25,
}  # fmt: skip
QWEN3_NEXT = LINEAR | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
    "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5120,
    "linear_num_value_heads": 32, "mlp_only_layers": [], "moe_intermediate_size": 512,
    "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "output_router_logits": False, "rope_theta": 10_000_000, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512, "use_sliding_window": False,
    "vocab_size": 151_936, "eos_token_id": 151_645,
}  # fmt: skip
# Of a Qwen3_5ForConditionalGeneration, the text part.
QWEN3_5 = LINEAR | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    "attn_output_gate": True, "hidden_size": 5120, "intermediate_size": 17_408,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    "linear_num_value_heads": 48, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000, "rope_type": "default",
    },
    "vocab_size": 248_320, "eos_token_id": 248_044,
}  # fmt: skip


# In billions, as their model cards have them.
@pytest.mark.parametrize(
    ("raw", "billions"),
    [
        (GRANITE, 2.53),
        (SMOLLM3, 3.08),
        (OLMO2, 7.30),
        (GLM4, 9.40),
        (QWEN_MOE, 14.3),
        (QWEN3_NEXT, 79.7),
        (QWEN3_5, 26.9),
    ],
    ids=[
        "granite-3.3-2b",
        "smollm3-3b",
        "olmo-2-7b",
        "glm-4-9b-0414",
        "qwen1.5-moe-a2.7b",
        "qwen3-next-80b-a3b",
        "qwen3.5-27b",
    ],
)
def test_a_model_has_as_many_weights_as_published(raw: dict[str, Any], billions: float) -> None:
    config = ModelConfig.from_hf(COMMON | raw, {})
    count = weight_bytes(config) / 2 / 1e9  # of which tied ones are counted once
    assert count == pytest.approx(billions, rel=0.004)


def test_settings_of_published_files() -> None:
    granite = ModelConfig.from_hf(COMMON | GRANITE, {})
    assert (granite.attention_scale, granite.embedding_scale) == (1 / 64, 12)
    assert (granite.residual_scale, granite.logits_scale) == (0.22, 1 / 8)
    smollm3 = ModelConfig.from_hf(COMMON | SMOLLM3, {})
    assert smollm3.layers_without_rope == set(range(3, 36, 4)) and smollm3.tie_word_embeddings
    assert smollm3.sliding_windows == (None,) * 36
    glm4 = ModelConfig.from_hf(COMMON | GLM4, {})
    assert glm4.rope.rotary_dim(glm4.head_dim) == 64 and (glm4.qkv_bias, glm4.o_bias) == (
        True,
        False,
    )
    qwen = ModelConfig.from_hf(COMMON | QWEN_MOE, {})
    assert qwen.qkv_bias and qwen.moe is not None and not qwen.moe.norm_topk_prob
    assert qwen.moe.shared_expert_intermediate_size == 5632 and not qwen.moe.dense_layers
    for raw, num_recurrent, mib in ((QWEN3_NEXT, 36, 75.4), (QWEN3_5, 48, 149.6)):
        config = ModelConfig.from_hf(COMMON | raw, {})
        assert len(config.recurrent_layers) == num_recurrent == 3 * config.num_kv_layers
        assert config.rope.rotary_dim(config.head_dim) == 64 and config.rope.theta == 1e7
        engine = EngineConfig("any", max_num_seqs=1)
        states = RecurrentStates.of(engine, config, LayerContext())
        assert states.bytes_per_slot / 2**20 == pytest.approx(mib, abs=0.05)
