"""The walls of the house: what may import what."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nanoserve

PACKAGE = Path(nanoserve.__file__).parent
ENGINE_MODULES = sorted(path.stem for path in (PACKAGE / "engine").glob("*.py"))
CHECKPOINT_MODULES = [*("model_config", "rope_config", "config_json", "layer_types", "moe_config")]


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
            is_engine = path.parent == PACKAGE / "cli" / "bench" / "engines" and node.level == 1
            assert is_engine or node.level == 0, f"{path}: relative imports hide walls"
            room = "nanoserve.cli.bench.engines." if is_engine else ""
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
        *((room, set()) for room in ("models", "attention", "kernels")),
        ("checkpoint", set()),
        ("sampling", {"nanoserve.engine.executor"}),  # the seam: what a slot's sequence asks for
    ],
)
def test_what_sees_tensors_does_not_see_the_brain(room: str, allowed: set[str]) -> None:
    """Not in a function and not for a type checker either."""
    reached = {
        path.name: {m for m in modules_of(imports_of(path)) if m.startswith("nanoserve.engine")}
        for path in (PACKAGE / room).rglob("*.py")
    }
    assert set().union(*reached.values()) == allowed, reached


def test_only_the_front_door_builds_the_parts() -> None:
    """engine/ is handed its muscle: it never imports worker/, models/ or anything above it."""
    for path in (PACKAGE / "engine").glob("*.py"):
        own = {name for name in imports_of(path) if name.startswith("nanoserve.")}
        allowed = (
            "nanoserve.engine",
            "nanoserve.utils.checks",
            "nanoserve.config",
            "nanoserve.checkpoint.model_config",
            "nanoserve.outputs",
            "nanoserve.utils.registry",
            "nanoserve.sampling_params",
            "nanoserve.pooling_params",
            "nanoserve.lora_request",
            "nanoserve.text",
            "nanoserve.utils",
        )
        assert all(name.startswith(allowed) for name in own), (path.name, own)


@pytest.mark.parametrize("module", CHECKPOINT_MODULES)
def test_what_a_checkpoint_says_is_read_without_torch(
    module: str, heavy_imports: dict[str, list[str]]
) -> None:
    """The engine reads `ModelConfig`, whose folder also holds the loader."""
    assert heavy_imports[f"nanoserve.checkpoint.{module}"] == []


def test_no_module_imports_itself_by_a_detour() -> None:
    """Not in a function and not for a type checker either: both ends of it must be read."""
    imports = {name: modules_of(imports_of(path)) for name, path in FILES.items()}
    del imports["nanoserve"]  # what it names for its users, it loads when they ask
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


# ---------------------------------------------------------------------- rooms


def test_kernels_import_nothing_of_nanoserve() -> None:
    """Those of one kind know their own folder only; not for a type checker either."""
    strangers = {
        f"{kind}/{path.name}"
        for kind in ("triton", "cpu")
        for path in (PACKAGE / "kernels" / kind).rglob("*.py")
        for module in modules_of(imports_of(path))
        if not module.startswith(f"nanoserve.kernels.{kind}")
    }
    assert not strangers, f"must import nothing of nanoserve: {strangers}"


# Rooms from below to above: imports point downwards, or to the same line. A room is a folder, or
# one of these files; all other files of the package's own folder are "front".
LINES = (
    ("utils", "config", "outputs", "sampling_params", "pooling_params", "lora_request"),
    ("kernels",),
    ("checkpoint",),
    ("text",),
    ("engine",),
    ("attention", "models", "sampling"),
    ("worker",),
    ("features",),
    ("compat",),
    ("front",),
    ("cli", "serve"),
)
FLOOR = {room: floor for floor, rooms in enumerate(LINES) for room in rooms}
# The arrows that point upwards all the same, and why. The list may only become shorter.
UPWARD = {
    ("checkpoint", "compat"): "what there is in the place of what vLLM's ModelConfig has",
    ("config", "attention"): "backends may have been registered",
    ("config", "checkpoint"): "ways to quantize may have been registered",
    ("config", "features"): "a feature checks its own options",
    ("config", "text"): "a chat template is read when an engine is configured",
    ("sampling_params", "compat"): "vLLM's parameters are translated when one is not known",
    ("text", "compat"): "a keyword of vLLM's chat is answered with what to do instead",
    ("utils", "features"): "a grammar that is asked for is checked by its feature",
}


def room_of(module: str) -> str:
    own = module.removeprefix("nanoserve").removeprefix(".").partition(".")[0]
    if own == "__main__":
        return "cli"
    return own if own in FLOOR or ((PACKAGE / own).is_dir() and own) else "front"


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def nodes_run(node: ast.AST, in_functions: bool) -> Iterator[ast.AST]:
    """What is executed: not what only a type checker reads, and what is in functions if wanted."""
    if is_for_types(node) and "not TYPE_CHECKING" not in ast.unparse(node.test):
        return
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    if not in_functions and is_function:
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from nodes_run(child, in_functions)


def imports_run(path: Path, in_functions: bool) -> set[str]:
    """Return the modules of nanoserve that a file imports when it is loaded, or ever."""
    names: set[str] = set()
    for node in nodes_run(ast.parse(path.read_text(encoding="utf-8")), in_functions):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    # The one loads nothing before it is used, the other says where the bundled model lies.
    return modules_of(names) - {"nanoserve"}


def arrows(in_functions: bool) -> dict[tuple[str, str], set[str]]:
    """Return which rooms import which, and by which files."""
    found: dict[tuple[str, str], set[str]] = {}
    for name, path in FILES.items():
        for module in imports_run(path, in_functions):
            ends = room_of(name), room_of(module)
            if ends[0] != ends[1]:
                found.setdefault(ends, set()).add(f"{name} -> {module}")
    return found


def circles(arrows: set[tuple[str, str]]) -> set[frozenset[str]]:
    """Return the sets of rooms that all reach each other."""
    reached = {room: {end for start, end in arrows if start == room} for room, _ in arrows}
    for middle in reached:
        for ends in reached.values():
            if middle in ends:
                ends |= reached[middle]
    return {
        frozenset(other for other in ends if room in reached.get(other, ()))
        for room, ends in reached.items()
        if room in ends
    }


def test_every_room_has_its_line() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert folders | {"front"} == FLOOR.keys() - files
    assert FLOOR.keys() <= folders | files | {"front"}


def test_no_circle_of_rooms() -> None:
    assert circles(set(arrows(in_functions=False))) == set()


def test_circles_are_found() -> None:
    assert circles({("a", "b"), ("b", "c"), ("c", "d")}) == set()
    both = {("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("e", "d")}
    assert circles(both) == {frozenset("abc"), frozenset("de")}


def test_imports_point_downwards() -> None:
    """Those in functions too, but not those for a type checker."""
    up = {ends: why for ends, why in arrows(True).items() if FLOOR[ends[1]] > FLOOR[ends[0]]}
    strange = {ends: files for ends, files in up.items() if ends not in UPWARD}
    assert not strange, f"import upwards: {strange}"
    assert up.keys() == UPWARD.keys(), f"take out of UPWARD: {UPWARD.keys() - up.keys()}"
