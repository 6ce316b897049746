"""Type checkers find nothing in the package, and see it from scripts of users."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from nanoserve.compat.options import FOREIGN, RENAMED
from nanoserve.config import EngineConfig

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "support"
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


# Files of the package, what is added at the end of each, and the error in it: in the engine, in a
# module that is checked without regard to None, and in a function that launches a kernel.
PLANTED = {
    "engine/plan.py": ("def planted(plan: Plan) -> int:\n    return plan.bugdet\n", "attr-defined"),
    "engine/scheduler.py": ("def planted(plan):\n    return plan\n", "no-untyped-def"),
    "llm.py": ("PLANTED: int = LLM('tiny').generate\n", "assignment"),
    "worker/model_runner.py": ("ModelRunner.load()\n", "call-arg"),
    "kernels/cpu/ops.py": ("PLANTED: int = address('no tensor')\n", "arg-type"),
}


# Packages without whose types mypy would not know which comments `type: ignore` are needed.
EXTRAS = {
    "fastapi": "serve",
    "gguf": "gguf",
    "llguidance": "guided",
    "matplotlib": "bench",
    "msgspec": "kv-events",
    "numba": "cpu",
    "ray": "ray",
    "xgrammar": "xgrammar",
}


@pytest.mark.size("full")  # mypy reads all of torch: most of a minute, and a few seconds more
def test_the_package_has_no_type_errors_but_planted_ones(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="pip install mypy")
    for module, extra in EXTRAS.items():
        if find_spec(module) is None:
            pytest.skip(f"pip install 'nanoserve[{extra}]'")
    plugin = Path("tests/support/mypy_modules.py")
    (tmp_path / plugin).parent.mkdir(parents=True)
    for file in ("pyproject.toml", plugin):
        shutil.copy(ROOT / file, tmp_path / file)
    unwanted = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.nbi", "*.nbc")
    shutil.copytree(ROOT / "nanoserve", tmp_path / "nanoserve", ignore=unwanted)

    def errors() -> str:
        command = [sys.executable, "-m", "mypy", "--no-color-output", "--no-error-summary"]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout

    assert errors() == ""
    for name, (lines, _) in PLANTED.items():
        with (tmp_path / "nanoserve" / name).open("a") as file:
            file.write(f"\n\n{lines}")
    found = re.findall(r"nanoserve/(\S+):\d+: error: .*\[(\S+)\]", errors())
    assert sorted(found) == sorted((name, error) for name, (_, error) in PLANTED.items())


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
