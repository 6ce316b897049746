"""`QuantizedMatrix` is the canonical form of quantized weights, to which all readers convert.

    w[n, k] = codes[n, k] x scale[n, g] + offset[n, g]          with g = k // group_size

A row is an output. A group is a run of inputs that share a scale: a whole row, or 16 to 128 inputs.
Codes are signed, and symmetric formats have no offset. Unsigned codes with zero points (w = (q -
zero) x scale) are converted to codes = q - 2^(bits - 1), offset = (2^(bits - 1) - zero) x scale.
Kernels repack this form; see `nanoserve.kernels.cpu.integer_linear`.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class QuantizedMatrix:
    """The quantized weight of a linear layer.

    codes: int8 [out, in]; scale and offset (None is all zeros): float32 [out, groups].
    bits: 4 if codes are -8 to 7, 8 if they are -128 to 127.
    group_of_input: int [in], the group of each input, if groups are not runs (GPTQ's act-order).
    is_e4m3: the codes are the bytes of 8-bit floats (e4m3).

    Raises `ValueError` if shapes or dtypes do not match.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None
    bits: int = 8
    group_of_input: Tensor | None = None
    is_e4m3: bool = False

    def __post_init__(self) -> None:
        out, num_inputs = self.codes.shape
        if len(self.scale.shape) != 2 or 0 in (num_inputs, self.scale.shape[1]):
            raise ValueError(
                f"codes {list(self.codes.shape)} and scale {list(self.scale.shape)} must be "
                f"[out, in] and [out, groups], with at least one input and one group"
            )
        groups = self.scale.shape[-1]
        if self.codes.dtype != torch.int8 or self.bits not in (4, 8):
            raise ValueError(
                f"codes must be int8 with bits=4 or 8, not {self.codes.dtype} with bits={self.bits}"
            )
        for name, tensor in (("scale", self.scale), ("offset", self.offset)):
            if tensor is not None and (
                tensor.dtype != torch.float32 or tensor.shape != (out, groups)
            ):
                raise ValueError(
                    f"{name} must be float32 [{out}, {groups}], not {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
        if self.group_of_input is None and num_inputs % groups:
            raise ValueError(f"{num_inputs} inputs cannot be divided into {groups} groups")

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_inputs = self.codes.shape
        return num_outputs, num_inputs

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scale.shape[1]

    def dequantize(self) -> Tensor:
        """Return float32 [out, in], equal to the weight that the format's own library uses."""
        if self.group_of_input is None:
            scale, offset = self.scale.repeat_interleave(self.group_size, dim=1), self.offset
            if offset is not None:
                offset = offset.repeat_interleave(self.group_size, dim=1)
        else:
            group = self.group_of_input.long()
            scale, offset = self.scale[:, group], None
            if self.offset is not None:
                offset = self.offset[:, group]
        codes = self.codes.view(torch.float8_e4m3fn).float() if self.is_e4m3 else self.codes
        weight = codes * scale
        return weight if offset is None else weight + offset

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Return codes, scale, offset and bits, the operands of the kernels.

        Codes of 8-bit floats are float8_e4m3fn, others int8. Raises `ValueError` for groups that
        are not runs of inputs: see `in_runs`.
        """
        if self.group_of_input is not None:
            raise ValueError(
                "inputs are not sorted by group, which the kernels require: call in_runs()"
            )
        codes = self.codes.view(torch.float8_e4m3fn) if self.is_e4m3 else self.codes
        return codes, self.scale, self.offset, self.bits

    def rows(self, first: int, end: int) -> "QuantizedMatrix":
        """Return the part for the outputs [first, end)."""
        offset = None if self.offset is None else self.offset[first:end]
        return replace(
            self, codes=self.codes[first:end], scale=self.scale[first:end], offset=offset
        )

    def reordered(self, order: Tensor) -> "QuantizedMatrix":
        """Return the outputs `order`, integers [out]."""
        offset = None if self.offset is None else self.offset[order]
        return replace(self, codes=self.codes[order], scale=self.scale[order], offset=offset)

    def split(self, num_rows: int) -> "list[QuantizedMatrix]":
        """Split into parts of `num_rows` outputs, like `Tensor.split`."""
        firsts = range(0, self.shape[0], num_rows)
        return [self.rows(first, min(first + num_rows, self.shape[0])) for first in firsts]

    def columns(self, first: int, end: int) -> "QuantizedMatrix":
        """Return the part for the inputs [first, end). If they cut a group, all become smaller."""
        codes = self.codes[:, first:end]
        if self.group_of_input is not None:
            return replace(self, codes=codes, group_of_input=self.group_of_input[first:end])
        size = self.group_size
        smaller = math.gcd(first, end, size)
        groups = slice(first // smaller, end // smaller)
        scale, offset = self.scale.repeat_interleave(size // smaller, 1)[:, groups], self.offset
        if offset is not None:
            offset = offset.repeat_interleave(size // smaller, 1)[:, groups]
        return replace(self, codes=codes, scale=scale, offset=offset)

    def in_runs(self) -> "tuple[QuantizedMatrix, Tensor | None]":
        """Return an equal matrix whose groups are runs, and the order of its inputs.

        With `matrix, order = q.in_runs()`, x @ q.T equals x[:, order] @ matrix.T; None is the
        original order. Raises `ValueError` for groups of unequal sizes.
        """
        if self.group_of_input is None:
            return self, None
        group = self.group_of_input.long()
        sizes = group.bincount(minlength=self.scale.shape[1])
        if len(sizes.unique()) > 1:
            found = f"{int(sizes.min())} to {int(sizes.max())} inputs"
            raise ValueError(f"groups must have the same size, not {found}")
        order = group.argsort(stable=True)
        return replace(self, codes=self.codes[:, order], group_of_input=None), order


def reorder_rows(weight: Tensor | QuantizedMatrix, order: Tensor) -> Tensor | QuantizedMatrix:
    """Return the rows `order`, int64, of a weight that is quantized or not."""
    return weight[order] if isinstance(weight, Tensor) else weight.reordered(order)


def stack_rows(parts: list[Tensor | QuantizedMatrix]) -> Tensor | QuantizedMatrix:
    """Concatenate outputs. Dequantizes them unless all parts are quantized in equal groups."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    first = quantized[0] if len(quantized) == len(parts) else None
    if first is None or not all(_fits(first, other) for other in quantized[1:]):
        floats = [p.dequantize() if isinstance(p, QuantizedMatrix) else p for p in parts]
        return torch.cat(floats)
    offset = None
    if any(part.offset is not None for part in quantized):
        offset = torch.cat(
            [torch.zeros_like(q.scale) if q.offset is None else q.offset for q in quantized]
        )
    return replace(
        first,
        codes=torch.cat([q.codes for q in quantized]),
        scale=torch.cat([q.scale for q in quantized]),
        offset=offset,
        bits=max(q.bits for q in quantized),
    )


def _fits(first: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    own, others = first.group_of_input, other.group_of_input
    same_order = own is others if own is None or others is None else torch.equal(own, others)
    same_kind = same_order and first.is_e4m3 == other.is_e4m3
    return same_kind and first.scale.shape[1] == other.scale.shape[1]
