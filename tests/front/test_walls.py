"""The walls of the house: what may import what."""

import ast
import subprocess
import sys
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nanoserve

PACKAGE = Path(nanoserve.__file__).parent
ENGINE_MODULES = sorted(path.stem for path in (PACKAGE / "engine").glob("*.py"))
# Two circles of imports: mended with the sampler/layers.
BEING_MENDED = {
    "nanoserve.layers.context",
    "nanoserve.layers.experts",
    "nanoserve.layers.linear",
    "nanoserve.layers.norm",
    "nanoserve.layers.ops",
    "nanoserve.layers.rotary",
    "nanoserve.sampling.noise",
    "nanoserve.sampling.random_sampler",
    "nanoserve.sampling.sampler",
    "nanoserve.sampling.special_rows",
}


def imports_of(path: Path, in_functions: bool = True) -> set[str]:
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in nodes:
        if in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide walls"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def heavy_imports_of(module: str) -> str:
    code = (
        f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return shown.stdout.strip()


@pytest.mark.parametrize("module", ENGINE_MODULES)
def test_the_brain_imports_no_torch(module: str) -> None:
    name = "nanoserve.engine" if module == "__init__" else f"nanoserve.engine.{module}"
    assert heavy_imports_of(name) == "[]"


@pytest.mark.parametrize(
    "room", ["models", "layers", "attention", "kernels", "kernels_cpu", "sampling", "checkpoint"]
)
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
            "nanoserve.checks",
            "nanoserve.config",
            "nanoserve.checkpoint.model_config",
            "nanoserve.outputs",
            "nanoserve.sampling_params",
        )
        assert all(name.startswith(allowed) for name in own), (path.name, own)


@pytest.mark.parametrize("module", ["model_config", "rope_config", "config_json"])
def test_what_a_checkpoint_says_is_read_without_torch(module: str) -> None:
    """The brain reads `ModelConfig`, and its room has the loader in it."""
    assert heavy_imports_of(f"nanoserve.checkpoint.{module}") == "[]"


def test_no_module_imports_itself_by_a_detour() -> None:
    """Imports in functions do not count; those for type checkers do: both ends must be read."""
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    imports = {
        name: {target for target in targets_of(path, files) if not {name, target} <= BEING_MENDED}
        for name, path in files.items()
    }
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def targets_of(path: Path, modules: Collection[str]) -> set[str]:
    """The modules of the package that a file imports before any of its functions runs."""
    names = imports_of(path, in_functions=False)
    return {name if name in modules else name.rpartition(".")[0] for name in names} & set(modules)
