"""Type checkers see the package: what is right passes, and what is misspelt is found."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanoserve.config import EngineConfig
from nanoserve.drop_in.options import FOREIGN, RENAMED

SCRIPTS = Path(__file__).parents[1] / "support"
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--no-color-output", "--no-error-summary"],
    "basedpyright": ["-m", "basedpyright", "--level", "error"],
}


def errors_of(checker: str, script: str, tmp_path: Path) -> dict[int, str]:
    """By line of a script that lies somewhere else, as a user's would, what is wrong with it."""
    pytest.importorskip(checker, reason=f"pip install {checker}")
    copy = shutil.copy(SCRIPTS / script, tmp_path)
    command = [sys.executable, *CHECKERS[checker], copy]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode in (0, 1), shown.stdout + shown.stderr
    found = re.findall(r":(\d+):(?:\d+)?(?: -)? error: (.*)", shown.stdout)
    return {int(line): told for line, told in found}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_script_that_is_right_passes(checker: str, tmp_path: Path) -> None:
    assert errors_of(checker, "typed_script.py", tmp_path) == {}


@pytest.mark.parametrize("checker", CHECKERS)
def test_misspelt_names_options_and_keywords_are_found(checker: str, tmp_path: Path) -> None:
    lines = (SCRIPTS / "mistyped_script.py").read_text("utf-8").splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert errors_of(checker, "mistyped_script.py", tmp_path).keys() == wrong


def test_the_script_that_is_right_runs() -> None:
    pytest.importorskip("uvicorn", reason="pip install 'nanoserve[serve]'")
    command = [sys.executable, SCRIPTS / "typed_script.py"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Traceback" not in shown.stderr


def test_the_types_of_options_are_those_that_there_are() -> None:
    from nanoserve.engine_options import EngineOptions, VllmOptions

    fields = EngineConfig.__dataclass_fields__.keys()
    assert VllmOptions.__annotations__.keys() == {*FOREIGN, *RENAMED}
    assert EngineOptions.__annotations__.keys() - {*FOREIGN, *RENAMED} == fields - {"model"}
