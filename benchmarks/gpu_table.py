"""What gpu_day.py has found, on one screen: values, and beside them what they should be."""

from collections.abc import Callable, Iterator
from typing import Any

MAX_LINES, MAX_WIDTH = 60, 160
_AIMS = {
    "decode": "aim: 80 % of a copy",
    "prefill": "aim: 50 % of a matrix product",
    "bench": "aim: 60 % of the roofline",
    "busy": "aim: 90 % busy",
}
Result = dict[str, Any]


def print_table(records: list[dict[str, Any]]) -> None:
    lines = table(records)
    print("\n" + "\n".join(lines), flush=True)


def table(records: list[dict[str, Any]]) -> list[str]:
    """At most MAX_LINES lines of MAX_WIDTH characters. Errors come first: they must not be lost."""
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
    told = []
    for record in records:
        if "skipped" in record:
            told.append(f"{record['stage']} SKIPPED ({record['skipped']})")
            continue
        state = {0: "ok", 124: "CUT OFF"}.get(record["rc"], f"FAILED ({record['rc']})")
        told.append(f"{record['stage']} {state} {record['seconds']:.0f} s")
    return _wrapped("stages", told)


def _errors(records: list[dict[str, Any]]) -> list[str]:
    lines = []
    for record in records:
        for name, value in record["result"].items():
            if not _is_good(value):
                kind = "FAILED" if "error" in value else "left out"
                told = " ".join((value.get("error") or value["left out"]).split())
                lines.append(f"{kind}: {record['stage']}, {name}: {told}")
    most = MAX_LINES // 4
    return lines if len(lines) <= most else [*lines[:most], f"... {len(lines) - most} more failed"]


def _wrapped(title: str, cells: list[str]) -> list[str]:
    """One line, or as many as it takes."""
    lines = [f"{title}: "]
    for i, cell in enumerate(cells):
        cell += " | " if i < len(cells) - 1 else ""
        if len(lines[-1]) + len(cell) > MAX_WIDTH:
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
        cells += _flat(value) if isinstance(value, dict) else _flat({name: value})
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
        seconds = ", ".join(f"{s:.2f}" for s in found["seconds"])
        line = f"  {name:20} {found['tok/s']:7.0f} tok/s  {seconds} s  "
        line += f"{found['of roofline']:4.0%} of the roofline  start {found['start s']:.1f} s  "
        line += f"{found['KV blocks']} blocks"
        if "single stream tok/s" in found:
            line += f"  single stream {found['single stream tok/s']:.0f} tok/s"
        yield line


def _profile(result: Result) -> Iterator[str]:
    yield f"steps, us ({_AIMS['busy']})"
    for name, found in result.items():
        line = f"  {name:26} wall {found['wall us']:6.0f}"
        if "busy us" in found:
            shares = ", ".join(f"{k} {v:.0%}" for k, v in found["shares"].items() if v >= 0.005)
            line += f"  busy {found['busy us']:6.0f} {found['busy share']:4.0%}  "
            line += f"largest gap {found['largest gap us']:5.0f}  "
            line += f"{found['launches per layer']:4.1f} launches a layer  {shares}"
        yield line


def _kernels(result: Result) -> Iterator[str]:
    decode = {k: v for k, v in result.items() if k.startswith("decode")}
    cells = [
        f"{name.removeprefix('decode').strip(' ,')} {v['us']:.1f} us {_share(v['of a copy'])}"
        for name, v in decode.items()
    ]
    yield from _wrapped(f"decode ({_AIMS['decode']})", cells)
    rows = result.get("Decode attention", [])
    cells = [
        f"{r['shape']} {r['batch']}x{r['context']} {r['us']:.0f} us {_share(r['of a copy'])}"
        for r in rows
    ]
    yield from _wrapped("  attention.py", cells)
    cells = [
        f"{r['shape']} {r['tokens']} {r['ms']:.2f} ms {r['TFLOP/s']:.0f} TFLOP/s "
        f"{_share(r['of a matrix product'])}"
        for r in result.get("Prefill attention", [])
    ]
    yield from _wrapped(f"prefill ({_AIMS['prefill']})", cells)
    cells = [
        f"{r['shape']} {r['kernel']} {r['tokens']} {r['us']:.1f} us {_share(r['of a copy'])}"
        for r in result.get("Small kernels", [])
    ]
    yield from _wrapped("small", cells)
    sampling = {k: v for k, v in result.items() if k.startswith(("filter", "choose"))}
    yield from _wrapped("sampling", [f"{k} {v['us']:.0f} us" for k, v in sampling.items()])
    for name, rates in result.items():
        if name.startswith("product"):
            cells = [
                f"{m}: {r['us']:.1f} us {r['GB/s']:.0f} GB/s {r['TFLOP/s']:.0f} TF"
                for m, r in rates.items()
            ]
            yield from _wrapped(name, cells)


def _peers(result: Result) -> Iterator[str]:
    for found in result.values():
        cells = [
            f"{name} {', '.join(f'{rate:.0f}' for rate in rates)} tok/s"
            for name, rates in found.items()
            if isinstance(rates, list) and name != "failed"
        ]
        yield from _wrapped("peers", cells + found["failed"])


def _fa3(result: Result) -> Iterator[str]:
    yield "FlashAttention 3 (aim: its time over ours above 0.9)"
    for name, found in result.items():
        line = f"  {name:30} ours {found['ours us']:8.1f} us {found['ours of peak']:4.0%}  "
        line += f"theirs {found['theirs us']:8.1f} us {found['theirs of peak']:4.0%}  "
        line += f"theirs over ours {found['theirs over ours']:.2f}  "
        line += "same" if found["same"] else f"OTHER by {found['largest difference']:.3f}"
        yield line


def _sweep(result: Result) -> Iterator[str]:
    for name, found in result.items():
        if "best" not in found:
            if found:
                yield f"sweep, {name}: {len(found)} configurations"
            continue
        points = [("now", found["current"]), *(("best", best) for best in found["best"][:3])]
        cells = []
        for told, point in points:
            values = " ".join(str(n) for n in list(point.values())[2:])
            us = "-" if point["us"] is None else f"{point['us']:.1f} us"
            cells.append(f"{told} {us} {_share(point['of a copy'])} ({values})")
        yield from _wrapped(f"sweep, {name}", cells)


def _sanitize(result: Result) -> Iterator[str]:
    for name, found in result.items():
        yield f"{name}: exit status {found['rc']}: {' / '.join(found['said'][-2:])}"


_SECTIONS: dict[str, Callable[[Result], Iterator[str]]] = {
    "facts": _facts,
    "smoke": _one_line("smoke"),
    "tests": _tests,
    "bench": _bench,
    "profile": _profile,
    "kernels": _kernels,
    "tp": _one_line("one rank"),
    "peers": _peers,
    "fa3": _fa3,
    "sweep": _sweep,
    "sanitize": _sanitize,
}
