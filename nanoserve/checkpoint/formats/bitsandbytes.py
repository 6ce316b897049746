"""bitsandbytes: NF4 and FP4 (QLoRA, Dettmers et al., 2023), LLM.int8() (Dettmers et al., 2022).

Four bits: `weight` holds two codes per byte, the first in the high nibble, for all rows as one run;
code c of block b is quant_map[c] x absmax[b]. With double quantization, `weight.absmax` holds codes
as well: nested_quant_map[c] x nested_absmax[b'] + nested_offset. `weight.quant_state` is JSON, as
bytes: the shape and the block sizes. Eight bits: `weight` is int8, and `SCB` is each row's largest
magnitude, which has the code 127.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.reader import Reader
from nanoserve.utils.checks import check_int, check_list, is_int, json_object, require

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_MAX_STATE_BYTES = 2**16
_VALUE_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # bnb_4bit_quant_storage


def open_bitsandbytes(path: Path, config: Mapping[str, Any]) -> Reader:
    """Return the reader for 4 or 8 bits, according to `config`."""
    return (Int8Reader if config.get("load_in_8bit") else NF4Reader)(path, config)


class NF4Reader(Reader):
    """Reader of NF4 and FP4, whose code values are stored in the file."""

    marks = ("weight.absmax",)
    parts = ("weight", "weight.absmax", "weight.quant_map", *_NESTED, *_STATES)

    def layout(self, module: str) -> tuple[tuple[int, int], dict[str, tuple[int, ...]]]:
        state = self._state(module)
        count = state["shape"][0] * state["shape"][1]
        self.check_dtype(module, "weight", *_VALUE_BYTES)
        value_bytes = _VALUE_BYTES[self.header(module, "weight").dtype]
        is_whole = count % (2 * value_bytes) == 0
        problem = f"{module:.99}.weight: {count} 4-bit codes do not fill whole values"
        require(is_whole, f"{problem} of {value_bytes} bytes")
        blocks = -(-count // state["blocksize"])
        wanted: dict[str, tuple[int, ...]] = {
            "weight": (count // 2 // value_bytes, 1),
            "weight.absmax": (blocks,),
            "weight.quant_map": (16,),
            state["name"]: self.header(module, state["name"]).shape,
        }
        if "nested_blocksize" in state:
            wanted["weight.nested_absmax"] = (-(-blocks // state["nested_blocksize"]),)
            wanted["weight.nested_quant_map"] = (256,)
            self.check_dtype(module, "weight.nested_absmax", "F32")
            self.check_dtype(module, "weight.nested_quant_map", "F32")
        self.check_dtype(module, "weight.quant_map", "F32")
        self.check_dtype(module, "weight.absmax", "U8" if "nested_blocksize" in state else "F32")
        return tuple(state["shape"]), wanted

    def weight(self, module: str) -> Tensor:
        state = self._state(module)
        octets = self.part(module, "weight").flatten().view(torch.uint8)
        both = torch.arange(256)
        meaning = self.part(module, "weight.quant_map").float()
        values = meaning[torch.stack((both >> 4, both & 15), dim=1)][octets.int()].flatten()
        absmax, size = self._absmax(module, state), state["blocksize"]
        whole = len(values) // size  # full blocks; a shorter one may follow
        values[: whole * size].view(-1, size).mul_(absmax[:whole, None])
        values[whole * size :].mul_(absmax[-1])
        return values.view(state["shape"])

    def _absmax(self, module: str, state: dict[str, Any]) -> Tensor:
        """Return the largest magnitudes of the blocks, float32 [blocks]."""
        absmax = self.part(module, "weight.absmax")
        if "nested_blocksize" not in state:
            return absmax.float()
        values = self.part(module, "weight.nested_quant_map").float()[absmax.int()]
        largest = self.part(module, "weight.nested_absmax").float()
        largest = largest.repeat_interleave(state["nested_blocksize"])[: len(values)]
        return values * largest + state["nested_offset"]

    def _state(self, module: str) -> dict[str, Any]:
        names = [name for name in _STATES if self.has(module, name)]
        require(len(names) == 1, f"{module:.99} has {names} and must have one of {[*_STATES]}")
        header = self.header(module, names[0])
        where = f"{module:.99}.{names[0]}"
        is_text = header.dtype == "U8" and len(header.shape) == 1
        is_text = is_text and 0 < header.shape[0] <= _MAX_STATE_BYTES
        require(is_text, f"{where} must be JSON of at most {_MAX_STATE_BYTES} bytes")
        state = json_object(bytes(self.part(module, names[0]).tolist()), where)
        shape: Any = state.get("shape")
        check_list(f"{where}: shape", shape, lambda n: is_int(n) and 0 < n < 2**31, "two sizes")
        require(len(shape) == 2, f"{where}: shape={shape} must have 2 dimensions")
        for name in ("blocksize", "nested_blocksize"):
            if name in state or name == "blocksize":
                check_int(f"{where}: {name}", state.get(name), 1, 2**20)
        if "nested_blocksize" in state:
            offset = state.get("nested_offset")
            require(isinstance(offset, float), f"{where}: nested_offset={offset} must be a number")
        return state | {"name": names[0]}


class Int8Reader(Reader):
    """Reader of LLM.int8(): one scale per row. Outliers are chosen at run time, not stored."""

    marks = ("SCB",)
    parts = ("weight", "SCB", "weight_format")
    optional = ("weight_format",)

    def layout(self, module: str) -> tuple[tuple[int, int], dict[str, tuple[int, ...]]]:
        shape = self.matrix_header(module, "weight", "I8")
        self.check_dtype(module, "SCB", "F32", "F16")
        return shape, {"weight": shape, "SCB": (shape[0],)}

    def weight(self, module: str) -> QuantizedMatrix:
        if self.has(module, "weight_format"):
            is_rows = not bool(self.part(module, "weight_format").any())
            problem = "is not 0 (row-major), an old GPU layout: save it again with bitsandbytes"
            require(is_rows, f"{module:.99}.weight_format {problem}")
        scale = self.part(module, "SCB").float().unsqueeze(1) / 127
        return QuantizedMatrix(codes=self.part(module, "weight"), scale=scale, bits=8)
