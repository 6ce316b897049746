"""The walls of the house: what may import what."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nanoserve

PACKAGE = Path(nanoserve.__file__).parent
ENGINE_MODULES = sorted(path.stem for path in (PACKAGE / "engine").glob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Engines run in processes that have no nanoserve, too: they cannot name it.
            is_engine = path.parent == PACKAGE / "bench" / "engines" and node.level == 1
            assert is_engine or node.level == 0, f"{path}: relative imports hide walls"
            room = "nanoserve.bench.engines." if is_engine else ""
            module = f"{room}{node.module or ''}".rstrip(".")
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def modules_of(names: set[str]) -> set[str]:
    """The modules of the package that hold these names, or are named so themselves."""
    return {name if name in FILES else name.rpartition(".")[0] for name in names} & set(FILES)


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
    ("room", "allowed"),
    [
        *((room, set()) for room in ("models", "layers", "attention", "kernels", "kernels_cpu")),
        ("checkpoint", set()),
        ("sampling", {"nanoserve.engine.executor"}),  # the seam: what a slot's sequence asks for
    ],
)
def test_what_sees_tensors_does_not_see_the_brain(room: str, allowed: set[str]) -> None:
    """Not in a function and not for a type checker either."""
    reached = {
        path.name: {m for m in modules_of(imports_of(path)) if m.startswith("nanoserve.engine")}
        for path in (PACKAGE / room).glob("*.py")
    }
    assert set().union(*reached.values()) == allowed, reached


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


@pytest.mark.parametrize(
    "module", ["model_config", "rope_config", "config_json", "layer_types", "moe_config", "scales"]
)
def test_what_a_checkpoint_says_is_read_without_torch(module: str) -> None:
    """The brain reads `ModelConfig`, and its room has the loader in it."""
    assert heavy_imports_of(f"nanoserve.checkpoint.{module}") == "[]"


def test_no_module_imports_itself_by_a_detour() -> None:
    """Not in a function and not for a type checker either: both ends of it must be read."""
    imports = {name: modules_of(imports_of(path)) for name, path in FILES.items()}
    del imports["nanoserve"]  # what it names for its users, it loads when they ask
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules
