"""The package says what it needs and which version it is, and runs from a wheel alone."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import nanoserve

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it where Python does not

PACKAGE = Path(nanoserve.__file__).parent
ROOT = PACKAGE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

Needs = tuple[set[str], set[str]]  # when a file is imported, and when its functions are called

# What an imported module is called where it is installed from.
DISTRIBUTIONS = {
    "fastapi": "fastapi",
    "flash_attn": "flash-attn",
    "gguf": "gguf",
    "ray": "ray",
    "huggingface_hub": "huggingface-hub",
    "llguidance": "llguidance",
    "llvmlite": "llvmlite",
    "matplotlib": "matplotlib",
    "msgspec": "msgspec",
    "numba": "numba",
    "numpy": "numpy",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "safetensors": "safetensors",
    "starlette": "starlette",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "tqdm": "tqdm",
    "transformers": "transformers",
    "triton": "triton",
    "uvicorn": "uvicorn",
    "xgrammar": "xgrammar",
    "xxhash": "xxhash",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
# Rooms and files that are no part of the core, and the extras that bring what they import.
ROOMS = {
    "attention/numba.py": {"cpu"},
    "cli/bench/engines/gguf_file.py": {"gguf"},
    "cli/bench/plots.py": {"bench"},
    "cli/bench/serve/plot.py": {"bench"},
    "cli/simulate/plots.py": {"bench"},
    "features/kv_events/": {"kv-events"},
    "features/metrics.py": {"serve"},
    "features/structured/guidance.py": {"guided"},
    "features/structured/xgrammar.py": {"xgrammar"},
    "kernels/cpu/": {"cpu"},
    "kernels/triton/": {"test"},  # elsewhere Triton comes with torch's builds for CUDA
    "serve/": {"serve"},
    "serve/batch/": {"serve", "ray"},
    "serve/replicas/": {"serve", "ray"},
}
# Other engines live in environments of their own, and one is built from a repository's folder.
NOT_OURS = {"flash_attn_interface", "llama_cpp", "nanovllm", "vllm"}
# It runs as a file, in such environments, and imports what lies beside it.
CHILD = "cli/bench/child.py"


def named(requirements: list[str]) -> set[str]:
    names = (re.match(r"[\w.-]+", requirement).group() for requirement in requirements)
    return {name.lower().replace("_", "-") for name in names}


CORE = named(PROJECT["dependencies"])
EXTRAS = {name: named(needs) for name, needs in PROJECT["optional-dependencies"].items()}


def imports_of(path: Path) -> Needs:
    """What importing the file imports, and what a function of it imports when it is called.

    What only type checkers read is neither: they have `typing_extensions` and the like themselves.
    """
    at_once: set[str] = set()
    in_calls: set[str] = set()
    waiting: list[tuple[ast.AST, set[str]]] = [(ast.parse(path.read_text("utf-8")), at_once)]
    while waiting:
        node, found = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = in_calls
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        children = node.orelse if is_typing else ast.iter_child_nodes(node)
        waiting += [(child, found) for child in children]
    return at_once, in_calls


def needs_of(path: Path) -> Needs:
    """The same as distributions, without Python's modules, our own, and those of other engines."""
    ours = {"nanoserve", *NOT_OURS, *sys.stdlib_module_names}
    if path == PACKAGE / CHILD:
        ours |= {other.stem for other in path.parent.iterdir()}
    at_once, in_calls = (names - ours for names in imports_of(path))
    unknown = (at_once | in_calls) - DISTRIBUTIONS.keys()
    assert not unknown, f"{path}: DISTRIBUTIONS does not say where {unknown} come from"
    return {DISTRIBUTIONS[name] for name in at_once}, {DISTRIBUTIONS[name] for name in in_calls}


@pytest.fixture(scope="module")
def needs() -> dict[str, Needs]:
    return {path.relative_to(PACKAGE).as_posix(): needs_of(path) for path in PACKAGE.rglob("*.py")}


def test_what_a_file_imports_is_declared(needs: dict[str, Needs]) -> None:
    """By the core, or by the extra that its room is for; in functions, by any extra."""
    anywhere = CORE.union(*EXTRAS.values())
    for file, (at_once, in_calls) in needs.items():
        extras = set().union(*(names for room, names in ROOMS.items() if file.startswith(room)))
        declared = CORE.union(*(EXTRAS[name] for name in extras))
        assert at_once <= declared, f"{file} imports {at_once - declared}"
        assert in_calls <= anywhere, f"{file} imports {in_calls - anywhere}"


def test_nothing_is_declared_that_no_file_imports(
    needs: dict[str, Needs],
) -> None:
    used = set().union(*(at_once | in_calls for at_once, in_calls in needs.values()))
    assert used >= CORE, CORE - used
    for room in ROOMS:
        assert any(file.startswith(room) for file in needs), f"{room} is gone"


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["version"]
    assert nanoserve.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.M) == [version]
    entries = re.findall(
        r"^## \[(.+?)\] - (?:unreleased|\d{4}-\d\d-\d\d)$",
        (ROOT / "CHANGELOG.md").read_text("utf-8"),
        re.M,
    )
    assert version in entries, entries


# ---------------------------------------------------------------- built, and used elsewhere

FOLDERS = ("benchmarks", "deploy", "docs", "examples", "nanoserve", "tests", "training")
FILES = (
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md"),
    *("SECURITY.md", "bench.py", "example.py", "mkdocs.yml", "pyproject.toml"),
)
ASK = """
import json, nanoserve
with nanoserve.LLM("tiny-qwen3", attention_backend="torch") as llm:  # numba would compile anew
    question = [{"role": "user", "content": "What is 12 + 30?"}]
    params = nanoserve.SamplingParams(temperature=0, max_tokens=40)
    [answer] = llm.chat(question, params, use_tqdm=False)
print(json.dumps([nanoserve.__file__, answer.outputs[0].text]))
"""


def copied(target: Path) -> Path:
    """The tree without what was built in it, because building writes beside the sources."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, target)
    return target


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def from_sdist(tree: Path, target: Path) -> Path:
    """A source distribution, unpacked: it holds the whole tree, so its tests run there too."""
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", build, str(target)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    [archive] = target.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)  # older Pythons have none
        opened.extractall(target)
    return target / archive.name.removesuffix(".tar.gz")


@pytest.mark.parametrize("source", ["tree", "sdist"])
@pytest.mark.small(source=[])  # they build, so only with --full
def test_a_wheel_alone_answers(source: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="it builds without isolation")
    tree = copied(tmp_path / "tree")
    files = files_below(tree)
    if source == "sdist":
        tree = from_sdist(tree, tmp_path)
        assert files <= files_below(tree), files - files_below(tree)

    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, tree], check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(installed)
    metadata = f"nanoserve-{PROJECT['version']}.dist-info"
    assert {path.name for path in installed.iterdir()} == {"nanoserve", metadata}
    shipped = {name for name in files_below(installed) if name.startswith("nanoserve/")}
    assert shipped == {name for name in files if name.startswith("nanoserve/")}
    assert not [name for name in shipped if "/test" in name]

    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    shown = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=elsewhere,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    file, answer = json.loads(shown.stdout.splitlines()[-1])
    assert Path(file) == installed / "nanoserve" / "__init__.py"
    assert "42" in answer, answer
