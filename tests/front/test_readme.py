"""The README is one page, and its example runs as it stands there."""

import re
import subprocess
from pathlib import Path

import pytest

import nanoserve

README = Path(nanoserve.__file__).parent.parent / "README.md"


def test_it_is_one_page() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("\n") <= 180 and len(text.encode()) <= 12_500


def test_the_api_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert "A block table" in capsys.readouterr().out


def test_the_ci_finds_its_two_commands() -> None:
    """CI takes the commands from the README, so the line that reads them is run here."""
    lines = (README.parent / ".ci" / "run").read_text("utf-8").splitlines()
    (reads,) = [line for line in lines if line.startswith("commands=")]
    script = f'{reads}\nprintf "%s" "$commands"'
    found = subprocess.run(
        ["bash", "-c", script], cwd=README.parent, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert len(found) == 2
    assert "python example.py" in found[0] and "&& pytest" in found[1]


def test_the_places_that_it_names_exist() -> None:
    """The table of decisions: each file, and each name in it."""
    rows = re.findall(r"^\| .*? \| (`[a-z_]+/.*?) \|$", README.read_text("utf-8"), re.M)
    assert len(rows) == 5
    package = Path(nanoserve.__file__).parent
    for row in rows:
        source = ""
        for word in re.findall(r"`([^`]+)`", row):
            if word.endswith(".py"):
                source = (package / word).read_text("utf-8")
            else:
                assert re.search(rf"(def|class) {word}\b", source), (row, word)


def test_its_tree_has_the_packages_folders() -> None:
    tree = README.read_text("utf-8").split("\nnanoserve/\n")[1].split("```")[0]
    named = {*re.findall(r"^  ([a-z]+)/ ", tree, re.M)}
    package = Path(nanoserve.__file__).parent
    assert named == {path.name for path in package.iterdir() if (path / "__init__.py").is_file()}
