"""Time attention over an 8-bit KV cache, compared with bfloat16, for some tile sizes.

    python benchmarks/kv_code_tiles.py [--out FILE] [--rounds 2] [--limit 40]
    TRITON_INTERPRET=1 python benchmarks/kv_code_tiles.py --device cpu    tiny, as a check

Prints one JSON object a line. `of_bf16` is the time over that of bfloat16 with its own tiles (below
1: faster), `gbs` the rate at which K and V, codes and scales, are read. A variant that fails or
differs is a line with "error".
"""

import statistics
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from attention import replays, seconds
from gpu_job import Lines, Processes
from paged_rows import DTYPE, Rows, Shape, make_rows
from tune import only

from nanoserve.attention.quantized_kv import dequantize, quantize
from nanoserve.kernels.triton.tile_config import TileConfig

KINDS = {"bf16": None, "int8": torch.int8, "fp8": torch.uint8}
DECODE = {  # tiles for codes; None: those of tile_config
    "own": None,
    "64 keys, 3 programs": TileConfig(16, 64, 4, 5, 3),
    "128 keys, 2 programs": TileConfig(16, 128, 4, 5, 2),
    "64 keys, 7 stages, 2 programs": TileConfig(16, 64, 4, 7, 2),
}
CHUNK = {
    "own": None,
    "128x32 8w 5s (before)": TileConfig(128, 32, 8, 5),
    "128x64 8w 5s": TileConfig(128, 64, 8, 5),
}
SHAPES = {
    "cuda": Shape("Qwen3-0.6B", 16, 8, 128, 0, 0, 0),
    "cpu": Shape("tiny", 4, 2, 16, 0, 0, 0),
}


class Case(NamedTuple):
    num_rows: int
    context: int
    query_len: int
    num_layers: int  # in turns: more than the GPU's cache holds
    repeats: int

    @property
    def is_decode(self) -> bool:
        return self.query_len == 1

    @property
    def variants(self) -> dict[str, TileConfig | None]:
        return DECODE if self.is_decode else CHUNK


CASES = {
    "cuda": {
        "256x1000": Case(256, 1000, 1, 2, 12),
        "64x1000": Case(64, 1000, 1, 4, 24),
        "8x1000": Case(8, 1000, 1, 24, 48),
        "64x8000": Case(64, 8000, 1, 1, 4),
        "1x8000": Case(1, 8000, 1, 24, 48),
        "prompts 8x1024": Case(8, 1024, 1024, 1, 3),
    },
    "cpu": {"2x20": Case(2, 20, 1, 1, 1), "prompts 1x20": Case(1, 20, 20, 1, 1)},
}
_COMPILED = (Case(2, 200, 1, 1, 1), Case(1, 200, 200, 1, 1))  # to Triton, all rows are alike


class Run(NamedTuple):
    kind: str
    variant: str
    rows: Rows
    config: TileConfig | None


def make(kind: str, case: Case, device: str) -> tuple[Rows, torch.Tensor]:
    """Return rows with caches of this kind, and the expected attention over the first one."""
    contexts = [case.context] * case.num_rows
    rows = make_rows(SHAPES[device], contexts, case.query_len, case.num_layers, device)
    dtype = KINDS[kind]
    if dtype is None:
        return rows, rows.attend(0).float()
    caches = [quantize(cache, dtype) for cache in rows.kv_caches]
    plain = dequantize(*caches[0]).to(DTYPE)
    wanted = replace(rows, kv_caches=[plain]).attend(0).float()
    codes, scales = map(list, zip(*caches, strict=True))
    return replace(rows, kv_caches=codes, kv_scales=scales), wanted


def num_bytes(kind: str, case: Case, shape: Shape) -> int:
    """Return the bytes of all K and V; a head's codes have a float32 scale."""
    each = 2 * shape.head_dim if KINDS[kind] is None else shape.head_dim + 4
    return 2 * case.num_rows * case.context * shape.num_kv_heads * each


def compile_kind(kind: str) -> None:
    """Compile a variant; a failure is reported when the variant is run."""
    for case in _COMPILED:
        rows, _ = make(kind, case, "cuda")
        for config in case.variants.values() if kind != "bf16" else (None,):
            try:
                with only(config, case.is_decode):
                    rows.attend(0)
            except Exception as error:
                print(f"{kind} {config}: {error}", flush=True)


def runs_of(name: str, case: Case, device: str, lines: Lines) -> list[Run]:
    """Return the variants whose results equal those of bfloat16."""
    runs = []
    for kind in KINDS:
        rows, wanted = make(kind, case, device)
        for label, config in case.variants.items() if kind != "bf16" else (("own", None),):
            try:
                with only(config, case.is_decode):
                    gap = float((rows.attend(0).float() - wanted).abs().max())
                if not gap < 6e-2:
                    raise ValueError(f"differs by {gap} from bfloat16 of the same values")
                runs.append(Run(kind, label, rows, config))
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:300]
                lines.say(case=name, kind=kind, variant=label, error=text)
    return runs


def time_of(run: Run, case: Case, device: str) -> float:
    """Time layers in turns in a CUDA graph; return the median of seven replays."""
    with only(run.config, case.is_decode):
        if device == "cpu":
            return seconds(partial(run.rows.attend, 0), device)
        layers = [i % case.num_layers for i in range(case.repeats)]
        calls = [partial(run.rows.attend, layer) for layer in layers]
        return statistics.median(replays(calls, 9)[2:]) / case.repeats


def measure_case(name: str, args: Namespace, lines: Lines) -> None:
    case = CASES[args.device][name]
    runs = runs_of(name, case, args.device, lines)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(args.rounds):
        for run, each in zip(runs, times, strict=True):
            if not (each and lines.seconds > args.limit):
                each.append(time_of(run, case, args.device))
    best = {(run.kind, run.variant): min(each) for run, each in zip(runs, times, strict=True)}
    base = best.get(("bf16", "own"), float("nan"))
    for (kind, label), s in best.items():
        gbs = round(num_bytes(kind, case, SHAPES[args.device]) / s / 1e9)
        found = {"us": round(s * 1e6, 1), "gbs": gbs, "of_bf16": round(s / base, 3)}
        lines.say(case=name, kind=kind, variant=label, **found)


def measure(args: Namespace) -> None:
    lines, is_tiny = Lines(args.out), args.device == "cpu"
    torch.manual_seed(0)
    compilers = Processes(compile_kind, [] if is_tiny else KINDS)
    compiled = [code == 0 for code in compilers.wait()]
    device = "cpu" if is_tiny else torch.cuda.get_device_name()
    lines.say(device=device, torch=torch.__version__, compiled=compiled, seconds=lines.seconds)
    for name in CASES[args.device]:
        measure_case(name, args, lines)
        if not is_tiny:
            torch.cuda.empty_cache()
    lines.say(seconds=lines.seconds)


def main() -> None:
    parser = ArgumentParser(description="Attention over an 8-bit KV cache, for some tiles.")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--out", type=Path, metavar="FILE", help="all lines, as JSON")
    add("--rounds", type=int, default=2, help="%(default)s")
    add("--limit", type=float, default=40.0, help="seconds; then one round each (%(default)s)")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
