"""The walls of the house: what may import what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nanoserve

PACKAGE = Path(nanoserve.__file__).parent
ENGINE_MODULES = sorted(path.stem for path in (PACKAGE / "engine").glob("*.py"))


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide walls"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("module", ENGINE_MODULES)
def test_the_brain_imports_no_torch(module: str) -> None:
    name = "nanoserve.engine" if module == "__init__" else f"nanoserve.engine.{module}"
    code = f"import sys, {name}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("room", ["models", "layers", "attention", "kernels", "sampling"])
def test_what_sees_tensors_does_not_see_the_brain(room: str) -> None:
    for path in (PACKAGE / room).glob("*.py"):
        reached = {name for name in imports_of(path) if name.startswith("nanoserve.engine")}
        assert not reached, f"{path.name} imports {reached}"


def test_only_the_front_door_builds_the_parts() -> None:
    """engine/ is handed its muscle: it never imports worker/, models/ or anything above it."""
    for path in (PACKAGE / "engine").glob("*.py"):
        own = {name for name in imports_of(path) if name.startswith("nanoserve.")}
        allowed = (
            "nanoserve.engine",
            "nanoserve.config",
            "nanoserve.config_file",
            "nanoserve.model_config",
            "nanoserve.outputs",
            "nanoserve.sampling_params",
        )
        assert all(name.startswith(allowed) for name in own), (path.name, own)
