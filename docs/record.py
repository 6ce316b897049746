"""Compute all values, tables, figures and quotations of the pages, and write them there.

`python docs/record.py` runs the worked examples, draws the figures and quotes the source anew; with
names of chapters (`python docs/record.py 07-preemption`) only theirs. `--runs` also records the
runs of the bundled model again. `--check` writes nothing and lists the files that are out of date,
as `tests/course/test_recorded.py` does.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

DOCS = Path(__file__).parent
if str(DOCS) not in sys.path:
    sys.path.append(str(DOCS))

import facts  # noqa: E402
import macros  # noqa: E402
from quotes import quote  # noqa: E402
from regions import Region, with_values  # noqa: E402
from run_picture import run_picture  # noqa: E402
from trace_pages import run_file, scenarios  # noqa: E402

# Keys of a run that differ between runs, or between processors with a 16-bit model.
_NOT_DECIDED = ("started", "time", "times", "stages", "closed", "token", "text")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "folders", nargs="*", help="folders of chapters; all pages if none is given"
    )
    parser.add_argument("--runs", action="store_true", help="also record the model's runs again")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is out of date"
    )
    args = parser.parse_args()
    if args.runs:
        for name, path in scenarios().items():
            if not args.folders or path.parent.name in args.folders:
                run_file(name).write_text(run_again(name), encoding="utf-8")
    stale = []
    for path, text in recorded_files(args.folders):
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(facts.ROOT).as_posix())
            if not args.check:
                path.write_text(text, encoding="utf-8")
    print(*stale, sep="\n")
    if args.check and stale:
        sys.exit("out of date: run `python docs/record.py`")


def recorded_files(folders: list[str] | None = None) -> Iterator[tuple[Path, str]]:
    """Yield each computed file with its expected text: figures first, then pages."""

    def is_asked(path: Path) -> bool:
        return not folders or bool({*path.relative_to(DOCS).parts} & {*folders})

    for path in sorted(filter(is_asked, DOCS.glob("*/figures.py"))):
        yield from figures(path)
    for name, scenario in scenarios().items():
        if is_asked(scenario) and run_file(name).is_file():
            yield run_file(name).with_suffix(".svg"), run_picture(run_file(name))
    for page in sorted(filter(is_asked, DOCS.rglob("*.md"))):
        yield page, recorded(page)


def figures(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the figures of a `figures.py`: one function without arguments for each picture."""
    module = facts.load(path)
    for name in facts.functions_of(path):
        draw = getattr(module, name)
        if not signature(draw).parameters:
            yield path.with_name(f"{name.replace('_', '-')}.svg"), draw()


def recorded(page: Path) -> str:
    """Return a page with all its values computed, and its number before its title."""
    try:
        text = with_values(page.read_text(encoding="utf-8"), lambda region: value(region, page))
    except Exception as error:
        raise ValueError(f"{page.relative_to(DOCS)}: {error}") from error
    if number := re.match(r"0*(\d+)-", page.parent.name):
        text = re.sub(r"^# (?:\d+\. )?", f"# {number[1]}. ", text, count=1, flags=re.M)
    return text


def value(region: Region, page: Path) -> str:
    """Return the recorded text of an expression or of a quotation of source."""
    if region.expression is None:
        return quote(region.said, page.relative_to(facts.ROOT).as_posix())
    return _template(region.said).render(_names())


def run_again(name: str) -> str:
    """Return the lines of a scenario's run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.jsonl"
        getattr(facts.load(scenarios()[name]), name)(run)
        return run.read_text(encoding="utf-8")


def decisions(run: str) -> list[Any]:
    """Return a run's lines without times and texts: equal for equal decisions."""

    def decided(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: decided(each) for key, each in found.items() if key not in _NOT_DECIDED}
        return [decided(each) for each in found] if isinstance(found, list) else found

    return [decided(json.loads(line)) for line in run.splitlines()]


def _run_shown(name: str) -> str:
    run = run_file(name)
    words = name.replace("_", " ")
    return (
        f"![A recorded run, {words}: requests from top to bottom, steps from left to right]"
        f"({run.with_suffix('.svg').name})\n\n"
        f"*Step through it:* `nanoserve trace {run.relative_to(facts.ROOT).as_posix()}` "
        f"makes a page of it."
    )


@cache
def _names() -> dict[str, Any]:
    return {**macros.names(), "trace": _run_shown}


@cache
def _template(said: str) -> Any:
    return Environment(undefined=StrictUndefined).from_string(said)


if __name__ == "__main__":
    main()
