"""The playground shows runs of the engine's scheduler, and its page describes them correctly."""

import json
import random
import re
from html import unescape
from pathlib import Path

import facts
import pytest

from . import worked

FOLDER = Path(__file__).parent
runs = worked.runs
SETTINGS = list(runs.settings())
SAMPLE = random.Random(0).sample(SETTINGS, 120)


@pytest.fixture(scope="module")
def written() -> dict:
    """The data that the page loads."""
    text = runs.RUNS_FILE.read_text(encoding="utf-8")
    comment, data = text.split("\n", 1)
    assert comment.startswith("//") and data.startswith("const RUNS = ") and data.endswith(";\n")
    return json.loads(data.removeprefix("const RUNS = ").removesuffix(";\n"))


def place_of(setting: dict) -> int:
    """The index of a setting, computed as in `numberOfRun` of playground.js."""
    place = 0
    for name, values in runs.OPTIONS.items():
        place = place * len(values) + values.index(setting[name])
    return place


def test_the_page_loads_what_the_scheduler_decides_today(written: dict) -> None:
    assert len(written["index"]) == len(SETTINGS) == worked.num_settings()
    assert written["options"] == {name: list(values) for name, values in runs.OPTIONS.items()}
    assert written["defaults"] == runs.DEFAULTS and written["totalNames"] == list(runs.TOTALS)
    for setting in [runs.DEFAULTS, *SAMPLE]:
        number = written["index"][place_of(setting)]
        found = runs.run(setting)
        assert written["runs"][number] == " ".join(found.steps), f"run runs.py: {setting}"
        assert written["totals"][number] == found.totals, f"run runs.py: {setting}"


def test_every_run_keeps_to_its_limits_and_ends(written: dict) -> None:
    assert runs.RUNS_FILE.stat().st_size < 1.5e6
    for setting, number in zip(SETTINGS, written["index"], strict=True):
        steps = [step.split(";") for step in written["runs"][number].split(" ")]
        names = {*runs.NAMES[: len(runs.REQUESTS[setting["requests"]])]}
        assert len(steps) <= 64 and {len(step) for step in steps} == {7}, setting
        owners = dict.fromkeys(range(1, setting["pool"] // setting["block_size"] + 1), "")
        running, ended = set(), set()
        for rows, waiting, admitted, preempted, ends, why, blocks in steps:
            counts = [int(n) for _, n in re.findall(r"([A-F][dpbt])(\d+)", rows)]
            assert sum(counts) <= setting["budget"], (setting, rows)
            running |= {*re.findall("[A-F]", admitted)}
            running -= {*preempted[::2]}
            assert len(running) <= setting["slots"], (setting, running)
            assert {*re.findall("[A-F]", rows)} <= running, (setting, rows)
            assert not running & {*waiting} and bool(waiting) == bool(why), (setting, waiting, why)
            for block, held, _ in re.findall(r"(\d+)([A-F]+|-)(\*?)", blocks):
                owners[int(block)] = held.strip("-")
            assert {*"".join(owners.values())} == running, (setting, owners)
            if why.startswith("k"):
                needed, free = map(int, why[1:].split("/"))
                assert needed > free, (setting, why)
            running -= {*ends}
            ended |= {*ends}
        assert ended == names and not running, (setting, ended)


def test_a_run_by_hand() -> None:
    """A has 20 tokens, B 12, C 40: two fit into a budget of 32, C's comes in two chunks.

    C needs three blocks for all of its tokens. The first two hold 20 + 12 tokens in three.
    """
    setting = {**runs.DEFAULTS, "requests": "three at once"}
    first, second, third, *_ = runs.run(setting).steps
    assert first == "Ap20Bp12;C;A0B0;;;b;1A2A3B"
    assert second == "Ad1Bd1Cb30;;C0;;;;4C5C6C"
    assert third == "Ad1Bd1Cp10;;;;;;"


def test_playground_js_reads_this_format() -> None:
    """Its patterns match all that is written; it has a label for every option."""
    script = (FOLDER / "playground.js").read_text(encoding="utf-8")
    patterns = re.findall(r"pairs\(fields\[(\d)\], /(.+?)/g\)", script)
    assert [int(field) for field, _ in patterns] == [0, 2, 3, 6]
    for setting in SAMPLE:
        for step in runs.run(setting).steps:
            fields = step.split(";")
            for field, pattern in patterns:
                left = re.sub(pattern, "", fields[int(field)])
                assert left == "", f"{setting}: {pattern} leaves {left} of {step}"
    for name in (*runs.OPTIONS, *runs.TOTALS):
        assert re.search(rf"^    {name}: \"", script, re.M), name


def test_the_page_loads_its_files() -> None:
    page = (FOLDER / "index.md").read_text(encoding="utf-8")
    for file in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert (FOLDER / file).is_file(), file
    for asked in re.findall(r'data-set="([^"]+)"', page):
        for name, value in (pair.split("=") for pair in unescape(asked).split("&")):
            assert value in map(str, runs.OPTIONS[name]), asked


def test_what_the_page_says() -> None:
    assert worked.total("steps") == 30 and worked.total("steps", budget=16) == 34
    assert worked.total("preemptions") == 1 and worked.victims() == "F, for E"
    assert worked.num_blocks(112, 16) == 7
    long = {"requests": "two long prompts", "budget": 64, "slots": 6, "pool": 320}
    assert worked.first_token("E", **long) == 7
    assert worked.first_token("E", **long, threshold=16) == 6
    assert worked.first_token("E", **long, policy="priority") == 7
    assert worked.victims(pool=320) == ""
    # 282 tokens in six requests of 40 + 7; five find 32 of them.
    assert worked.total("computed", requests="a shared beginning") == 282
    found = worked.total("computed", requests="a shared beginning", prefix_caching=True)
    assert found == 282 - 5 * 32
    with pytest.raises(ValueError, match="not a setting"):
        worked.total("steps", budget=17)


def test_the_still_picture_shows_the_default_run() -> None:
    drawn = facts.load(FOLDER / "figures.py").example()
    assert drawn == (FOLDER / "example.svg").read_text(encoding="utf-8")
    steps = runs.run(runs.DEFAULTS).steps
    cells = sum(len(re.findall(r"[A-F][dpbt]\d+", step.split(";")[0])) for step in steps)
    # One more rectangle is the background.
    assert drawn.count("<rect") == cells + 1
