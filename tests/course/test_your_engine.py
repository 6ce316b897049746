"""The engine that the reader writes: undone it fails, ours passes, and so does one half done."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import facts
import pytest
from reading import lines_of_code

FOLDER = facts.DOCS / "your-engine"
STAGES = facts.load(FOLDER / "worked.py").STAGES
MOST_LINES = 330
every_stage = pytest.mark.parametrize("stage", [stage.number for stage in STAGES])


def environment() -> dict[str, str]:
    """As the reader has it: without what this suite's conftest sets for itself."""
    own = ("PYTEST_", "TRITON_INTERPRET")
    return {name: os.environ[name] for name in os.environ if not name.startswith(own)}


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=facts.ROOT, env=environment(), capture_output=True, text=True
    )


def said(folder: Path, report: Path, *arguments: str) -> dict[int, list[str]]:
    """For each stage, what its tests said: "" if they passed."""
    options = ["-q", "-n0", "--tb=line", "-p", "no:cacheprovider", f"--junitxml={report}"]
    tests = sorted(map(str, folder.glob("test_stage_*.py")))
    done = python("-m", "pytest", *options, *tests, *arguments)
    assert report.exists(), done.stdout + done.stderr
    messages = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        number = int(re.search(r"test_stage_(\d+)", case.get("classname"))[1])
        messages[number].append("".join(child.get("message", "") for child in case))
    return messages


@cache
def of_the_stub(folder: Path) -> dict[int, list[str]]:
    return said(FOLDER, folder / "undone.xml")


@cache
def of_the_solution(folder: Path) -> dict[int, list[str]]:
    return said(FOLDER, folder / "solved.xml", "--solutions")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@every_stage
def test_an_undone_stage_fails_and_says_what_to_do_first(stage: int, reports: Path) -> None:
    messages = of_the_stub(reports)[stage]
    assert messages and all("NotImplementedError" in message for message in messages), messages
    allowed = [f"finish stage {n} first: stage {stage} stands on it" for n in range(1, stage)]
    allowed.append(f"stage {stage}")
    for message in messages:
        assert message.removeprefix("NotImplementedError: ") in allowed, message


@every_stage
def test_the_solution_passes(stage: int, reports: Path) -> None:
    messages = of_the_solution(reports)[stage]
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
    return ast.unparse(solution)


def test_who_has_done_five_stages_passes_their_tests(tmp_path: Path) -> None:
    """No stage needs one that comes later."""
    folder = tmp_path / "your-engine"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "your_engine.py").write_text(undone_after(5), encoding="utf-8")
    for file in folder.glob("test_stage_*.py"):
        if file.stem not in ("test_stage_2", "test_stage_5", "test_stage_6"):
            file.unlink()
    where = ("-c", str(facts.ROOT / "pyproject.toml"), f"--rootdir={tmp_path}")
    messages = said(folder, tmp_path / "report.xml", *where)
    assert sorted(messages) == [2, 5, 6]
    assert not any(messages[2] + messages[5]), messages
    assert any("NotImplementedError: stage 6" in message for message in messages[6])


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


def test_the_solution_has_the_functions_of_the_stub() -> None:
    stub, ours = signatures(FOLDER / "your_engine.py"), signatures(FOLDER / "solution.py")
    assert {name: ours.get(name) for name in stub} == stub
    more = {name.rpartition(".")[2] for name in ours.keys() - stub.keys()}
    assert all(name.startswith("_") or name == "scrambled" for name in more), more


def test_the_page_has_a_command_and_three_hints_for_each_stage() -> None:
    page = (FOLDER / "index.md").read_text(encoding="utf-8")
    sections = re.split(r"^### Stage (\d+)$", page.split("\n## Serve and compare")[0], flags=re.M)
    for number, text in zip(sections[1::2], sections[2::2], strict=True):
        assert f"pytest -x docs/your-engine/test_stage_{number}.py\n" in text
        assert f"worked.your_engine.facts_of({number})" in text
        assert re.findall(r"<summary>Hint (\d):", text) == ["1", "2", "3"], number
    assert [int(number) for number in sections[1::2]] == [stage.number for stage in STAGES]


def test_our_engine_compares_and_serves() -> None:
    done = python("docs/your-engine/compare.py", "--solution", "--requests", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("greedy tokens: 12 of 12", "steps: ", "ratio", "lines of code"):
        assert what in done.stdout, done.stdout
    assert "max_model_len lowered" not in done.stdout + done.stderr
    answer = python("docs/your-engine/serve.py", "What is a KV cache?", "--solution").stdout
    assert answer.startswith("The KV cache keeps the keys and values"), answer


def test_the_unwritten_engine_says_that_it_is_unwritten() -> None:
    done = python("docs/your-engine/serve.py", "What is a KV cache?")
    assert done.returncode != 0
    assert "NotImplementedError: stage" in done.stderr
