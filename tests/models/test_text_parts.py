"""The text parts of multimodal checkpoints against the whole models of transformers."""

import json
import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from greedy_outputs import assert_like
from safetensors.torch import load_file, save_file
from tiny_checkpoints import DEEPSEEK_V3, DELTA, DELTA_MOE, TINY_QWEN3, edit_json, initialise
from transformers import CONFIG_MAPPING, PreTrainedModel

from nanoserve import LLM
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.model_config import ModelConfig, read_config_files
from nanoserve.checkpoint.text_part import _DEFAULTS, text_config
from nanoserve.cli.describe import describe
from nanoserve.text.tokenizer import Tokenizer

TEXT = {**TINY_QWEN3, "num_hidden_layers": 3, "dtype": "float32"}
SMALL_HEADS = {**TEXT, "head_dim": 12}  # Qwen2's are hidden_size / num_attention_heads
DEEPSEEK_TEXT = {**TEXT, **DEEPSEEK_V3}
SEES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_SEES = {"depth": 1, "embed_dim": 32, "num_heads": 2, "in_channels": 3, **SEES}
HEARS = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_mel_bins": 8,
    "max_source_positions": 16,
}
COORDINATES = {"rope_type": "default", "rope_theta": 1e4}
QUARTER = {
    **COORDINATES,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
# transformers' class, and its settings
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "query_pre_attn_scalar": 24,
            },
            "vision_config": {**SEES, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": 21},
            "vision_config": {**SEES, "model_type": "pixtral"},
            "tie_word_embeddings": False,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SEES, "model_type": "clip_vision_model"},
        },
    ),
    "llava, tied qwen2": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {**SMALL_HEADS, "model_type": "qwen2"},
            "vision_config": {**SEES, "model_type": "clip_vision_model"},
            "tie_word_embeddings": True,
        },
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": SEES},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen3"},
            "vision_config": {**SEES, "image_size": [28, 28], "patch_size": [14, 14]},
        },
    ),
    "kimi-k2.5": (
        "Kimi_K25ForConditionalGeneration",
        {
            "text_config": {**DEEPSEEK_TEXT, "model_type": "deepseek_v3"},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2-vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {
                **SMALL_HEADS,
                "rope_parameters": {**COORDINATES, "mrope_section": [2, 2, 2]},
            },
            "vision_config": {**QWEN_SEES, "hidden_size": 48},
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **SMALL_HEADS,
                "rope_parameters": {**COORDINATES, "mrope_section": [2, 2, 2]},
            },
            "vision_config": {**QWEN_SEES, "out_hidden_size": 48},
        },
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {
                    **COORDINATES,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                **QWEN_SEES,
                "out_hidden_size": 48,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
    "qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {**TEXT, **DELTA, "rope_parameters": QUARTER},
            "vision_config": {**QWEN_SEES, "out_hidden_size": 48},
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": {**TEXT, **DELTA_MOE, "rope_parameters": QUARTER},
            "vision_config": {**QWEN_SEES, "out_hidden_size": 48},
        },
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "hidden_size": 64,  # 4 x 16
                "rope_parameters": {
                    **COORDINATES,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 1, 1],
                },
            },
            "vision_config": {**SEES, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
        },
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "llama"}, "audio_config": HEARS},
    ),
}
PROMPTS = [[(i * i + 7 * j) % 300 for j in range(1 + 13 * i % 60)] for i in range(8)]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "num_kv_blocks": 60,
    "max_model_len": 80,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}


def make(case: str, path: Path) -> PreTrainedModel:
    name, settings = CASES[case]
    architecture = getattr(transformers, name)
    model = initialise(architecture, deepcopy(settings))
    model.save_pretrained(path)
    if case == "kimi-k2.5":  # transformers' renaming of vision blocks also hits the text's layers
        file = path / "model.safetensors"
        blocks, layers = "language_model.model.blocks.", "language_model.model.layers."
        tensors = {name.replace(blocks, layers): t for name, t in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return model


@pytest.mark.small(case=["gemma3", "llava", "qwen3-vl"])
@pytest.mark.parametrize("case", CASES)
def test_it_answers_as_the_whole_model(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(case, tmp_path)
    with caplog.at_level(logging.WARNING), LLM(tmp_path, **OPTIONS) as llm:
        assert_like(model, llm, PROMPTS)
        name = CASES[case][0]
        assert f"is a {name}: only its text part is loaded" in caplog.text
        assert describe(str(tmp_path), **OPTIONS)["multimodal_architecture"] == name


@pytest.mark.size("full")
@pytest.mark.parametrize("case", ["gemma3", "mistral3"])
def test_on_two_ranks(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    with LLM(tmp_path, **OPTIONS, tensor_parallel_size=2) as llm:
        assert_like(model, llm, PROMPTS)


def test_weights_of_a_trainer(tmp_path: Path) -> None:
    """A trainer has the whole model, or its text part under the names of a text model."""
    make("llava", tmp_path)
    model = make("llava", tmp_path / "new")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    with LLM(tmp_path, **OPTIONS) as llm:
        llm.update_weights(model)
        assert_like(model, llm, PROMPTS)
        text = {f"model.{n}": t for n, t in model.model.language_model.state_dict().items()}
        llm.update_weights({**text, "lm_head.weight": model.lm_head.weight})
        assert_like(model, llm, PROMPTS)


@pytest.mark.parametrize("name", ["missing", "unexpected", "misshapen"])
def test_its_tensors_must_match(name: str, tmp_path: Path) -> None:
    make("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    norm = "language_model.model.layers.1.input_layernorm.weight"
    if name == "missing":
        del tensors[norm]
    elif name == "unexpected":
        tensors["language_model.model.layers.1.other.weight"] = torch.ones(3)
    else:
        tensors[norm] = torch.ones(3)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"{name}: .*layers.1"):
        LLM(tmp_path, **OPTIONS)


def test_a_checkpoint_without_its_text_part_is_rejected(tmp_path: Path) -> None:
    make("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "language_model" not in n}, file)
    with pytest.raises(ValueError, match=r"is multimodal, but has no text model"):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.parametrize(
    "model_type, reason",
    [
        ("mamba", "'MambaForCausalLM' is not supported; it has recurrent layers"),
        ("sound", "a multimodal model, .* this one's is 'sound'"),
    ],
)
def test_other_text_parts_are_rejected_by_type(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    make("llava", tmp_path)
    edit_json(tmp_path / "config.json", text_config={"model_type": model_type})
    with pytest.raises(ValueError, match=reason):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.parametrize("model_type", _DEFAULTS)
def test_settings_that_a_file_omits_are_those_of_transformers(model_type: str) -> None:
    def read(settings: dict[str, Any]) -> ModelConfig:
        raw = text_config({"architectures": ["Any"], "text_config": settings})
        assert raw is not None
        return ModelConfig.from_hf({**raw, "eos_token_id": 0}, {})

    settings = CONFIG_MAPPING[model_type]().to_dict()
    assert read({"model_type": model_type}) == read(settings)


def test_the_file_of_gemma_3_4b(tmp_path: Path) -> None:
    """As it is published: most settings of the text part are those of transformers."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    files = read_config_files(tmp_path)
    config = ModelConfig.from_files(files)
    assert config.architecture == "Gemma3ForCausalLM"
    assert config.multimodal_architecture == "Gemma3ForConditionalGeneration"
    assert (config.vocab_size, config.head_dim, config.num_key_value_heads) == (262_208, 256, 4)
    assert config.tie_word_embeddings and config.dtype == "bfloat16"
    assert config.eos_token_ids == {1, 106}
    assert config.rope.rope_type == "linear" and config.rope.theta == 1e6
    assert config.local_rope is not None and config.local_rope.theta == 10_000.0
    assert [window is None for window in config.sliding_windows[:6]] == [False] * 5 + [True]


def test_the_chat_template_of_a_processor(tmp_path: Path) -> None:
    """It is in a file of its own, and asks for parts where a text model's asks for a string."""
    source = bundled_checkpoint("tiny-qwen3")
    assert source is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        entries = json.loads((source / name).read_text())
        entries.pop("chat_template", None)
        (tmp_path / name).write_text(json.dumps(entries))
    assert not Tokenizer(tmp_path).has_chat_template
    template = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}"
    template += "{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.chat_template == template
    assert Tokenizer(tmp_path, chat_template="{{ messages }}").chat_template == "{{ messages }}"
