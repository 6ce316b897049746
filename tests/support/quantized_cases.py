"""The cases of quantised linears for `compile_kernels.py`."""

from collections.abc import Callable
from functools import partial

import torch

from nanoserve.kernels.expert_codes import ExpertCodes
from nanoserve.kernels.experts import fused_experts
from nanoserve.kernels.grouped_linear import GroupedWeight, grouped_product
from nanoserve.kernels.quantized_linear import scaled_product
from nanoserve.kernels.quantized_rows import quantize_rows

ROWS = (1, 64, 1024)  # one for each of the configurations


def _scaled(code_dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    x = torch.zeros(rows, inputs, dtype=torch.int8).view(code_dtype)
    weight = torch.zeros(outputs, inputs, dtype=torch.int8).view(code_dtype)
    # e4m3 in bfloat16 would not be ours
    dtype = torch.bfloat16 if code_dtype == torch.int8 else torch.float16
    scaled_product(x, torch.zeros(rows), weight, torch.zeros(outputs), dtype)


def _grouped(
    dtype: torch.dtype, bits: int, rows: int, size: tuple[int, int], group: int, has_offset: bool
) -> None:
    outputs, inputs = size
    stored = (inputs // 2, torch.uint8) if bits == 4 else (inputs, torch.int8)
    codes = torch.zeros(outputs, stored[0], dtype=stored[1])
    scale = torch.zeros(outputs, inputs // group)
    weight = GroupedWeight(codes, scale, scale if has_offset else None)
    grouped_product(torch.zeros(rows, inputs, dtype=dtype), weight)


def _rows(dtype: torch.dtype, code_dtype: torch.dtype, has_largest: bool) -> None:
    largest = torch.zeros(4) if has_largest else None
    quantize_rows(torch.zeros(4, 4096, dtype=dtype), code_dtype, largest)


def _experts(num_tokens: int) -> None:
    hidden, size, num_experts = 256, 192, 128
    weights = [
        ExpertCodes(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:2]))
        for shape in ((num_experts, 2 * size, hidden), (num_experts, hidden, size))
    ]
    x, ids = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16), torch.zeros(num_tokens, 8)
    fused_experts(x, ids.long(), ids, *weights)


def quantized_cases() -> list[tuple[str, Callable[[], None]]]:
    cases: list[tuple[str, Callable[[], None]]] = []
    for code_dtype, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "e4m3")):
        for rows in ROWS:
            for inputs, outputs in ((4096, 4096), (200, 72)):
                label = f"scaled_product {name} rows={rows} inputs={inputs}"
                cases.append((label, partial(_scaled, code_dtype, rows, inputs, outputs)))
        for dtype in (torch.bfloat16, torch.float32):
            for has_largest in (False, True):
                label = f"quantize_rows {name} {dtype} largest={has_largest} inputs=4096"
                cases.append((label, partial(_rows, dtype, code_dtype, has_largest)))
    for num_tokens in (4, 1024):
        label = f"experts of int8, bfloat16 tokens={num_tokens} hidden=256"
        cases.append((label, partial(_experts, num_tokens)))
    shapes = [(torch.bfloat16, 4, group, False) for group in (32, 64, 128)]
    shapes += [(torch.bfloat16, 4, 32, True), (torch.bfloat16, 8, 32, False)]
    shapes += [(torch.float16, 4, 128, True), (torch.float32, 4, 32, True)]
    for dtype, bits, group, has_offset in shapes:
        for rows in ROWS:
            label = f"grouped_product int{bits} {dtype} group={group} offset={has_offset} "
            case = partial(_grouped, dtype, bits, rows, (4096, 4096), group, has_offset)
            cases.append((f"{label}rows={rows} inputs=4096", case))
    case = partial(_grouped, torch.bfloat16, 4, 1, (72, 160), 32, True)
    cases.append(("grouped_product int4 bfloat16 group=32 offset=True rows=1 inputs=160", case))
    return [(label.replace("torch.", ""), call) for label, call in cases]
