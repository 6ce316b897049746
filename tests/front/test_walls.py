"""The walls of the house: what may import what."""

import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nanoserve

PACKAGE = Path(nanoserve.__file__).parent
ENGINE_MODULES = sorted(path.stem for path in (PACKAGE / "engine").glob("*.py"))
CHECKPOINT_MODULES = [
    *("model_config", "rope_config", "config_json", "layer_types", "moe_config", "scales")
]


def engine_module(stem: str) -> str:
    return "nanoserve.engine" if stem == "__init__" else f"nanoserve.engine.{stem}"


WITHOUT_TORCH = [
    *map(engine_module, ENGINE_MODULES),
    *(f"nanoserve.checkpoint.{stem}" for stem in CHECKPOINT_MODULES),
]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


@cache
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


# Imports each module anew, and notes which heavy ones it asks for. They are refused: once there,
# they would be there for all modules that come after.
IMPORT_EACH = """
import importlib, json, sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            wanted.append(name)
            raise ImportError(name)

sys.meta_path.insert(0, Guard())
found = {}
for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nanoserve"]:
        del sys.modules[name]
    found[module] = wanted = []
    try:
        importlib.import_module(module)
    except ImportError:
        if not wanted:
            raise
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def heavy_imports() -> dict[str, list[str]]:
    """Which of torch and transformers a process imports that imports this module and no other."""
    command = [sys.executable, "-c", IMPORT_EACH, *WITHOUT_TORCH]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(shown.stdout)


@pytest.mark.parametrize("module", ENGINE_MODULES)
def test_the_brain_imports_no_torch(module: str, heavy_imports: dict[str, list[str]]) -> None:
    assert heavy_imports[engine_module(module)] == []


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
            "nanoserve.registry",
            "nanoserve.sampling_params",
        )
        assert all(name.startswith(allowed) for name in own), (path.name, own)


@pytest.mark.parametrize("module", CHECKPOINT_MODULES)
def test_what_a_checkpoint_says_is_read_without_torch(
    module: str, heavy_imports: dict[str, list[str]]
) -> None:
    """The brain reads `ModelConfig`, and its room has the loader in it."""
    assert heavy_imports[f"nanoserve.checkpoint.{module}"] == []


def test_no_module_imports_itself_by_a_detour() -> None:
    """Not in a function and not for a type checker either: both ends of it must be read."""
    imports = {name: modules_of(imports_of(path)) for name, path in FILES.items()}
    del imports["nanoserve"]  # what it names for its users, it loads when they ask
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules
