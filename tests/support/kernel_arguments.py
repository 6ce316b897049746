"""Call each public function of the CPU kernels with one argument wrong at a time.

Run as a program, because a kernel that believes a wrong shape may end the process: prints a line
for each call, with the function, the argument, what is wrong with it, and what came of it. With the
argument `small` it leaves out other data types that are right: a kernel is compiled for each.
"""

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.numba import NumbaAttention
from nanoserve.kernels.cpu import packed_linear
from nanoserve.kernels.cpu.choose_tokens import choose_tokens
from nanoserve.kernels.cpu.dequantized_linear import DequantizedPanels
from nanoserve.kernels.cpu.float_linear import FloatPanels
from nanoserve.kernels.cpu.integer_linear import IntegerPanels
from nanoserve.kernels.cpu.packing import pack
from nanoserve.kernels.cpu.torch_linear import DequantizedTiles, Packed
from nanoserve.models.layers.numba_ops import NumbaOps

_DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
_ROWS = {"longer in 0", "shorter in 0", "empty in 0"}  # another number of rows
_WIDTH = {"longer in 1", "shorter in 1"}
_FLOATS = {"dtype torch.float16", "dtype torch.bfloat16"}
_SHORT = {"dtype torch.bfloat16"}
# What is right as well, by function and argument: there is nothing else to contradict it, or what
# lies apart is copied.
RIGHT = {
    ("rms_norm", "x"): _ROWS | _SHORT | {"more dimensions", "strides"},
    ("rms_norm", "weight"): _SHORT,
    ("add_rms_norm", "weight"): _SHORT,
    ("act_and_mul", "gate_up"): _ROWS | _SHORT,
    ("norm_rotate_store", "heads"): _WIDTH,  # heads of q
    ("norm_rotate_store", "cache"): _WIDTH | {"longer in 3", "shorter in 3"},  # blocks and slots
    ("norm_rotate_store of int8", "heads"): _WIDTH,
    ("attend", "q"): {"strides"},
    ("attend", "cache"): {"longer in 1", "longer in 3"},
    ("attend", "tables"): {"longer in 1"},
    ("attend of int8", "q"): _SHORT | {"strides"},
    ("attend of int8", "tables"): {"longer in 1"},
    ("choose_tokens", "logits"): _WIDTH | _SHORT,
    ("FloatPanels", "weight"): {"longer in 0", "shorter in 0", "strides"} | _WIDTH | _FLOATS,
    ("product of floats", "x"): _ROWS | {"more dimensions", "strides"},
    ("pack", "weight"): {"longer in 0", "shorter in 0", "strides", "dtype torch.int8"}
    | {"dtype torch.bool"}
    | _WIDTH
    | _FLOATS,
    **{
        (form, name): {"strides"}
        for form in ("IntegerPanels", "DequantizedPanels", "DequantizedTiles")
        for name in ("codes", "scale", "offset")
    },
    **{
        (f"product of {form}", "x"): _ROWS | _FLOATS | {"more dimensions", "strides"}
        for form in ("IntegerPanels", "DequantizedPanels", "DequantizedTiles")
    },
    ("Packed", "x"): _ROWS | {"more dimensions", "strides"},
}


def wrong(x: Any) -> Iterator[tuple[str, Any]]:
    """The same argument with one thing wrong."""
    if isinstance(x, np.ndarray):
        for name, changed in wrong(torch.from_numpy(x.astype(np.int64))):
            if name != "device" and name != "strides" and not name.startswith("dtype"):
                yield name, np.array(changed.numpy(), dtype=x.dtype)
        yield "dtype", x.astype(np.float64)
        yield "strides", np.repeat(x, 2)[::2]
        return
    for dim, size in enumerate(x.shape):
        for name, length in (("longer", size + 1), ("shorter", size - 1), ("empty", 0)):
            if length != size and not (name == "shorter" and length <= 0):
                index = torch.arange(length) % size
                yield f"{name} in {dim}", x.index_select(dim, index).contiguous()
    yield "more dimensions", x[None]
    yield "no dimensions", x.flatten()[0].clone()
    yield "flat", torch.cat([x.flatten()] * 2)
    for dtype in _DTYPES:
        if dtype != x.dtype:
            yield f"dtype {dtype}", x.to(dtype)
    yield "strides", torch.stack([x, x], -1)[..., 0]
    yield "device", x.to("meta")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


Case = tuple[str, Callable[..., Any], dict[str, Any], dict[str, list[Any]]]


def cases() -> Iterator[Case]:
    """(name, function, right arguments, wrong values of those that are not only wrong in form)."""
    ops, rows = NumbaOps(), torch.ones(2, 8)
    yield "rms_norm", lambda x, weight: ops.rms_norm(x, weight, 1e-6), norm_arguments(rows), {}
    yield (
        "add_rms_norm",
        lambda x, residual, weight: ops.add_rms_norm(x, residual, weight, 1e-6),
        {**norm_arguments(rows), "residual": rows.clone()},
        {},
    )
    yield (
        "act_and_mul",
        lambda gate_up, activation="silu": ops.act_and_mul(gate_up, activation),
        {"gate_up": torch.ones(2, 16)},
        {"activation": ["relu", None]},
    )
    yield "norm_rotate_store", store(ops), store_arguments(torch.zeros(2, 3, 1, 4, 8)), STORED
    codes, scales = torch.zeros(2, 3, 1, 4, 8, dtype=torch.int8), torch.zeros(2, 3, 1, 4)
    quantized = store_arguments(codes) | {"scales": scales}
    yield "norm_rotate_store of int8", store(ops), quantized, STORED
    arguments = attention_arguments(torch.zeros(2, 3, 1, 4, 8))
    yield "attend", attend(NumbaAttention()), arguments, ATTENDED
    quantized = attention_arguments(codes) | {"scales": scales}
    yield "attend of int8", attend(NumbaAttention()), quantized, ATTENDED
    of_rows = {
        "temperatures": np.array([0, 1], dtype=np.float32),
        "seeds": np.array([1, 2], dtype=np.uint64),
        "positions": np.array([1, 2], dtype=np.int64),
        "completions": np.array([0, 0], dtype=np.uint32),
    }
    yield "choose_tokens", choose_tokens, {"logits": torch.ones(2, 50), **of_rows}, {}
    weight = torch.ones(70, 16)
    yield "FloatPanels", FloatPanels, {"weight": weight}, {}
    yield "product of floats", FloatPanels(weight), {"x": torch.ones(2, 16)}, {}
    yield "pack", pack, {"weight": weight, "depth": 1}, {"depth": [3, 0, -1]}
    given = {"codes": torch.ones(70, 64, dtype=torch.int8), "scale": torch.ones(70, 2)}
    given["offset"] = torch.ones(70, 2)
    for form in (IntegerPanels, DequantizedPanels, DequantizedTiles):
        yield form.__name__, form, given | {"bits": 8}, {"bits": [2, 16, None]}
        yield f"product of {form.__name__}", form(**given), {"x": torch.ones(2, 64)}, {}
    if packed_linear.works():
        yield "Packed", Packed(weight.bfloat16()), {"x": torch.ones(2, 16).bfloat16()}, {}


def norm_arguments(rows: Tensor) -> dict[str, Tensor]:
    return {"x": rows.clone(), "weight": torch.ones(rows.shape[1])}


STORED = {
    "positions": [ints(0, -1, 2), ints(0, 1, 5), ints(2**31 - 1, 0, 0)],
    "slots": [ints(4, 5, -1), ints(4, 5, 12), ints(-(2**31), 5, 6)],
    "k_weight": [None],
    "k_eps": [1e-3],
}


def store_arguments(cache: Tensor) -> dict[str, Any]:
    """3 tokens of 2 query heads, and blocks of 4 slots."""
    tables = {"cos": torch.ones(5, 4), "sin": torch.ones(5, 4)}
    norms = {"q_weight": torch.ones(8), "k_weight": torch.ones(8)}
    where = {"positions": ints(0, 1, 2), "slots": ints(4, 5, 6)}
    return {"heads": torch.ones(3, 4, 8), "cache": cache.clone(), **tables, **norms, **where}


def store(ops: NumbaOps) -> Callable[..., Any]:
    def call(heads, cache, cos, sin, q_weight, k_weight, positions, slots, scales=None, k_eps=1.0):
        q_norm, k_norm = (
            None if weight is None else SimpleNamespace(weight=weight, eps=eps)
            for weight, eps in ((q_weight, 1.0), (k_weight, k_eps))
        )
        metadata = SimpleNamespace(positions=positions, slot_mapping=slots)
        kept = KVCache(cache, scales)
        rotary = SimpleNamespace(cos=cos, sin=sin)
        return ops.norm_rotate_store(heads, rotary, (q_norm, k_norm), kept, metadata)

    return call


ATTENDED = {
    "starts": [ints(0, 1, 3, 40), ints(0, 1, 3, 38), ints(1, 1, 3, 39), ints(0, 3, 1, 39)],
    "lens": [ints(37, 2, 36), ints(0, 2, 36), ints(-5, 2, 36), ints(5, 1, 36), ints(5, 2, 2**30)],
    "tables": [
        torch.tensor(rows, dtype=torch.int32)
        for rows in (
            [[1, 3] + [0] * 7, [2] * 9, [1] * 9],
            [[1, -1] + [0] * 7, [2] * 9, [1] * 9],
            [[1, 2] + [0] * 7, [2**31 - 1] * 9, [1] * 9],
            [[1, 2] + [0] * 7, [2] * 9, [1] * 8 + [3]],
        )
    ],
    "num_decode_rows": [-1, 4, 40],
    "layer": [AttentionLayer(2, 1, 8, 1.0, 0), AttentionLayer(3, 2, 8, 1.0)],
}


def attention_arguments(cache: Tensor) -> dict[str, Any]:
    """Rows of 1, 2 and 36 tokens."""
    tables = torch.tensor([[1, 2] + [0] * 7, [2] * 9, [1] * 9], dtype=torch.int32)
    where = {"starts": ints(0, 1, 3, 39), "lens": ints(5, 2, 36), "tables": tables}
    return {"q": torch.ones(39, 2, 8), "cache": cache.clone(), **where}


def attend(backend: NumbaAttention) -> Callable[..., Any]:
    def call(q, cache, starts, lens, tables, scales=None, num_decode_rows=1, layer=None):
        nothing = torch.empty(0, dtype=torch.int32)
        metadata = AttentionMetadata(
            nothing, nothing, starts, lens, tables, num_decode_rows, 36, 36
        )
        kept = KVCache(cache, scales)
        return backend.attend(layer or AttentionLayer(2, 1, 8, 1.0), q, kept, metadata)

    return call


def main() -> None:
    is_small = sys.argv[1:] == ["small"]
    torch.set_num_threads(1)
    with torch.inference_mode():
        for name, call, right, values in cases():
            call(**right)
            for argument in {**right, **values}:
                given = right.get(argument)
                forms = wrong(given) if isinstance(given, Tensor | np.ndarray) else ()
                others = enumerate(values.get(argument, ()))
                changes = [*forms, *((f"value {number}", x) for number, x in others)]
                for what, changed in changes:
                    is_right = what in RIGHT.get((name, argument), ())
                    if is_small and is_right and what.startswith("dtype"):
                        continue
                    print(f"{name} | {argument} | {what} | ", end="", flush=True)
                    try:
                        call(**{**right, argument: changed})
                        print("right" if is_right else "accepted")
                    except Exception as error:
                        told = f"{type(error).__name__} {str(error)[:100]!r}"
                        print(f"refused though right: {told}" if is_right else told)


if __name__ == "__main__":
    main()
