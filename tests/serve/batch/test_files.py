"""What is read, what is written, and what is found out before anything is computed."""

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from batch_files import line, write

from nanoserve.serve.batch import requests as lines_module
from nanoserve.serve.batch.output_file import AnswersFile
from nanoserve.serve.batch.requests import Todo, parse, read_lines
from nanoserve.serve.batch.resume import Survey, survey


def answer_to(content: str, number: int = 1, status: int = 200, salt: str = "") -> bytes:
    """As the command would write it."""
    asked = parse(number, content.encode(), salt)
    told = {"id": asked.answer_id, "custom_id": asked.custom_id, "error": None}
    return json.dumps(told | {"response": {"status_code": status, "body": {}}}).encode() + b"\n"


def survey_of(source: Path, out: Path, salt: str = "") -> tuple[Survey, list[tuple[int, str]]]:
    reported: list[tuple[int, str]] = []
    answers = AnswersFile(out)
    try:
        found = survey(source, salt, answers, lambda *told: reported.append(told))
    finally:
        answers.close()
    return found, reported


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Ten good lines."""
    return write(tmp_path / "in.jsonl", [line(f"id-{n}", prompt=f"{n}") for n in range(10)])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def contents(source: Path) -> list[str]:
    return source.read_text().splitlines()


# ---------------------------------------------------------------- lines


def test_lines_are_found_where_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MOST_BYTES", 9)
    content = b"123456789\n" + b"x" * 100_000 + b"\n\n12345678\nend"
    found = dict(read_lines(BytesIO(content)))
    assert [*found] == [0, 10, 100_011, 100_012, 100_021]
    assert [found[at] for at in (100_011, 100_012, 100_021)] == [b"\n", b"12345678\n", b"end"]
    with pytest.raises(ValueError, match="at most 9 bytes"):
        parse(2, found[10], "")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("not JSON", "the line is not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "the line is not JSON"),
        ('{"a": ' * 100_000, "the line is not JSON"),
        ("{}", "custom_id=None must be"),
        ('{"custom_id": 5}', "custom_id=5 must be"),
        ('{"custom_id": ""}', "custom_id='' must be"),
        (b"\xff\xfe", "the line is not JSON"),
    ],
)
def test_what_cannot_be_answered_is_told(content: str | bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(7, content if isinstance(content, bytes) else content.encode(), "")


def test_an_answer_shows_which_line_it_answers_and_of_which_engine() -> None:
    one, other = b'{"custom_id": "a", "body": 1}', b'{"custom_id": "a", "body": 2}'
    ids = {parse(1, content, salt).answer_id for content in (one, other) for salt in ("m 0", "m 1")}
    assert len(ids) == 4
    marked = b"\xef\xbb\xbf" + one + b"\r\n"  # as editors on Windows write a first line
    assert parse(1, marked, "m 0").answer_id in ids


def test_half_a_pair_of_surrogates_is_a_name_too() -> None:
    assert parse(1, rb'{"custom_id": "\ud800"}', "").custom_id == "\ud800"


# ---------------------------------------------------------------- what is left to do


def test_what_has_an_answer_is_not_done_again(source: Path, out: Path) -> None:
    third, sixth = contents(source)[3], contents(source)[6]
    out.write_bytes(answer_to(sixth, 7) + answer_to(third, 4, status=400))
    found, reported = survey_of(source, out)
    assert [number for number, _ in found.todo.places()] == [1, 2, 3, 5, 6, 8, 9, 10]
    assert (found.num_answered, found.num_refused, found.num_bad, reported) == (2, 1, 0, [])
    read = [each.custom_id for each in found.todo.lines(source, "")]
    assert read == [f"id-{n}" for n in (0, 1, 2, 4, 5, 7, 8, 9)]
    assert Todo(found.todo.places(2, 4)).places() == found.todo.places()[2:4]


def test_bad_lines_are_reported_by_their_number(tmp_path: Path, out: Path) -> None:
    good, same = line("a", prompt="1"), line("a", prompt="2")
    source = write(tmp_path / "in", ["", good, "nonsense", "   ", same, good, line(3), line("b")])
    found, reported = survey_of(source, out)
    assert [number for number, _ in found.todo.places()] == [2, 8]
    assert [number for number, _ in reported] == [3, 5, 6, 7]
    assert found.num_bad == 4
    assert "custom_id='a' is not unique" in reported[1][1]


@pytest.mark.parametrize("kept", [1, 10, 30, 60])  # bytes of the line that was being written
def test_a_torn_line_is_cut_off(source: Path, out: Path, kept: int) -> None:
    first, second = contents(source)[:2]
    out.write_bytes(answer_to(first) + answer_to(second, 2)[:kept])
    found, _ = survey_of(source, out)
    assert (len(found.todo), found.num_answered) == (9, 1)
    assert out.read_bytes() == answer_to(first)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{}\n", "out.jsonl:1 is not an answer of a batch job"),
        (b"some text\n", "out.jsonl:1 is not JSON"),
        (b"some text", "out.jsonl:1 is not an answer of a batch job"),
        (b'{"id": "batch_req_1", "custom_id": "id-1"}\n', "not written by this command"),
        (answer_to('{"custom_id": "x"}'), "custom_id='x', which is not in .*another output file"),
        (answer_to('{"custom_id": "id-3"}'), "custom_id='id-3', but not the request in"),
        (2 * answer_to('{"custom_id": "x"}'), "out.jsonl:2 answers custom_id='x' a second time"),
    ],
)
def test_a_file_of_something_else_stays_as_it_is(
    source: Path, out: Path, content: bytes, told: str
) -> None:
    content = content if b"some text" in content else content + b'{"id": "ba'
    out.write_bytes(content)
    with pytest.raises(ValueError, match=told):
        survey_of(source, out)
    assert out.read_bytes() == content


def test_another_model_does_not_go_on(source: Path, out: Path) -> None:
    out.write_bytes(answer_to(contents(source)[0], salt="tiny-qwen3 0"))
    assert survey_of(source, out, "tiny-qwen3 0")[0].num_answered == 1
    with pytest.raises(ValueError, match="the model or the seed has changed"):
        survey_of(source, out, "tiny-qwen3 1")


def test_the_input_may_grow(source: Path, out: Path) -> None:
    out.write_bytes(answer_to(contents(source)[0]))
    with source.open("a") as file:
        file.write(json.dumps(line("new", prompt="x")))
    assert len(survey_of(source, out)[0].todo) == 10


@pytest.mark.size("full")
def test_memory_for_each_line(tmp_path: Path, out: Path, by_size: Callable[..., Any]) -> None:
    """While it is looked at, and afterwards; the lines themselves take ten times as much."""
    number = by_size(20_000, 60_000, 200_000)
    source = tmp_path / "in"
    with source.open("w") as file:
        for n in range(number):
            file.write(json.dumps(line(f"request-{n}", prompt="word " * 200)) + "\n")
    tracemalloc.start()
    try:
        found, _ = survey_of(source, out)
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.todo) == number
    assert peak < 150 * number + 2**21, peak / number
    assert left < 20 * number + 2**17, left / number


# ---------------------------------------------------------------- the file of answers


def test_two_runs_do_not_write_to_one_file(out: Path) -> None:
    pytest.importorskip("fcntl")
    first = AnswersFile(out)
    with pytest.raises(ValueError, match="another run writes to it"):
        AnswersFile(out)
    first.close()
    AnswersFile(out).close()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a regular file"):
        AnswersFile(tmp_path)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from nanoserve.serve.batch.output_file import AnswersFile

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
out = AnswersFile(Path(sys.argv[1]))
for number in range(100):
    out.append(b"%060d\\n" % number)
"""


def test_a_full_disk_leaves_whole_lines(out: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(out)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "OSError" in ended.stderr and "File too large" in ended.stderr
    assert out.read_bytes() == b"".join(b"%060d\n" % number for number in range(1000 // 61))
