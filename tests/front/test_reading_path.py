"""The reading path: the files that one reads to understand the engine, and how much that is."""

import ast
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import reading
from tiny_checkpoints import make_qwen3

import nanoserve

PACKAGE = Path(nanoserve.__file__).parent
ROOT = PACKAGE.parent
BOUNDS = reading.reading_path()["bounds"]
NEAR = 0.95  # of a bound: time to look whether something has become clumsy


def files(*lists: str) -> list[Path]:
    return [ROOT / stop.file for stop in reading.stops(*lists)]


def check_bound(what: str, number: int, bound: int) -> None:
    assert number <= bound, f"{what}: {number}, and at most {bound} are allowed"
    if number > NEAR * bound:
        warnings.warn(f"{what}: {number} is near the bound of {bound}", stacklevel=2)


def test_the_path_is_a_list_of_files_with_words() -> None:
    listed = [stop.file for stop in reading.stops()]
    assert listed[0] == "nanoserve/llm.py" and len(set(listed)) == len(listed) > 20
    assert all((ROOT / file).is_file() for file in listed)
    assert list(reading.reading_path()["words"]) == listed


@pytest.mark.parametrize("name", reading.LISTS)
def test_it_can_be_read_in_that_time(name: str) -> None:
    """In tokens of source, so that packing several statements into a line gains nothing."""
    counts = {str(path): reading.num_tokens(path) for path in files(name)}
    print(name, sum(counts.values()), counts)
    check_bound(f"tokens of {name}", sum(counts.values()), BOUNDS[name])


def test_tokens_are_counted_without_comments_and_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text('"""What\nit is."""\n\nx = f(1)  # a call\n\n\ndef g():\n    """Nothing."""\n')
    assert (reading.num_tokens(path), reading.lines_of_code(path)) == (6 + 5, 2)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the functions of a file with their lines, docstrings, comments and blanks aside."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            docstring = range(0)
            if ast.get_docstring(node) is not None:
                docstring = range(first.lineno, first.end_lineno + 1)
            body = (i for i in range(node.lineno, node.end_lineno + 1) if i not in docstring)
            code = [lines[i - 1].strip() for i in body]
            yield node.name, sum(1 for line in code if line and not line.startswith("#"))


def test_no_function_and_no_file_is_too_long() -> None:
    longest = BOUNDS["lines_of_a_function"]
    for path in files():
        for name, length in functions(path):
            assert length <= longest, f"{path.name}: {name} has {length} lines of code"
        check_bound(f"lines of {path.name}", reading.lines_of_code(path), BOUNDS["lines_of_a_file"])


def test_nothing_reaches_into_another_object() -> None:
    """What a file on the path reads of another object, every reader may."""
    found = [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path in files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls")
        and node.attr not in ("_replace", "_make", "_fields", "_asdict")  # of named tuples
    ]
    assert not found, found


# Packages that take long to import, and what they are needed for.
HEAVY = ("transformers", "numba", "ray", "fastapi", "uvicorn", "llguidance", "xgrammar", "gguf")


def test_a_greedy_request_imports_no_heavy_package(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    code = (
        "import sys; from nanoserve import LLM, SamplingParams;"
        f"LLM({str(tmp_path)!r}, skip_tokenizer_init=True, attention_backend='torch').generate("
        "[[1, 2]], SamplingParams(temperature=0), use_tqdm=False);"
        f"print(*sys.modules.keys() & {set(HEAVY)!r});"
        "print(*(name for name in sys.modules if name.startswith('nanoserve.')))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, rooms = shown.stdout.splitlines()
    assert heavy == ""
    loaded = {name.split(".")[1] for name in rooms.split()}
    assert not loaded & {"speculative", "structured", "server", "replicas", "quantization", "trace"}


def test_the_readme_has_both_lists() -> None:
    text = " ".join(reading.readme("Read the source").split())
    for name in reading.LISTS:
        assert " ".join(reading.as_markdown(name).split()) in text
