"""Time attention over chunks for some tile sizes, and FlashAttention 3 if it is available.

    python benchmarks/prefill_tiles.py [--peers FOLDER] [--out FILE] [--rounds 3] [--limit 40]
    TRITON_INTERPRET=1 python benchmarks/prefill_tiles.py --device cpu    tiny, as a check

Prints one JSON object a line: case, variant, us, TFLOP/s. A variant that does not compile, run or
agree with the first one is a line with "error". FOLDER contains vLLM, with its
`_vllm_fa3_C*.so` (pack_peers.py). The variants are first compiled in parallel, in separate
processes, into Triton's cache on the disk.
"""

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from attention import replays, seconds
from gpu_job import Lines, Processes
from gpu_kernels import flash_attention
from paged_rows import Rows, Shape, make_rows
from tune import only

from nanoserve.kernels.triton.tile_config import TileConfig

VARIANTS = {
    "128x64 8w 5s (present)": TileConfig(128, 64, 8, 5),
    "128x128 8w 3s": TileConfig(128, 128, 8, 3),
    "64x64 4w 4s": TileConfig(64, 64, 4, 4),
    "128x64 8w 3s": TileConfig(128, 64, 8, 3),
}
_CONFIGS = list(VARIANTS.values())
_PRESENT = next(iter(VARIANTS))
_DECODE = "decode rows alone"
SHAPES = {
    "cuda": Shape("Qwen3-0.6B", 16, 8, 128, 0, 0, 0),
    "cpu": Shape("tiny", 4, 2, 16, 0, 0, 0),
}
CASES = {  # (new tokens, context) of each row, decode rows first
    "cuda": {
        "8x1024": [(1024, 1024)] * 8,
        "1x8192": [(8192, 8192)],
        "1x2048+8x1000": [(1, 1000)] * 8 + [(2048, 2048)],
        "1x2048": [(2048, 2048)],
        "1x512 at 8192": [(512, 8192)],
    },
    "cpu": {"2x20": [(20, 20)] * 2, "1x20+2": [(1, 30)] * 2 + [(20, 20)]},
}
_LONG = ("1x8192", "8x1024")


class Run(NamedTuple):
    case: str
    variant: str
    call: Callable[[], torch.Tensor]
    flop: int


def make(lens: list[tuple[int, int]], device: str) -> Rows:
    return make_rows(SHAPES[device], [n for _, n in lens], [n for n, _ in lens], 1, device)


def flop_of_chunks(lens: list[tuple[int, int]], shape: Shape) -> int:
    """Return FLOP: 4 x heads x head_dim for each pair of a query and a visible key."""
    seen = sum(n * (context - n) + n * (n + 1) // 2 for n, context in lens if n > 1)
    return 4 * shape.num_heads * shape.head_dim * seen


def attend(rows: Rows, config: TileConfig) -> torch.Tensor:
    with only(config, is_decode=False):
        return rows.attend(0)


def hybrid(rows: Rows) -> torch.Tensor:
    """FlashAttention 3 for chunks, Triton for decode rows."""
    chunks = flash_attention(rows.chunks(), 0)
    if rows.num_decode_rows == 0:
        return chunks
    return torch.cat([rows.decode_rows().attend(0), chunks])


def load_flash_attention(folder: Path | None) -> str | None:
    """Return None if it is available, otherwise the reason."""
    if folder is None:
        return "no --peers"
    try:
        found = sorted(folder.rglob("_vllm_fa3_C*.so"))
        if not found:
            return f"no _vllm_fa3_C*.so in {folder}"
        torch.ops.load_library(str(found[0]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def compile_variant(number: int) -> None:
    """Compile with any rows: Triton's kernels do not depend on numbers of rows and tokens."""
    attend(make([(1, 20), (300, 300)], "cuda"), _CONFIGS[number])


def runs_of(case: str, rows: Rows, flop: int, has_theirs: bool) -> list[Run]:
    runs = [
        Run(case, label, partial(attend, rows, config), flop) for label, config in VARIANTS.items()
    ]
    if has_theirs:
        runs.append(Run(case, "fa3 chunks, triton decode", partial(hybrid, rows), flop))
        runs.append(Run(case, "fa3 all", partial(flash_attention, rows, 0), flop))
    if rows.num_decode_rows:
        runs.append(Run(case, _DECODE, lambda: rows.decode_rows().attend(0), 0))
    return runs


def same(runs: list[Run], lines: Lines) -> list[Run]:
    """Return the variants whose results equal those of the first."""
    wanted, right = runs[0].call().float(), []
    for run in runs:
        try:
            found = run.call().float()
            gap = float((found - wanted[: len(found)]).abs().max())
            if not gap < 5e-2:
                raise ValueError(f"differs by {gap} from the present kernel")
            right.append(run)
        except Exception as error:
            say_error(run, error, lines)
    return right


def say_error(run: Run, error: Exception, lines: Lines) -> None:
    text = f"{type(error).__name__}: {error}"[:300]
    lines.say(case=run.case, variant=run.variant, error=text)


def time_of(run: Run, device: str) -> float:
    """Time calls in a CUDA graph, as in an engine; return the median of seven replays."""
    if device == "cpu":
        return seconds(run.call, device)
    repeats = 3 if run.case in _LONG else 10
    return statistics.median(replays([run.call] * repeats, 9)[2:]) / repeats


def time_all(runs: list[Run], args: Namespace, lines: Lines) -> dict[Run, list[float]]:
    """Time all variants in rounds, so that changes of the clock affect all of them."""
    times: dict[Run, list[float]] = {run: [] for run in runs}
    for _ in range(args.rounds):
        for run in list(times):
            if times[run] and lines.seconds > args.limit:
                continue
            try:
                times[run].append(time_of(run, args.device))
            except Exception as error:
                say_error(run, error, lines)
                del times[run]
    return times


def say_times(times: dict[Run, list[float]], lines: Lines) -> None:
    present = {run.case: min(each) for run, each in times.items() if run.variant == _PRESENT}
    for run, each in times.items():
        s = min(each)
        lines.say(
            case=run.case,
            variant=run.variant,
            us=round(s * 1e6, 1),
            all_us=[round(t * 1e6, 1) for t in each],
            tflops=round(run.flop / s / 1e12, 1),
            of_present=round(s / present.get(run.case, float("nan")), 3),
        )


def measure(args: Namespace) -> None:
    lines, is_tiny = Lines(args.out), args.device == "cpu"
    torch.manual_seed(0)
    compilers = Processes(compile_variant, [] if is_tiny else range(len(VARIANTS)))
    why_not = "no GPU" if is_tiny else load_flash_attention(args.peers)
    cases, shape = CASES[args.device], SHAPES[args.device]
    made = {name: make(lens, args.device) for name, lens in cases.items()}
    compiled = [code == 0 for code in compilers.wait()]
    device = "cpu" if is_tiny else torch.cuda.get_device_name()
    summary = {"torch": torch.__version__, "fa3": why_not or "loaded", "compiled": compiled}
    lines.say(device=device, **summary, seconds=lines.seconds)
    runs: list[Run] = []
    for name, rows in made.items():
        flop = flop_of_chunks(cases[name], shape)
        runs += same(runs_of(name, rows, flop, why_not is None), lines)
    say_times(time_all(runs, args, lines), lines)
    lines.say(seconds=lines.seconds)


def main() -> None:
    parser = ArgumentParser(description="The attention of chunks, for some tiles.")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--peers", type=Path, metavar="FOLDER", help="folder with vLLM, for its FlashAttention 3")
    add("--out", type=Path, metavar="FILE", help="all lines, as JSON")
    add("--rounds", type=int, default=3, help="%(default)s")
    add("--limit", type=float, default=40.0, help="seconds; no round begins after (%(default)s)")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
