"""Time e4m3 matrix products with scales per row: torch._scaled_mm, the engine's kernel, bfloat16.

    python benchmarks/e4m3_products.py [--out FILE] [--seconds 24] [--no-ours]
    TRITON_INTERPRET=1 python benchmarks/e4m3_products.py --device cpu    tiny, as a check

Prints a JSON object for each (K, N, M) as it is measured, large K first. `mm` accumulates exactly,
`mm_fast` does not. us: time of one product, in a CUDA graph of 20 of them over 20 weights (one
after the other, so that they come from memory, as in a model), best of 3 replays. rms: relative to
the norm of the float32 product of the same operands; bfloat16's result alone rounds by 1.7e-3. max:
the largest error over the largest magnitude.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from attention import in_turns, replays
from gpu_job import Lines, Processes
from torch.nn.functional import linear

from nanoserve.kernels.triton.quantized_linear import scaled_product

E4M3 = torch.float8_e4m3fn
_LARGEST = 448  # e4m3's
_COMPILE_LIMIT = 14.0  # seconds
_COMPILED_ROWS = (1, 64, 256)  # the kernel has three variants

Product = Callable[..., torch.Tensor]
Operands = list[tuple[torch.Tensor, ...]]


class Sizes(NamedTuple):
    products: tuple[tuple[int, int], ...]  # (K, N): inputs, outputs
    num_rows: tuple[int, ...]
    our_rows: tuple[int, ...]
    num_weights: int


SIZES = {
    "cuda": Sizes(
        ((9216, 3072), (12288, 4096), (4096, 4096), (1024, 3072), (3072, 1024)),
        (1, 16, 64, 127, 128, 256, 257, 2048),
        (1, 16, 64, 128, 256, 2048),
        20,
    ),
    "cpu": Sizes(((512, 64),), (1, 16, 257), (1, 257), 2),
}


class Weights(NamedTuple):
    """Repeat for as many weights as there are layers."""

    codes: list[torch.Tensor]
    scale: torch.Tensor
    floats: list[torch.Tensor]


def codes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(dim=1) / _LARGEST
    return (x / scale[:, None]).to(E4M3), scale.float()


def scaled_mm(
    is_fast: bool, x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor
) -> torch.Tensor:
    scales = {"scale_a": x_scale[:, None], "scale_b": w_scale[None, :]}
    return torch._scaled_mm(x, w.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=is_fast)


def ours(*operands: torch.Tensor) -> torch.Tensor:
    return scaled_product(*operands, torch.bfloat16)


def compile_ours(size: tuple[int, int]) -> None:
    """Compile in a separate process; the main one then finds the kernels in Triton's cache."""
    k, n = size
    w, w_scale = codes_of(torch.randn(n, k, device="cuda"))
    for m in _COMPILED_ROWS:
        x, x_scale = codes_of(torch.randn(m, k, device="cuda"))
        ours(x, x_scale, w, w_scale)
    torch.cuda.synchronize()


def microseconds(product: Product, operands: Operands, device: str) -> float:
    """Return the time of one product; all of them are launched in one graph."""
    calls = [partial(product, *each) for each in operands]
    if device == "cpu":
        return in_turns(lambda i: calls[i](), len(calls), device) * 1e6
    return min(replays(calls, 4)[1:]) / len(calls) * 1e6


def measure_product(
    product: Product, operands: Operands, truth: torch.Tensor, device: str
) -> dict[str, Any]:
    try:
        wrong = product(*operands[0]).float() - truth
        found: dict[str, Any] = {
            "rms": float(f"{(wrong.norm() / truth.norm()).item():.2e}"),
            "max": float(f"{(wrong.abs().max() / truth.abs().max()).item():.2e}"),
        }
    except Exception as error:
        return {"error": _in_short(error)}
    try:
        found["us"] = round(microseconds(product, operands, device), 1)
    except Exception as error:  # capture is not possible
        found["error_in_graph"] = _in_short(error)
    return found


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def make_weights(size: tuple[int, int], device: str) -> Weights:
    k, n = size
    w = torch.randn(n, k, device=device)
    codes, scale = codes_of(w)
    copies = range(SIZES[device].num_weights)
    return Weights([codes.clone() for _ in copies], scale, [w.bfloat16() for _ in copies])


def measure_rows(num_rows: int, weights: Weights, has_ours: bool, device: str) -> dict[str, Any]:
    codes, w_scale = weights.codes[0], weights.scale
    x = torch.randn(num_rows, codes.shape[1], device=device)
    x_codes, x_scale = codes_of(x)
    operands: Operands = [(x_codes, x_scale, each, w_scale) for each in weights.codes]
    truth = x_codes.float() @ codes.float().t() * x_scale[:, None] * w_scale[None, :]
    products: dict[str, Product] = {"mm": partial(scaled_mm, False)}
    products["mm_fast"] = partial(scaled_mm, True)
    if has_ours and num_rows in SIZES[device].our_rows:
        products["ours"] = ours
    found = {
        name: measure_product(product, operands, truth, device)
        for name, product in products.items()
    }
    x16 = x.bfloat16()
    truth = x16.float() @ weights.floats[0].float().t()
    operands = [(x16, each) for each in weights.floats]
    return found | {"bf16": measure_product(linear, operands, truth, device)}


def measure(args: Namespace) -> None:
    lines, sizes, has_ours = Lines(args.out), SIZES[args.device], not args.no_ours
    if args.device == "cuda":
        if has_ours:  # forked, because CUDA has not been touched yet
            codes = Processes(compile_ours, sizes.products, "fork").wait(_COMPILE_LIMIT)
            lines.say(compiled_s=lines.seconds, exit_codes=codes)
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        lines.say(gpu=name, capability=capability, torch=torch.__version__)
    torch.manual_seed(0)
    for k, n in sizes.products:
        weights = make_weights((k, n), args.device)
        for m in sizes.num_rows:
            if lines.seconds > args.seconds:
                lines.say(stopped_before=[k, n, m], s=lines.seconds)
                break
            lines.say(K=k, N=n, M=m, **measure_rows(m, weights, has_ours, args.device))
        del weights
    lines.say(s=lines.seconds)


def main() -> None:
    parser = ArgumentParser(description="Products of e4m3 with scales per row.")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--out", type=Path, metavar="FILE", help="all lines, as JSON")
    add(
        "--seconds",
        type=float,
        default=24,
        help="time after which no size is started (default %(default)s)",
    )
    add("--no-ours", action="store_true", help="leave out the engine's kernel")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
