"""The engine that the reader writes: undone it fails, ours passes, and so does one half done."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import facts
import pytest
from inner_pytest import first_failure, run_inner, run_script
from planted_mistakes import MISTAKES, Mistake
from reading import lines_of_code

FOLDER = facts.DOCS / "your-engine"
STAGES = facts.load(FOLDER / "worked.py").STAGES
MOST_LINES = 345
# What the reader completes, and our solution of it.
FILES = {"your_engine.py": "solution.py", "your_features.py": "solution_features.py"}
every_stage = pytest.mark.parametrize("stage", [stage.number for stage in STAGES])


def file_of(stage: int, folder: Path = FOLDER) -> Path:
    return folder / f"test_stage_{stage}.py"


def said(stage: int, first_cases_only: bool, *options: str) -> list[str]:
    """What the tests of a stage said: "" of those that passed."""
    _, messages = run_inner([file_of(stage)], *options, first_cases_only=first_cases_only)
    return messages[file_of(stage).stem]


@every_stage
def test_an_undone_stage_fails_and_says_what_to_do_first(
    stage: int, by_size: Callable[..., Any]
) -> None:
    messages = said(stage, by_size(True, False))
    assert messages and all("NotImplementedError" in message for message in messages), messages
    allowed = [f"finish stage {n} first: stage {stage} needs it" for n in range(1, stage)]
    allowed.append(f"stage {stage}")
    for message in messages:
        assert message.removeprefix("NotImplementedError: ") in allowed, message


@pytest.mark.small(stage=range(1, 9))  # of the others, a comparison below shows some
@every_stage
def test_the_solution_passes(stage: int, by_size: Callable[..., Any]) -> None:
    messages = said(stage, by_size(True, False), "--solutions")
    assert messages and not any(messages), messages


def raising(node: ast.AST) -> int:
    """The stage that the body of a function of the stub waits for; 0 if it is given."""
    if not isinstance(node, ast.FunctionDef):
        return 0
    stages = re.findall(r"NotImplementedError\('stage (\d+)'\)", ast.unparse(node))
    return int(stages[0]) if stages else 0


def undone_after(stage: int) -> str:
    """Our solution, with the functions of later stages as the stub has them."""
    stub = ast.parse((FOLDER / "your_engine.py").read_text(encoding="utf-8"))
    solution = ast.parse((FOLDER / "solution.py").read_text(encoding="utf-8"))
    later = {
        (getattr(parent, "name", ""), node.name): node
        for parent in ast.walk(stub)
        if isinstance(parent, ast.Module | ast.ClassDef)
        for node in parent.body
        if raising(node) > stage
    }
    for parent in ast.walk(solution):
        if isinstance(parent, ast.Module | ast.ClassDef):
            own = getattr(parent, "name", "")
            parent.body = [
                later.get((own, getattr(node, "name", "")), node) for node in parent.body
            ]
    # Whoever copies functions from the solution has the imports of the stub.
    solution.body = [node for node in solution.body if not is_import(node)]
    solution.body[:0] = [node for node in stub.body if is_import(node)]
    return ast.unparse(solution)


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


@pytest.mark.parametrize("stub", FILES)
def test_the_stub_has_the_imports_of_the_solution(stub: str) -> None:
    """So that functions can be copied from the solution one by one."""
    found, right = (
        [ast.unparse(node) for node in tree.body if is_import(node)]
        for tree in (ast.parse((FOLDER / name).read_text("utf-8")) for name in (stub, FILES[stub]))
    )
    assert found == right


def test_who_has_done_five_stages_passes_their_tests(
    tmp_path: Path, by_size: Callable[..., Any]
) -> None:
    """No stage needs one that comes later."""
    folder = tmp_path / "your-engine"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "your_engine.py").write_text(undone_after(5), encoding="utf-8")
    tests = [file_of(stage, folder) for stage in (2, 5, 6)]
    _, messages = run_inner(tests, root=tmp_path, first_cases_only=by_size(True, False))
    done, undone = messages["test_stage_2"] + messages["test_stage_5"], messages["test_stage_6"]
    assert len(messages) == 3 and done and not any(done), messages
    assert any("NotImplementedError: stage 6" in message for message in undone)


@pytest.mark.parametrize("stage", [11, 12, 13])
def test_who_has_an_engine_can_begin_with_any_feature(stage: int, tmp_path: Path) -> None:
    """None needs another: what is missing is always the stage itself."""
    folder = tmp_path / "your-engine"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(FOLDER / "solution.py", folder / "your_engine.py")
    _, messages = run_inner([file_of(stage, folder)], root=tmp_path, first_cases_only=True)
    found = set(messages[f"test_stage_{stage}"])
    assert found == {f"NotImplementedError: stage {stage}"}


def test_it_is_short_and_the_page_counts_it() -> None:
    lines = lines_of_code(FOLDER / "solution.py")
    assert lines <= MOST_LINES
    assert facts.load(FOLDER / "worked.py").lines() == lines
    page = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert "{{ worked.your_engine.lines() }}" in page


def signatures(file: Path) -> dict[str, str]:
    """What a file defines: classes with their fields, and functions with their arguments."""
    found = {}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for parent in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        own = getattr(parent, "name", "")
        for node in parent.body:
            if isinstance(node, ast.FunctionDef):
                found[f"{own}.{node.name}"] = ast.unparse(node.args)
            elif isinstance(node, ast.ClassDef):
                found[node.name] = ", ".join(map(ast.unparse, node.decorator_list))
    return found


HELPERS = {"scrambled", "is_pending", "drop_pending", "KnownBlocks"}
OVERRIDDEN = {"share", "make_room", "finish", "cache"}  # by stage 13, whose class says why


@pytest.mark.parametrize("name", FILES)
def test_the_solution_has_the_functions_of_the_stub(name: str) -> None:
    stub, ours = signatures(FOLDER / name), signatures(FOLDER / FILES[name])
    assert {name: ours.get(name) for name in stub} == stub
    more = {name.rpartition(".")[2] for name in ours.keys() - stub.keys()}
    assert {name for name in more if not name.startswith("_")} <= HELPERS | OVERRIDDEN


def test_the_page_has_a_command_and_three_hints_for_each_stage() -> None:
    page = (FOLDER / "index.md").read_text(encoding="utf-8")
    sections = re.split(r"^### Stage (\d+)$", page.split("\n## What it leaves out")[0], flags=re.M)
    for number, text in zip(sections[1::2], sections[2::2], strict=True):
        assert f"pytest -x docs/your-engine/test_stage_{number}.py\n" in text
        assert f"worked.your_engine.facts_of({number})" in text
        assert re.findall(r"<summary>Hint (\d):", text) == ["1", "2", "3"], number
    assert [int(number) for number in sections[1::2]] == [stage.number for stage in STAGES]


def with_mistake(mistake: Mistake, folder: Path) -> None:
    """Make `folder` the one of a reader who has done everything, but for one mistake."""
    for name, solution in FILES.items():
        text = (FOLDER / solution).read_text(encoding="utf-8")
        if (name == "your_features.py") == (mistake.stage > 10):
            assert text.count(mistake.right) == 1, mistake
            text = text.replace(mistake.right, mistake.wrong)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.small(stage=range(1, 9))
@every_stage
def test_a_planted_mistake_is_named(
    stage: int, tmp_path: Path, by_size: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first test that fails, whose message has the input of the case."""
    # Bytecode is found by a file's size and second, which two mistakes may have in common.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder = tmp_path / "your-engine"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    planted = [mistake for mistake in MISTAKES if mistake.stage == stage]
    for mistake in planted[: by_size(1, None)]:
        with_mistake(mistake, folder)
        test, message = first_failure(file_of(stage, folder), tmp_path)
        assert test == mistake.named_by, f"{mistake}, found by {test!r}: {message}"
        # Written for this case, and not only a type or a comparison of values.
        assert re.match(r"AssertionError: .*\w", message) and len(message) > 40, (mistake, message)


def test_a_hundred_mistakes_are_planted() -> None:
    assert len(MISTAKES) >= 100 and len(set(MISTAKES)) == len(MISTAKES)
    assert {mistake.stage for mistake in MISTAKES} == {stage.number for stage in STAGES}


def python(script: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A process, as the reader has it: without what this suite's conftest sets for itself."""
    own = ("PYTEST_", "TRITON_INTERPRET")
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(own)}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, cwd=facts.ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.size("full")
def test_our_engine_compares_and_serves() -> None:
    done = python(FOLDER / "compare.py", "--solution", "--requests", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("greedy tokens: 12 of 12", "steps: ", "ratio", "lines of code"):
        assert what in done.stdout, done.stdout
    assert "max_model_len lowered" not in done.stdout + done.stderr
    answer = python(FOLDER / "serve.py", "What is a KV cache?", "--solution").stdout
    assert answer.startswith("The KV cache keeps the keys and values"), answer


def test_the_unwritten_engine_says_that_it_is_unwritten(full_size: bool) -> None:
    run = python if full_size else run_script
    done = run(FOLDER / "serve.py", "What is a KV cache?")
    assert done.returncode != 0
    assert "NotImplementedError: stage" in done.stderr
