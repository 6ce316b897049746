"""The storage formats of the KV cache, as numbers that need no torch to count bytes.

`nanoserve.attention.quantized_kv` defines the 8-bit codes.
"""

from typing import NamedTuple

_SCALE_BYTES = 4  # float32


class KVFormat(NamedTuple):
    dtype: str  # torch's name of the type in which a value, or its code, is stored
    item_bytes: int
    has_scales: bool = False  # one for every token and head


_FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
# torch supports few operations on its e4m3 type; numba and older GPUs do not support it at all. So
# the codes are plain bytes, which each kernel decodes.
_CODES = {
    "int8": KVFormat("int8", 1, has_scales=True),
    "fp8": KVFormat("uint8", 1, has_scales=True),
    "fp8_e4m3": KVFormat("uint8", 1, has_scales=True),
}


def kv_format(kv_cache_dtype: str, dtype: str) -> KVFormat:
    """Return the format for `kv_cache_dtype`; "auto" is `dtype`, the model's data type."""
    if kv_cache_dtype == "auto":
        return KVFormat(dtype, _FLOATS[dtype])
    return _CODES[kv_cache_dtype]


def head_bytes(head_dim: int, item_bytes: int, has_scales: bool) -> int:
    """Return the bytes of K, or of V, of one head and one token."""
    return head_dim * item_bytes + (_SCALE_BYTES if has_scales else 0)


class KVHeads(NamedTuple):
    """The KV heads of a layer, over all ranks: what its cache holds of a token."""

    num_heads: int
    head_dim: int
    num_stored: int = 2  # K and V; 1 if V is a part of K

    def token_bytes(self, kind: KVFormat) -> int:
        """Return the bytes of a token in a layer's cache."""
        per_head = head_bytes(self.head_dim, kind.item_bytes, kind.has_scales)
        return self.num_stored * self.num_heads * per_head
