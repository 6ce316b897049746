"""Find the fastest tiles of decode attention on this GPU, for the tuning table.

    python benchmarks/tune.py                                   head_dim 128, 2 heads to a KV head
    python benchmarks/tune.py --head-dim 64 --group 4 --grid num_warps=1,2,4 --grid tile_n=64
    TRITON_INTERPRET=1 python benchmarks/tune.py --device cpu   tiny, to check that it runs

A configuration is the result of `tile_config` with some fields replaced. Compiling one takes a
second, so a pool of processes fills Triton's cache first, on contexts of a few tokens.
"""

import itertools
import json
import multiprocessing
import os
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attention import SIZES, Peaks, decode_bytes, in_turns, measure_peaks, num_turns
from gpu_job import Job, Measurements
from paged_rows import Rows, Shape, decode_cases, make_rows

from nanoserve.cli.bench.hardware import choose_device, describe
from nanoserve.kernels.triton import paged_attention

Grid = dict[str, list[int]]
Values = dict[str, int]
_PROGRAMS = "num_programs"  # the field that changes how many programs are launched, not their code
_SWEPT = ("256x1000", "ragged 600", "8x1000", "1x8000")
_MOST_COMPILERS = 12
_SHOWN = 5


def default_grid(is_tiny: bool) -> Grid:
    if is_tiny:
        return {"tile_n": [16, 32], "num_warps": [4]}
    grid = {"tile_n": [32, 64, 128], "num_warps": [1, 2, 4], "num_stages": [3, 5]}
    return grid | {_PROGRAMS: [1, 2, 4]}


def points(grid: Grid) -> list[Values]:
    unknown = sorted(set(grid) - set(paged_attention.TileConfig._fields))
    if unknown:
        known = ", ".join(paged_attention.TileConfig._fields)
        raise ValueError(f"a tile configuration has no {', '.join(unknown)}; it has {known}")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


@contextmanager
def tiles(values: Values) -> Iterator[list[paged_attention.TileConfig]]:
    """In its context, use these values for all attention; yield the configurations."""
    original, made = paged_attention.tile_config, []

    def chosen(*args: Any, **kwargs: Any) -> paged_attention.TileConfig:
        made.append(original(*args, **kwargs)._replace(**values))
        return made[-1]

    with mock.patch.object(paged_attention, "tile_config", chosen):
        yield made


@contextmanager
def only(config: paged_attention.TileConfig | None, is_decode: bool) -> Iterator[None]:
    """In its context, use this configuration for decode rows, or for chunks; None: the default."""
    original = paged_attention.tile_config

    def chosen(
        head_dim: int, dtype: torch.dtype, group: int, for_decode: bool, *more: Any
    ) -> paged_attention.TileConfig:
        if config is None or for_decode != is_decode:
            return original(head_dim, dtype, group, for_decode, *more)
        return config

    with mock.patch.object(paged_attention, "tile_config", chosen):
        yield


def current(rows: Rows, grid: Grid) -> Values:
    """Return the current values of the fields that the grid varies."""
    with tiles({}) as made:
        rows.attend(0)
    return {name: getattr(made[0], name) for name in grid}


def compile_all(shape: Shape, grid: Grid, device: str) -> dict[str, str]:
    """Return the configurations that fail, with errors; `num_programs` does not matter."""
    if device == "cpu":
        return {}
    num_processes = max(1, min(_MOST_COMPILERS, (os.cpu_count() or 1) - 2))
    compiled = {name: values for name, values in grid.items() if name != _PROGRAMS}
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        results = pool.imap_unordered(partial(_compile, shape), points(compiled))
        return {str(values): error for values, error in results if error}


def _compile(shape: Shape, values: Values) -> tuple[Values, str]:
    """Compile with any rows: kernels do not depend on numbers of rows and splits."""
    try:
        with tiles(values):
            make_rows(shape, [8000], 1, 1, "cuda").attend(0)
        torch.cuda.synchronize()
    except Exception as error:
        return values, f"{type(error).__name__}: {error}"[:120]
    return values, ""


def sweep_case(shape: Shape, grid: Grid, contexts: list[int], peaks: Peaks) -> dict[str, Any]:
    """Return the fastest and the current values: microseconds, and share of a copy's rate."""
    kv, num_bytes = decode_bytes(shape, contexts)
    layers = num_turns(kv, SIZES[peaks.device])
    rows = make_rows(shape, contexts, 1, layers, peaks.device)
    found = []
    for values in points(grid):
        if (us := _microseconds(rows, values, layers, peaks.device)) is not None:
            found.append((us, values))
    found.sort(key=lambda item: item[0])
    now = current(rows, grid)

    def described(us: float | None, values: Values) -> dict[str, Any]:
        share = us and peaks.share(num_bytes / (us / 1e6), peaks.bandwidth)
        return {"us": us, "of a copy": share, **values}

    us_now = _microseconds(rows, now, layers, peaks.device)
    return {
        "current": described(us_now, now),
        "best": [described(*item) for item in found[:_SHOWN]],
    }


def _microseconds(rows: Rows, values: Values, layers: int, device: str) -> float | None:
    """Return the time, or None for tiles that do not fit."""
    try:
        with tiles(values):
            return in_turns(rows.attend, layers, device) * 1e6
    except Exception as error:
        print(f"{values}: {type(error).__name__}: {error}"[:200])
        return None


def sweep(job: Job) -> Measurements:
    """Run the stage of gpu_day.py: the default grid, mainly for the first shape."""
    sizes, grid = SIZES[job.device], default_grid(job.is_tiny)
    peaks = measure_peaks(sizes, job.device)
    cases = decode_cases(job.is_tiny)
    swept = list(cases if job.is_tiny else _SWEPT)
    for shape in sizes.shapes:
        yield f"{shape.name}: refused", partial(compile_all, shape, grid, job.device)
        for name in swept:
            measure = partial(sweep_case, shape, grid, cases[name], peaks)
            yield f"{shape.name}: {name}", measure
        swept = swept[:2]


def parse_grid(pairs: list[str], device: str) -> Grid:
    if not pairs:
        return default_grid(device == "cpu")
    try:
        named = (pair.split("=") for pair in pairs)
        grid = {name: [int(n) for n in values.split(",")] for name, values in named}
        points(grid)
    except ValueError as error:
        raise SystemExit(f"--grid FIELD=1,2,4: {error}") from None
    return grid


def main() -> None:
    parser = ArgumentParser(description="The fastest tiles of the decode attention.")
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--head-dim", type=int, default=128, help="%(default)s")
    add("--group", type=int, default=2, help="heads to a KV head (%(default)s)")
    add("--kv-heads", type=int, default=8, help="%(default)s")
    add("--grid", action="append", default=[], metavar="FIELD=1,2,4", help="instead of the usual")
    add("--json", metavar="FILE")
    args = parser.parse_args()
    device = choose_device(args.device)
    grid = parse_grid(args.grid, device)
    heads = (args.group * args.kv_heads, args.kv_heads, args.head_dim)
    shape = Shape(f"head_dim {args.head_dim}, group {args.group}", *heads, 0, 0, 0)
    peaks = measure_peaks(SIZES[device], device)
    print(f"{describe(device)}; {shape.name}, {len(points(grid))} configurations", flush=True)
    for values, error in compile_all(shape, grid, device).items():
        print(f"refused: {values}: {error}")
    result = {}
    for name, contexts in decode_cases(device == "cpu").items():
        result[name] = sweep_case(shape, grid, contexts, peaks)
        print(f"\n{name}\n  now  {_line(result[name]['current'])}")
        for best in result[name]["best"]:
            print(f"  best {_line(best)}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


def _line(point: dict[str, Any]) -> str:
    us, share = point["us"], point["of a copy"]
    if us is None:
        return "does not run"
    values = ", ".join(f"{name}={n}" for name, n in list(point.items())[2:])
    return f"{us:9.1f} us {'' if share is None else f'{share:5.0%} of a copy'}  {values}"


if __name__ == "__main__":
    main()
