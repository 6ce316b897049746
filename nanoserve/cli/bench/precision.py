"""In how many bits an engine keeps weights, K and V: its limit on a machine follows from it."""

from typing import Any, NamedTuple

from nanoserve.checkpoint.kv_formats import head_bytes, kv_format

_DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
_HEAD_DIM = 128  # values that share the scale of a KV cache in 8 bits
_LLAMA_CPP = {"q8_0": 8.5, "q4_0": 4.5, "q4_k_m": 4.85}  # the last as its own tools tell it


class Precision(NamedTuple):
    weight_bits: float  # of linears, scales included
    head_bits: float  # of the LM head
    kv_bits: float
    is_integer: bool  # whether products are integers'


def precision_of(
    engine: str, options: dict[str, Any], dtype: str, stored: float | None = None
) -> Precision:
    """`options` are the engine's own, as on the command line; `stored` is a GGUF file's bits of a
    weight, which transformers makes floats of."""
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
