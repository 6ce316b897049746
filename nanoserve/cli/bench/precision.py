"""The bits per weight and per K and V value, which determine an engine's roofline."""

from typing import Any, NamedTuple

from nanoserve.checkpoint.kv_formats import head_bytes, kv_format

_DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
_HEAD_DIM = 128  # values that share a scale in an 8-bit KV cache
_LLAMA_CPP = {"q8_0": 8.5, "q4_0": 4.5, "q4_k_m": 4.85}  # the last one as its tools report it


class Precision(NamedTuple):
    """The numbers of bits per value."""

    weight_bits: float  # of linear layers, including scales
    head_bits: float  # of the LM head
    kv_bits: float
    is_integer: bool  # True if matrix products are of integers


def precision_of(
    engine: str, options: dict[str, Any], dtype: str, stored: float | None = None
) -> Precision:
    """Return the precision of an engine with `options` as on the command line.

    stored: bits per weight of a GGUF file; transformers converts its weights to floats.
    """
    bits: float = _DTYPE_BITS[dtype]
    kind = kv_format(options.get("kv_cache_dtype", "auto"), dtype)
    kv_bits = 8 * head_bytes(_HEAD_DIM, kind.item_bytes, kind.has_scales) / _HEAD_DIM
    quantization = options.get("quantization")
    if stored is not None and quantization is None and engine in ("nanoserve", "llama.cpp"):
        return Precision(stored, stored, kv_bits, True)
    if quantization is None:
        return Precision(bits, bits, kv_bits, False)
    if engine == "vllm":
        return Precision(8, bits, kv_bits, True)  # its LM head stays in the data type
    weight_bits: float = 8
    if engine == "llama.cpp":
        weight_bits = _LLAMA_CPP[quantization]
    elif quantization == "int4":
        weight_bits = 4 + 16 / options.get("quantization_group_size", 32)
    return Precision(weight_bits, weight_bits, kv_bits, True)
