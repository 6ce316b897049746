"""In how many bits an engine keeps weights, K and V: its limit on a machine follows from it."""

from typing import Any, NamedTuple

_DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
_LLAMA_CPP = {"q8_0": 8.5, "q4_0": 4.5, "q4_k_m": 4.85}  # the last as its own tools tell it


class Precision(NamedTuple):
    weight_bits: float  # of linears and LM head, scales included
    kv_bits: float
    is_integer: bool  # whether products are integers'


def precision_of(engine: str, options: dict[str, Any], dtype: str) -> Precision:
    """`options` are the engine's own, as on bench.py's command line."""
    bits: float = _DTYPE_BITS[dtype]
    kv_bits = bits if options.get("kv_cache_dtype", "auto") == "auto" else 8.25  # heads of 128
    quantization = options.get("quantization")
    if quantization is None:
        return Precision(bits, kv_bits, False)
    if engine == "llama.cpp":
        return Precision(_LLAMA_CPP[quantization], kv_bits, True)
    if quantization == "int4":
        return Precision(4 + 32 / options.get("quantization_group_size", 32), kv_bits, True)
    return Precision(8, kv_bits, True)
