"""Show the results of gpu_day.py on one screen, beside their aims."""

from collections.abc import Callable, Iterator
from typing import Any

MAX_LINES, MAX_WIDTH = 60, 160
_AIMS = {
    "decode": "aim: 80 % of a copy",
    "prefill": "aim: 50 % of a matrix product",
    "bench": "aim: 60 % of the roofline",
    "busy": "aim: 90 % busy",
}
_SHOWN_VERSIONS = ("Python", "CUDA", "torch", "triton", "transformers")
Result = dict[str, Any]


def print_table(records: list[dict[str, Any]]) -> None:
    lines = table(records)
    print("\n" + "\n".join(lines), flush=True)


def table(records: list[dict[str, Any]]) -> list[str]:
    """Return at most MAX_LINES lines of MAX_WIDTH characters, errors first."""
    lines = _stages(records) + _errors(records)
    for record in records:
        good = {name: value for name, value in record["result"].items() if _is_good(value)}
        try:
            lines += list(_SECTIONS[record["stage"]](good))
        except (KeyError, TypeError, ValueError) as error:  # the numbers are in the file anyway
            lines.append(f"{record['stage']}: cannot be shown here: {error!r}")
    if len(lines) > MAX_LINES:
        left_out = len(lines) - MAX_LINES + 1
        lines = [*lines[: MAX_LINES - 1], f"... and {left_out} lines more: see gpu_day.json"]
    return [line if len(line) <= MAX_WIDTH else f"{line[: MAX_WIDTH - 3]}..." for line in lines]


def _is_good(value: Any) -> bool:
    return not (isinstance(value, dict) and ("error" in value or "left out" in value))


def _stages(records: list[dict[str, Any]]) -> list[str]:
    words = []
    for record in records:
        if "skipped" in record:
            words.append(f"{record['stage']} SKIPPED ({record['skipped']})")
            continue
        state = {0: "ok", 124: "CUT OFF"}.get(record["rc"], f"FAILED ({record['rc']})")
        words.append(f"{record['stage']} {state} {record['seconds']:.0f} s")
    return _wrapped("stages", words)


def _errors(records: list[dict[str, Any]]) -> list[str]:
    lines = []
    for record in records:
        for name, value in record["result"].items():
            if not _is_good(value):
                kind = "FAILED" if "error" in value else "left out"
                words = " ".join((value.get("error") or value["left out"]).split())
                lines.append(f"{kind}: {record['stage']}, {name}: {words}")
    most = MAX_LINES // 4
    return lines if len(lines) <= most else [*lines[:most], f"... {len(lines) - most} more failed"]


def _wrapped(title: str, cells: list[str]) -> list[str]:
    """Return a text wrapped to one or more lines."""
    lines = [f"{title}: "]
    for i, cell in enumerate(cells):
        cell += " | " if i < len(cells) - 1 else ""
        if len(lines[-1]) + len(cell) > MAX_WIDTH:
            lines[-1] = lines[-1].removesuffix(" | ")
            lines.append("  ")
        lines[-1] += cell
    return lines if cells else []


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _flat(values: Result) -> list[str]:
    return [f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()]


def _facts(result: Result) -> Iterator[str]:
    cells = []
    for name, value in result.items():
        values = value if isinstance(value, dict) else {name: value}
        if name == "versions":
            values = {package: values[package] for package in _SHOWN_VERSIONS}
        cells += _flat(values)
    yield from _wrapped("facts", cells)


def _one_line(title: str) -> Callable[[Result], Iterator[str]]:
    def section(result: Result) -> Iterator[str]:
        yield from _wrapped(title, _flat(result))

    return section


def _tests(result: Result) -> Iterator[str]:
    for name, found in result.items():
        counts = [f"{found[kind]} {kind}" for kind in ("passed", "failed", "skipped")]
        counts += [f"{found['collected']} collected"] if "collected" in found else []
        cut = " CUT OFF" if found["rc"] == 124 else ""
        yield f"{name}: {', '.join(counts)}{cut} (aim: none failed)"
        yield from _wrapped("  failed", found["names"][:12])


def _bench(result: Result) -> Iterator[str]:
    yield f"nano-vllm's workload ({_AIMS['bench']})"
    for name, found in result.items():
        if "seconds" not in found:
            yield "  ".join([f"  {name:20}", *_flat(found)])
            continue
        seconds = ", ".join(f"{s:.2f}" for s in found["seconds"])
        line = f"  {name:20} {found['tok/s']:7.0f} tok/s  {seconds} s  "
        line += f"{found['of roofline']:4.0%} of the roofline  start {found['start s']:.1f} s  "
        line += f"{found['KV blocks']} blocks  idle {found['idle s']:.2f} s"
        if "single stream tok/s" in found:
            line += f"  single stream {found['single stream tok/s']:.0f} tok/s"
        yield line


def _profile(result: Result) -> Iterator[str]:
    yield f"steps, us ({_AIMS['busy']}); the largest gap; launches a layer; shares of the time"
    for name, found in result.items():
        line = f"  {name:26} wall {found['wall us']:6.0f}"
        if "busy us" in found:
            shares = ", ".join(f"{k} {v:.0%}" for k, v in found["shares"].items() if v >= 0.005)
            line += f"  busy {found['busy us']:6.0f} {found['busy share']:4.0%}  "
            line += f"gap {found['largest gap us']:4.0f}  "
            line += f"{found['launches per layer']:4.1f} a layer  {shares}"
        yield line


def _kernels(result: Result) -> Iterator[str]:
    cells = [
        f"{name.removeprefix('decode').strip(' ,')} {_byte_rate(row)}"
        for name, row in result.items()
        if name.startswith("decode")
    ]
    yield from _wrapped(f"decode, us ({_AIMS['decode']})", cells)
    yield from _by_shape(
        result.get("Decode attention", []),
        lambda row: f"{row['batch']}x{row['context']} {_byte_rate(row)}",
    )
    prefills = result.get("Prefill attention", [])
    if prefills:
        yield f"prefill, ms and TFLOP/s ({_AIMS['prefill']})"
    yield from _by_shape(
        prefills,
        lambda row: (
            f"{row['tokens'].replace(' ', '')} {row['ms']:.3f} {row['TFLOP/s']:.0f} "
            f"{_share(row['of a matrix product'])}"
        ),
    )
    yield from _by_shape(
        [row for row in result.get("Small kernels", []) if row["kernel"] != "choose_tokens"],
        lambda row: f"{row['kernel']} {row['tokens']} {_byte_rate(row)}",
    )
    for kernel in ("filter_borders", "choose_tokens"):
        words = {name: row for name, row in result.items() if name.startswith(kernel)}
        cells = [f"{name.split(' ', 1)[1]} {row['us']:.0f}" for name, row in words.items()]
        yield from _wrapped(f"{kernel}, us", cells)
    for name, rates in result.items():
        if name.startswith("product"):
            cells = [f"{m}: {r['us']:.1f} {r['TFLOP/s']:.0f}" for m, r in rates.items()]
            yield from _wrapped(f"{name}, us and TFLOP/s", cells)


def _byte_rate(row: Result) -> str:
    us = row["us"]
    return f"{us:.{1 if us < 100 else 0}f} {_share(row['of a copy'])}"


def _by_shape(rows: list[Result], words: Callable[[Result], str]) -> Iterator[str]:
    for shape in dict.fromkeys(row["shape"] for row in rows):
        cells = [words(row) for row in rows if row["shape"] == shape]
        yield from _wrapped(f"  {shape}", cells)


def _drafts(result: Result) -> Iterator[str]:
    for name, gains in result.items():
        cells = [f"{cell} {gain:.2f}" for cell, gain in gains.items()]
        yield from _wrapped(f"with draft tokens over without, {name}", cells)


def _peers(result: Result) -> Iterator[str]:
    for engine, found in result.items():
        if "seconds" in found:
            times = [f"{name} {found[name]:.2f}" for name in found if name.endswith(" ms")]
            seconds = ", ".join(f"{one:.2f}" for one in found["seconds"])
            yield from _wrapped(f"{engine}, s of the workload", [seconds, *times])
            continue
        cells = [
            f"{name} {', '.join(f'{rate:.0f}' for rate in rates)} tok/s"
            for name, rates in found.items()
            if isinstance(rates, list) and name != "failed"
        ]
        yield from _wrapped("peers", cells + found["failed"])


def _fa3(result: Result) -> Iterator[str]:
    """Yield a line for each case, with all block sizes."""
    yield "FlashAttention 3: us of ours / theirs, shares of the peak, theirs over ours (aim: 0.9)"
    for case in dict.fromkeys(name.partition(",")[0] for name in result):
        cells = []
        for name, found in result.items():
            if name.partition(",")[0] == case:
                size = name.partition(", ")[2]
                cell = f"{size} {found['ours us']:.1f} / {found['theirs us']:.1f} us, "
                cell += f"{found['ours of peak']:.0%} / {found['theirs of peak']:.0%}, "
                cell += f"{found['theirs over ours']:.2f} "
                cell += "same" if found["same"] else f"OTHER {found['largest difference']:.3f}"
                cells.append(cell.strip())
        yield from _wrapped(f"  {case}", cells)


def _sweep(result: Result) -> Iterator[str]:
    """Yield the current and the best time, with the values of the varied fields."""
    shapes: dict[str, list[str]] = {}
    for name, found in result.items():
        shape, _, case = name.partition(": ")
        cells = shapes.setdefault(shape, [])
        if "best" in found:
            points = [found["current"], *found["best"][:1]]
            cells.append(f"{case} " + " -> ".join(map(_point, points)))
        elif found:
            cells.append(f"{case} {len(found)}")
    for shape, cells in shapes.items():
        yield from _wrapped(f"sweep, {shape}", cells)


def _point(point: Result) -> str:
    if point["us"] is None:
        return "does not run"
    values = " ".join(str(n) for n in list(point.values())[2:])
    return f"{point['us']:.1f} us {_share(point['of a copy'])} ({values})"


def _sanitize(result: Result) -> Iterator[str]:
    for name, found in result.items():
        yield f"{name}: exit status {found['rc']}: {' / '.join(found['said'][-2:])}"


_SECTIONS: dict[str, Callable[[Result], Iterator[str]]] = {
    "facts": _facts,
    "smoke": _one_line("smoke"),
    "tests": _tests,
    "bench": _bench,
    "options": _bench,
    "fewer_bits": _bench,
    "profile": _profile,
    "kernels": _kernels,
    "drafts": _drafts,
    "tp": _one_line("one rank"),
    "peers": _peers,
    "fa3": _fa3,
    "sweep": _sweep,
    "sanitize": _sanitize,
}
