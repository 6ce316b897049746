"""Convert a checkpoint in safetensors to int8 weights, as vLLM cannot quantize it to int8.

The format is compressed-tensors' "int-quantized", which nanoserve reads, too. Every linear layer
except the LM head has `weight` in int8 and `weight_scale` in float32 [out, 1]. A scale is the
largest magnitude of the row / 127. An engine quantizes each token's activations to int8 while it
runs. Embedding, LM head and norms are unchanged.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .stored_tensors import as_float32, read_tensors

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}
_PIECE = 2**21  # values quantized at a time


def write_int8(checkpoint: Path, target: Path) -> None:
    """Write the checkpoint to the folder `target`, one tensor at a time to save memory.

    Before anything is written, raises `ValueError` for weights that are already quantized, and for
    a mixture of experts.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config.get("quantization_config"):
        raise ValueError("quantization=int8: the checkpoint's weights are already quantized")
    if config.get("num_experts") or config.get("num_local_experts"):
        raise ValueError("quantization=int8 is not supported for a mixture of experts")
    target.mkdir(exist_ok=True)
    config["quantization_config"] = _QUANTIZATION
    (target / "config.json").write_text(json.dumps(config))
    for file in checkpoint.glob("tokenizer*.json"):
        shutil.copy(file, target)
    header, offset = {}, 0
    for name, dtype, shape, num_bytes in _entries(checkpoint):
        offsets = [offset, offset + num_bytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        offset += num_bytes
    text = json.dumps(header).encode()
    with (target / "model.safetensors").open("wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        for name, _, data in read_tensors(checkpoint):
            if _is_linear(name, data):
                _write_codes(output, data)
            else:
                data.tofile(output)


def _entries(checkpoint: Path) -> Iterator[tuple[str, str, list[int], int]]:
    """Yield name, dtype, shape and number of bytes of each tensor to write, in order."""
    for name, dtype, data in read_tensors(checkpoint):
        if _is_linear(name, data):
            outputs, inputs = data.shape
            yield name, "I8", [outputs, inputs], outputs * inputs
            yield f"{name}_scale", "F32", [outputs, 1], outputs * 4
        else:
            yield name, dtype, list(data.shape), data.nbytes


def _is_linear(name: str, data: np.ndarray) -> bool:
    return data.ndim == 2 and name.endswith("_proj.weight")


def _write_codes(file: BinaryIO, weight: np.ndarray) -> None:
    """Write codes, then scales, bit-identical to nanoserve's quantization=int8."""
    step, scales = max(1, _PIECE // weight.shape[1]), []
    for row in range(0, len(weight), step):
        values = as_float32(weight[row : row + step])
        scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
        codes = np.rint(values / np.where(scale == 0, np.float32(1), scale))
        codes.astype(np.int8).tofile(file)
        scales.append(scale)
    np.concatenate(scales).tofile(file)
