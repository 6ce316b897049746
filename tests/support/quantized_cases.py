"""The cases of quantized linears for `compile_kernels.py`."""

from collections.abc import Callable
from functools import partial

import torch

from nanoserve.kernels.triton.experts import ExpertCodes, fused_experts
from nanoserve.kernels.triton.grouped_linear import GroupedWeight, grouped_product
from nanoserve.kernels.triton.quantized_linear import scaled_product
from nanoserve.kernels.triton.quantized_rows import quantize_rows, scale_shape

ROWS = (1, 64, 1024)  # one for each of the configurations
CODES = {"int4": torch.uint8, "int8": torch.int8, "e4m3": torch.float8_e4m3fn}


def _scaled(
    code_dtype: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
    group: int | None = None,
    **options: bool,
) -> None:
    x = torch.zeros(rows, inputs, dtype=torch.int8).view(code_dtype)
    weight = torch.zeros(outputs, inputs, dtype=torch.int8).view(code_dtype)
    # e4m3 in bfloat16 would not be ours
    dtype = torch.bfloat16 if code_dtype == torch.int8 else torch.float16
    x_scale = torch.zeros(scale_shape(rows, inputs, group))
    scaled_product(x, x_scale, weight, torch.zeros(outputs), dtype, group, **options)


def _grouped(
    dtype: torch.dtype,
    kind: str,
    rows: int,
    size: tuple[int, int],
    group: int,
    has_offset: bool,
    **options: bool,
) -> None:
    outputs, inputs = size
    codes = torch.zeros(outputs, inputs // 2 if kind == "int4" else inputs, dtype=CODES[kind])
    scale = torch.zeros(outputs, inputs // group)
    weight = GroupedWeight(codes, scale, scale if has_offset else None)
    grouped_product(torch.zeros(rows, inputs, dtype=dtype), weight, **options)


def _rows(
    dtype: torch.dtype,
    code_dtype: torch.dtype,
    has_largest: bool,
    group: int | None = None,
    **options: bool,
) -> None:
    largest = torch.zeros(scale_shape(4, 4096, group)) if has_largest else None
    quantize_rows(torch.zeros(4, 4096, dtype=dtype), code_dtype, largest, group, **options)


def _experts(num_tokens: int, **options: bool) -> None:
    hidden, size, num_experts = 256, 192, 128
    weights = [
        ExpertCodes(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:2]))
        for shape in ((num_experts, 2 * size, hidden), (num_experts, hidden, size))
    ]
    x, ids = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16), torch.zeros(num_tokens, 8)
    fused_experts(x, ids.long(), ids, *weights, **options)


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
    for rows in ROWS:
        for inputs, outputs in ((4096, 4096), (200, 72)):
            label = f"scaled_product int8 group=32 rows={rows} inputs={inputs}"
            cases.append((label, partial(_scaled, torch.int8, rows, inputs, outputs, 32)))
    for has_largest in (False, True):
        label = f"quantize_rows int8 bfloat16 group=32 largest={has_largest} inputs=4096"
        cases.append((label, partial(_rows, torch.bfloat16, torch.int8, has_largest, 32)))
    for num_tokens in (4, 1024):
        label = f"experts of int8, bfloat16 tokens={num_tokens} hidden=256"
        cases.append((label, partial(_experts, num_tokens)))
    shapes = [(torch.bfloat16, "int4", group, False) for group in (32, 64, 128)]
    shapes += [(torch.bfloat16, "int4", 32, True), (torch.bfloat16, "int8", 32, False)]
    shapes += [(torch.float16, "int4", 128, True), (torch.float32, "int4", 32, True)]
    shapes += [(torch.bfloat16, kind, 4096, False) for kind in ("int8", "e4m3")]
    for dtype, kind, group, has_offset in shapes:
        for rows in ROWS:
            label = f"grouped_product {kind} {dtype} group={group} offset={has_offset} "
            case = partial(_grouped, dtype, kind, rows, (4096, 4096), group, has_offset)
            cases.append((f"{label}rows={rows} inputs=4096", case))
    case = partial(_grouped, torch.bfloat16, "int4", 1, (72, 160), 32, True)
    cases.append(("grouped_product int4 bfloat16 group=32 offset=True rows=1 inputs=160", case))
    cases += _dependent_cases()
    return [(label.replace("torch.", ""), call) for label, call in cases]


def _dependent_cases() -> list[tuple[str, Callable[[], None]]]:
    """Each kernel as one that starts before the kernel before it has finished."""
    x, codes, option = torch.bfloat16, torch.int8, {"is_dependent": True}
    size = (4096, 4096)
    return [
        ("dependent scaled_product", partial(_scaled, codes, 16, *size, **option)),
        ("dependent quantize_rows", partial(_rows, x, codes, False, **option)),
        ("dependent quantize_rows group=32", partial(_rows, x, codes, False, 32, **option)),
        ("dependent grouped_product", partial(_grouped, x, "int4", 1, size, 32, False, **option)),
        ("dependent experts", partial(_experts, 4, **option)),
    ]
