"""Type checkers see the package: what is right passes, and what is misspelt is found."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from nanoserve.compat.options import FOREIGN, RENAMED
from nanoserve.config import EngineConfig

SCRIPTS = Path(__file__).parents[1] / "support"
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--no-color-output", "--no-error-summary"],
    "basedpyright": ["-m", "basedpyright", "--level", "error"],
}


@pytest.fixture(scope="module")
def errors_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], dict[int, str]]:
    """Return what a checker says is wrong with a script, by line.

    The scripts lie somewhere else, as a user's would. A checker reads all of torch before them, so
    it is run once for both.
    """
    scripts = ("typed_script.py", "mistyped_script.py")

    @cache
    def check(checker: str) -> dict[str, dict[int, str]]:
        folder = tmp_path_factory.mktemp(checker)
        for script in scripts:
            shutil.copy(SCRIPTS / script, folder)
        command = [sys.executable, *CHECKERS[checker], *scripts]
        shown = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert shown.returncode == 1, shown.stdout + shown.stderr
        errors: dict[str, dict[int, str]] = {script: {} for script in scripts}
        pattern = r"(\w+\.py):(\d+):(?:\d+)?(?: -)? error: (.*)"
        for script, line, told in re.findall(pattern, shown.stdout):
            errors[script][int(line)] = told  # an error elsewhere raises KeyError
        return errors

    def find(checker: str, script: str) -> dict[int, str]:
        pytest.importorskip(checker, reason=f"pip install {checker}")
        return check(checker)[script]

    return find


@pytest.mark.size("full")  # whole programs, half a minute each
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_script_that_is_right_passes(
    checker: str, errors_of: Callable[[str, str], dict[int, str]]
) -> None:
    assert errors_of(checker, "typed_script.py") == {}


@pytest.mark.size("full")
@pytest.mark.parametrize("checker", CHECKERS)
def test_misspelt_names_options_and_keywords_are_found(
    checker: str, errors_of: Callable[[str, str], dict[int, str]]
) -> None:
    lines = (SCRIPTS / "mistyped_script.py").read_text("utf-8").splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert errors_of(checker, "mistyped_script.py").keys() == wrong


@pytest.mark.size("full")  # a process that imports all that an engine needs
def test_the_script_that_is_right_runs() -> None:
    pytest.importorskip("uvicorn", reason="pip install 'nanoserve[serve]'")
    command = [sys.executable, SCRIPTS / "typed_script.py"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Traceback" not in shown.stderr


def test_the_types_of_options_are_those_that_there_are() -> None:
    from nanoserve.compat.engine_options import EngineOptions, VllmOptions

    fields = EngineConfig.__dataclass_fields__.keys()
    assert VllmOptions.__annotations__.keys() == {*FOREIGN, *RENAMED}
    assert EngineOptions.__annotations__.keys() - {*FOREIGN, *RENAMED} == fields - {"model"}
