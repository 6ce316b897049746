"""gpt-oss's MXFP4 checkpoints: all experts of a projection in one tensor of blocks.

The oracle is the conversion of transformers, and its model with the weights that this returns.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import GPT_OSS, edit_json, make_checkpoint, prompt_logits
from torch import Tensor
from transformers import GptOssForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.formats.mxfp4 import MXFP4Reader
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.quantized_loader import load_deferred
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.registry import model_class

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 5}  # groups of 32
PROMPTS = [[(7 * i * i + i * j) % 300 for i in range(3 + 4 * j)] for j in range(12)]
# As OpenAI's files have it.
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
}


def make_mxfp4(path: Path) -> PreTrainedModel:
    """Random blocks in place of the experts; return transformers' model of them, in float32."""
    model = make_checkpoint(GptOssForCausalLM, path, **GPT_OSS | SIZES)
    file, generator = path / "model.safetensors", torch.Generator().manual_seed(0)
    stored, plain = {}, load_file(file)
    for name, tensor in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 125, shape[:3], dtype=torch.uint8, generator=generator)
        scales[0, 0, 0] = 0  # the smallest
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert plain[name].shape == tensor.shape
    save_file(stored, file, {"format": "pt"})
    edit_json(path / "config.json", quantization_config=CONFIG)
    model.load_state_dict({name: tensor.contiguous() for name, tensor in plain.items()})
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    path = tmp_path_factory.mktemp("mxfp4")
    return make_mxfp4(path), path


def test_weights_are_those_of_transformers(made: tuple[PreTrainedModel, Path]) -> None:
    model, path = made
    reader = MXFP4Reader(path, CONFIG)
    expected = model.state_dict()
    assert reader.shapes() == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        found = reader.read(name)
        assert isinstance(found, QuantizedMatrix) == reader.is_quantized(name)
        if isinstance(found, QuantizedMatrix):
            found = found.dequantize().view(len(tensor), -1, tensor.shape[1]).mT
        assert torch.equal(found, tensor)


@torch.inference_mode()
def test_logits_are_those_of_transformers(made: tuple[PreTrainedModel, Path]) -> None:
    model, path = made
    config = ModelConfig.from_checkpoint(path)
    ours = model_class(config.architecture)(config, LayerContext())
    load_deferred(ours, path, shows_progress=False)
    expected = model(torch.tensor([PROMPTS[9]])).logits[0]
    torch.testing.assert_close(prompt_logits(ours, PROMPTS[9]), expected, rtol=1e-4, atol=1e-4)


def assert_near(model: PreTrainedModel, path: Path, most: float, **options: Any) -> None:
    """All log-probabilities of the prompts are near those of transformers."""
    is_interpreted = options.get("attention_backend") == "triton"
    prompts = PROMPTS[1:3] if is_interpreted else PROMPTS
    params = SamplingParams(
        temperature=0, max_tokens=1 if is_interpreted else 3, ignore_eos=True, prompt_logprobs=0
    )
    options |= {"skip_tokenizer_init": True, "device": "cpu"}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 50}
    with LLM(path, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        for position, entries in enumerate(output.prompt_logprobs[1:]):
            entry = entries[prompt[position + 1]]
            worst = max(worst, abs(entry.logprob - float(logprobs[position, prompt[position + 1]])))
    assert worst < most


# Codes are kept, as integers of 8 bits; activations stay floats.
KEPT = {"quantization_activations": "none"}


@pytest.mark.small(options=[KEPT])
@pytest.mark.parametrize(
    ("options", "most"),
    [
        (KEPT, 1e-4),
        (KEPT | {"attention_backend": "torch"}, 1e-4),
        (KEPT | {"tensor_parallel_size": 2}, 1e-4),
        # One scale per output, and products in the interpreter.
        ({"quantization": "mxfp4", "attention_backend": "triton"}, 0.3),
        ({"attention_backend": "triton"}, 1e-4),  # dequantized
        ({}, 0.3),  # 8-bit activations
    ],
    ids=str,
)
def test_so_are_log_probabilities_of_the_engine(
    options: dict[str, Any], most: float, made: tuple[PreTrainedModel, Path]
) -> None:
    assert_near(*made, most, **options)


@pytest.mark.size("full")
def test_float_experts_are_quantized_while_loading(tmp_path: Path) -> None:
    """In stacks of experts as in experts of their own: each output has its scale."""
    model = make_checkpoint(GptOssForCausalLM, tmp_path, **GPT_OSS | SIZES)
    assert_near(model, tmp_path, 1.0, quantization="int8")  # other weights: 5 and more


def changed(name: str, change: Callable[[Tensor], Tensor | None], path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensor = change(tensors.pop(name))
    if tensor is not None:
        tensors[name] = tensor.contiguous()
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("down_proj_scales", lambda t: None, "down_proj_scales is missing"),
        ("down_proj_blocks", lambda t: None, "down_proj_blocks is missing"),
        ("down_proj_scales", lambda t: t.float(), "F32, not U8"),
        ("down_proj_scales", lambda t: t[:, :-1], r"scales has shape \[5, 63, 3\]"),
        ("down_proj_blocks", lambda t: t[..., :8], r"expected \[experts, out, in / 32, 16\]"),
        ("down_proj_scales", lambda t: t.fill_(255), "NaN as a scale"),
        ("down_proj_bias", lambda t: t.to(torch.int32), "unknown to quant_method='mxfp4'"),
        ("router.weight", lambda t: None, "missing: .*router.weight"),
    ],
)
def test_a_damaged_file_is_refused(
    part: str,
    change: Callable[[Tensor], Tensor | None],
    message: str,
    tmp_path: Path,
) -> None:
    make_mxfp4(tmp_path)
    middle = "mlp." if part.startswith("router") else "mlp.experts."
    changed(f"model.layers.1.{middle}{part}", change, tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, skip_tokenizer_init=True, device="cpu")


def test_unknown_settings_of_the_format_are_refused(tmp_path: Path) -> None:
    make_mxfp4(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=CONFIG | {"group_size": 16})
    with pytest.raises(ValueError, match="group_size"):
        ModelConfig.from_checkpoint(tmp_path)
