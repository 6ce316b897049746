"""Convert a recorded trace to a web page or a Chrome trace, and print a summary of it.

nanoserve trace run.jsonl                    writes run.html, to be opened in a browser
nanoserve trace run.jsonl -o page.html       writes another file
nanoserve trace run.jsonl --chrome run.json  writes a Chrome trace, for ui.perfetto.dev

The address `run.html#step=12` opens the page at that step.
"""

import json
from pathlib import Path

from nanoserve.cli.parser import Parser
from nanoserve.features.trace.page import make_page
from nanoserve.features.trace.phases import chrome_trace, describe_stages
from nanoserve.features.trace.reader import Pool, Trace, read_trace


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(
        prog="nanoserve trace", description="View a trace recorded with LLM(..., trace=...)."
    )
    parser.add_argument("trace", type=Path, help="Recorded trace, in JSON Lines.")
    page_help = "Page to write. Default: the trace's name with .html, unless --chrome is set."
    parser.add_argument("-o", "--output", type=Path, metavar="run.html", help=page_help)
    chrome = "Chrome trace to write, for ui.perfetto.dev. Default: none."
    parser.add_argument("--chrome", type=Path, metavar="run.json", help=chrome)
    args = parser.parse_args(arguments)
    page = args.output
    if page is None and args.chrome is None:
        page = args.trace.with_suffix(".html")

    trace = read_trace(args.trace)
    if trace.cut_off_line is not None:
        print(f"{args.trace}: line {trace.cut_off_line} was cut off and is skipped")
    if page is not None:
        _write(page, make_page(trace), args.trace)
    if args.chrome is not None:
        _write(args.chrome, json.dumps(chrome_trace(trace)), args.trace)
    print(summary(trace))


def summary(trace: Trace) -> str:
    """Return one line about the trace, and a line for each pipeline stage."""
    pool, most_used = Pool(), 0
    for step in trace.steps:
        pool.advance(step)
        most_used = max(most_used, len(pool.ref_counts()))
        pool.release(step)
    preempted, evicted = (
        sum(len(step[what]) for step in trace.steps) for what in ("preempted", "evicted")
    )
    copied, filled = (
        sum(len(step.get(what, [])) for step in trace.steps) for what in ("to_host", "from_host")
    )
    of_host = f", {copied} copied to the host, {filled} filled from it" if copied else ""
    return (
        f"{len(trace.steps)} steps, {trace.num_sequences} sequences, at most {most_used} of "
        f"{trace.header['num_kv_blocks']} KV blocks in use, "
        f"{preempted} preemptions, {evicted} cached blocks evicted{of_host}"
    ) + describe_stages(trace)


def _write(path: Path, text: str, source: Path) -> None:
    if path.resolve() == source.resolve():
        raise ValueError(f"{path} is the trace itself; write to another file")
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
