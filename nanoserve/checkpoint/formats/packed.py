"""Unpack small integers, and convert zero points to the canonical form."""

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.utils.checks import require


def unpack_int32(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, words] into uint8 [rows, words x 32 / bits], the lowest bits first.

    `bits` is 2, 4 or 8, so that no code spans two bytes. It works on bytes instead of words, so
    that no temporary tensor is larger than the result.
    """
    octets = packed.contiguous().view(torch.uint8)  # little-endian, as safetensors is
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((octets.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def affine_matrix(
    codes: Tensor, zeros: Tensor, scale: Tensor, bits: int, group_of_input: Tensor | None
) -> QuantizedMatrix:
    """Convert unsigned codes with zero points, w = (code - zero) x scale, to canonical form.

    codes: uint8 [out, in]; zeros: uint8 [out, groups], of the same `bits`; scale: [out, groups].
    For float16 or bfloat16 scales, codes x scale + offset equals (code - zero) x scale exactly:
    both products and their sum have at most 11 + 9 significant bits, and float32 has 24.
    """
    half = 2 ** (bits - 1)
    scale = scale.float().contiguous()
    shift = half - zeros.to(torch.int32)
    return QuantizedMatrix(
        codes=(codes - half).view(torch.int8),  # wraps around: 3 - 8 is 251, which is -5
        scale=scale,
        offset=shift * scale if shift.any() else None,
        bits=4 if bits <= 4 else 8,
        group_of_input=group_of_input,
    )


def num_groups(num_inputs: int, group_size: int) -> int:
    """Return the number of groups in a row; the last may be shorter. A size of -1 is one group."""
    return 1 if group_size == -1 else -(-num_inputs // group_size)


def group_of_input(
    num_inputs: int, group_size: int, g_idx: Tensor | None, where: str
) -> Tensor | None:
    """Return int [in], the group of each input, or None if groups are runs of one size.

    g_idx: the list in the file, if there is one; it may be redundant. A shorter last group needs
    the list: 96 inputs in groups of 40 are 3 groups, and the number of groups alone would imply 32
    inputs each.
    """
    groups = num_groups(num_inputs, group_size)
    runs = torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
    if g_idx is None:
        g_idx = runs
    lowest, highest = int(g_idx.min()), int(g_idx.max())
    require(
        lowest >= 0 and highest < groups,
        f"{where:.199} has groups {lowest} to {highest}, but must have 0 to {groups - 1}",
    )
    if group_size == -1 or (num_inputs % group_size == 0 and torch.equal(g_idx.long(), runs)):
        return None
    return g_idx.to(torch.int32)
