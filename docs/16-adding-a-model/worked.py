"""Numbers of the chapter on adding a model: lines, classes, settings, names, rows of weights."""

import ast
import json
import math
import re
import struct
from pathlib import Path

from reading import lines_of_code

from nanoserve.checkpoint.config_json import ConfigFile

ROOT = Path(__file__).parents[2]


def classes_of(source: str) -> list[str]:
    """ "Name(bases)" of the top-level classes of a module."""
    tree = ast.parse(source)
    found = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [f"{node.name}({', '.join(map(ast.unparse, node.bases))})" for node in found]


def lines_in(file: str) -> int:
    """Number of lines of code of a file of the repository."""
    return lines_of_code(ROOT / file)


def models_table() -> str:
    """Every file of nanoserve/models that has a model family, and the toy model of the tests."""
    files = sorted((ROOT / "nanoserve/models").glob("*.py"))
    files = [path for path in files if path.stem not in ("__init__", "registry", "pooling")]
    files.sort(key=lines_of_code)
    files.append(ROOT / "tests/support/toy_model.py")
    lines = ["| file | lines of code | classes (what they derive from) |", "|---|---|---|"]
    for path in files:
        source = path.read_text(encoding="utf-8")
        classes = ", ".join(f"`{name}`" for name in classes_of(source))
        name = path.relative_to(ROOT)
        lines.append(f"| `{name}` | {lines_of_code(path)} | {classes} |")
    return "\n".join(lines)


def architectures() -> list[str]:
    """Registered architectures, read from the source, because importing it would import torch."""
    source = (ROOT / "nanoserve/models/registry.py").read_text(encoding="utf-8")
    return sorted(re.findall(r'^ +"(\w+)": "nanoserve\.', source, re.MULTILINE))


def own_settings(architecture: str) -> list[str]:
    """Entries of config.json that have an effect for this architecture, but not for all."""
    names = architectures()
    implied = [ConfigFile({"architectures": [name]}).implied for name in names]
    common = set(implied[0]).intersection(*implied)
    return sorted(set(implied[names.index(architecture)]) - common)


def implied_value(architecture: str, name: str) -> object:
    """The value of `name` if a config.json does not have it."""
    return ConfigFile({"architectures": [architecture]}).get(name)


def settings_table() -> str:
    lines = ["| architecture | settings that it reads, besides those that all read |", "|---|---|"]
    for name in architectures():
        settings = ", ".join(f"`{setting}`" for setting in own_settings(name))
        lines.append(f"| `{name}` | {settings or 'nothing'} |")
    return "\n".join(lines)


def stored_tensors() -> dict[str, list[int]]:
    """Name and shape of every tensor of the bundled tiny-qwen3.

    A safetensors file begins with the length of its header (8 bytes) and the header, in JSON.
    """
    file = ROOT / "nanoserve/checkpoint/tiny_qwen3/model/model.safetensors"
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def layer_table(layer: int = 0) -> str:
    """The tensors of one layer of tiny-qwen3, as they are stored in the file."""
    prefix = f"model.layers.{layer}."
    lines = ["| tensor | shape |", "|---|---|"]
    for name, shape in sorted(stored_tensors().items()):
        if name.startswith(prefix):
            lines.append(f"| `{name}` | {shape} |")
    return "\n".join(lines)


def fused_rows(sizes: dict[str, int], rank: int, size: int) -> dict[str, range]:
    """Rows of a fused tensor that one rank loads, for each of the linear layers in it."""
    first, rows = 0, {}
    for name, total in sizes.items():
        part = total // size
        rows[name] = range(first + rank * part, first + (rank + 1) * part)
        first += total
    return rows


def fused_table(sizes: dict[str, int], size: int) -> str:
    lines = [f"| rank | {' | '.join(sizes)} |", f"|---{'|---' * len(sizes)}|"]
    for rank in range(size):
        parts = fused_rows(sizes, rank, size).values()
        lines.append(f"| {rank} | {' | '.join(f'{p[0]} to {p[-1]}' for p in parts)} |")
    return "\n".join(lines)


def norm_factor(weight: float, adds_one: bool) -> float:
    """The factor of an RMSNorm: its weight, or, in Gemma, its weight plus one."""
    return 1 + weight if adds_one else weight


def soft_cap(value: float, cap: float) -> float:
    """cap * tanh(value / cap): nearly `value` if that is small, never more than `cap`."""
    return cap * math.tanh(value / cap)
