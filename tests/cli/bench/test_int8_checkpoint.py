"""`int8_checkpoint.py` of `nanoserve bench`: vLLM gets the same int8 weights. It is not needed."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, make_qwen3

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.source import open_quantized
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.engines.int8_checkpoint import write_int8
from nanoserve.cli.bench.engines.vllm_engine import VllmEngine
from nanoserve.models.quantization.online import quantize_int8


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    make_qwen3(folder, dtype="bfloat16")
    return folder


def spec_of(plain: Path, quantization: str | None) -> Namespace:
    options = {"quantization": quantization} if quantization else {}
    return Namespace(model=str(plain), scratch=str(plain.parent), options=options)


def test_nanoserve_reads_what_it_would_have_made_itself(plain: Path) -> None:
    """Codes and scales to the bit; embedding, LM head and norms as they were."""
    VllmEngine.prepare(spec_of(plain, "int8"))
    folder, weights = plain.parent / "int8", load_file(plain / "model.safetensors")
    config = ModelConfig.from_checkpoint(folder, "bfloat16")
    source = open_quantized(folder, config.quantization_config)
    stored = load_file(folder / "model.safetensors")
    linears = [name for name in weights if name.endswith("_proj.weight")]
    assert len(linears) == 2 * 7
    for name in linears:
        found, wanted = source.read(name), quantize_int8(weights.pop(name))
        assert isinstance(found, QuantizedMatrix) and found.offset is None
        torch.testing.assert_close(found.codes, wanted.codes, rtol=0, atol=0)
        torch.testing.assert_close(found.scale, wanted.scale, rtol=0, atol=0)
        del stored[name], stored[f"{name}_scale"]
    assert "lm_head.weight" in weights
    torch.testing.assert_close(stored, weights, rtol=0, atol=0)


def test_a_row_of_zeros_has_codes_of_zero(plain: Path, tmp_path: Path) -> None:
    weights = load_file(plain / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][3] = 0
    save_file(weights, plain / "model.safetensors")
    write_int8(plain, tmp_path / "int8")
    stored = load_file(tmp_path / "int8" / "model.safetensors")
    assert not stored[name][3].any() and stored[name][2].any()
    assert stored[f"{name}_scale"].isfinite().all()


def test_it_is_written_once_and_only_if_asked_for(plain: Path) -> None:
    VllmEngine.prepare(spec_of(plain, None))
    VllmEngine.prepare(spec_of(plain, "fp8"))  # vLLM's own
    assert [*plain.parent.iterdir()] == [plain]
    VllmEngine.prepare(spec_of(plain, "int8"))
    (plain.parent / "int8" / "model.safetensors").unlink()
    VllmEngine.prepare(spec_of(plain, "int8"))
    assert not (plain.parent / "int8" / "model.safetensors").exists()
    assert not (plain.parent / "int8.unfinished").exists()


@pytest.mark.parametrize("field", ["quantization_config", "num_experts", "num_local_experts"])
def test_what_is_no_plain_dense_model_is_refused(field: str, plain: Path) -> None:
    edit_json(plain / "config.json", **{field: {"quant_method": "fp8"} if "_c" in field else 4})
    for _ in range(2):  # a second run says the same
        with pytest.raises(ValueError, match="quantization=int8"):
            VllmEngine.prepare(spec_of(plain, "int8"))
    assert [*plain.parent.iterdir()] == [plain]
