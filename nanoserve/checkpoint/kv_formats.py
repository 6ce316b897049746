"""The formats of K and V in plain numbers, for what counts bytes without torch.

What the codes of 8 bits mean is in `nanoserve.attention.quantized_kv`.
"""

from typing import NamedTuple

_SCALE_BYTES = 4  # float32


class KVFormat(NamedTuple):
    dtype: str  # torch's name of what a value, or its code, is kept as
    item_bytes: int
    has_scales: bool = False  # one for every token and head


_FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
# torch computes little with its own type for e4m3, numba and older GPUs nothing. So its codes are
# plain bytes, which are taken apart where they are used.
_CODES = {
    "int8": KVFormat("int8", 1, has_scales=True),
    "fp8": KVFormat("uint8", 1, has_scales=True),
    "fp8_e4m3": KVFormat("uint8", 1, has_scales=True),
}


def kv_format(kv_cache_dtype: str, dtype: str) -> KVFormat:
    """Return the format of a `kv_cache_dtype`; `dtype` is the model's, for which "auto" stands."""
    if kv_cache_dtype == "auto":
        return KVFormat(dtype, _FLOATS[dtype])
    return _CODES[kv_cache_dtype]


def head_bytes(head_dim: int, item_bytes: int, has_scales: bool) -> int:
    """Return the bytes of K, or of V, of one head and one token."""
    return head_dim * item_bytes + (_SCALE_BYTES if has_scales else 0)
