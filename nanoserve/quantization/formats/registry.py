"""From the `quant_method` of a `config.json` to the reader of its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoserve.quantization.formats.fields import check_quantization_config, method_of
from nanoserve.quantization.formats.stored import StoredTensors
from nanoserve.quantization.source import WeightSource


def open_quantized(path: Path, quantization_config: Mapping[str, Any]) -> WeightSource:
    """The weights of the checkpoint in `path`, whose `config.json` has this `quantization_config`.

    Reads headers, and tensors of some bytes that hold shapes. Raises `ValueError`, which names the
    field or the tensor, for a setting that is not implemented, for a tensor that the format does
    not have, and for one that is missing.
    """
    check_quantization_config(quantization_config)
    method = method_of(quantization_config)
    if method == "gguf":
        from nanoserve.quantization.gguf.source import GGUFSource

        return GGUFSource(path)
    tensors = StoredTensors(path)
    if method == "compressed-tensors":
        from nanoserve.quantization.formats.compressed_tensors import CompressedTensorsReader

        return CompressedTensorsReader(tensors, quantization_config)
    if method == "fp8":
        from nanoserve.quantization.formats.fp8 import FP8Reader

        return FP8Reader(tensors, quantization_config)
    if method == "awq":
        from nanoserve.quantization.formats.awq import AWQReader

        return AWQReader(tensors, quantization_config)
    if method == "gptq":
        from nanoserve.quantization.formats.gptq import GPTQReader

        return GPTQReader(tensors, quantization_config)
    if quantization_config.get("load_in_8bit"):
        from nanoserve.quantization.formats.bitsandbytes import Int8Reader

        return Int8Reader(tensors, quantization_config)
    from nanoserve.quantization.formats.bitsandbytes import NF4Reader

    return NF4Reader(tensors, quantization_config)
