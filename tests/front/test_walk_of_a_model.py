"""The way of a model's name from `LLM(...)` to the runner: short, and nothing is read twice."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import nanoserve
from nanoserve import LLM
from nanoserve.build import load_tokenizer
from nanoserve.checkpoint.checkpoint import Checkpoint, bundled_checkpoint
from nanoserve.checkpoint.gguf import container
from nanoserve.config import EngineConfig

PACKAGE = Path(nanoserve.__file__).parent
OPTIONS: dict[str, Any] = {"attention_backend": "torch", "device": "cpu", "num_kv_blocks": 20}
MOST_STOPS = 24


class Walk:
    """The functions of nanoserve that get a model's name, its path, or a value with one of them.

    Such a value is a list, a dictionary or an object of nanoserve, such as `EngineConfig`. The walk
    ends where the runner is made.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.functions: list[tuple[str, str]] = []  # file and function, in order
        self.has_ended = False
        self._name, self._folder = name, str(folder)

    @property
    def stops(self) -> list[str]:
        """The files that are visited, in order: calls within a file are one visit."""
        return [file for file, _ in groupby(file for file, _ in self.functions)]

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or self.has_ended or code.co_name.startswith("<"):
            return
        path = Path(code.co_filename)
        if PACKAGE not in path.parents:
            return
        file, function = str(path.relative_to(PACKAGE)), code.co_name
        count = code.co_argcount + code.co_kwonlyargcount
        has_more = bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args, **kwargs
        names = code.co_varnames[: count + has_more]
        if any(self._holds(frame.f_locals.get(name)) for name in names):
            self.functions.append((file, function))
        owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
        self.has_ended = "ModelRunner" in (type(owner).__name__, getattr(owner, "__name__", ""))

    def _holds(self, value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(self._is_it, list(value.values())))
        if isinstance(value, (list, tuple)):
            return any(map(self._is_it, value))
        if type(value).__module__.startswith("nanoserve"):
            return any(map(self._is_it, getattr(value, "__dict__", {}).values()))
        return self._is_it(value)

    def _is_it(self, value: Any) -> bool:
        if not isinstance(value, (str, Path)):
            return False
        text = str(value)
        is_file = text.startswith(self._folder + os.sep) and "\n" not in text
        return text in (self._name, self._folder) or (is_file and os.path.exists(text))


@contextmanager
def walking(name: str, folder: Path) -> Iterator[Walk]:
    walk, before = Walk(name, folder), sys.getprofile()
    sys.setprofile(walk.note)
    try:
        yield walk
    finally:
        sys.setprofile(before)


@pytest.fixture(params=["bundled", "folder", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The name of a model and where it lies."""
    bundled = bundled_checkpoint("tiny-qwen3")
    if request.param == "bundled":
        return "tiny-qwen3", bundled
    if request.param == "folder":
        copied = shutil.copytree(bundled, tmp_path / "copied")
        return str(copied), copied
    pytest.importorskip("gguf", reason="pip install 'nanoserve[gguf]'")
    from nanoserve.cli.bench.engines.gguf_file import write_gguf

    file = tmp_path / "model.gguf"
    write_gguf(bundled, file)  # with words of no tokenizer
    return str(file), file


def test_the_walk_is_short(model: tuple[str, Path]) -> None:
    name, folder = model
    with walking(name, folder) as walk:
        LLM(name, skip_tokenizer_init=folder.is_file(), **OPTIONS).close()
    shown = "\n".join(f"{file}: {function}" for file, function in walk.functions)
    assert walk.has_ended and walk.functions[0] == ("llm.py", "__init__"), shown
    assert len(walk.stops) <= MOST_STOPS, f"{len(walk.stops)} stops: {walk.stops}\n{shown}"
    # It is looked up once, and what is above the builder is not entered again.
    assert walk.functions.count(("checkpoint/checkpoint.py", "open")) == 1, shown
    page = walk.stops.index("build.py")
    assert not {"llm.py", "compat/options.py"} & set(walk.stops[page:]), shown


def test_each_file_is_read_once(model: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By nanoserve: transformers reads files of the tokenizer for itself."""
    name, folder = model
    read: Counter[str] = Counter()
    read_bytes, parse = Path.read_bytes, container._Parser.parse

    def count_bytes(path: Path) -> bytes:
        read[path.name] += path.parent == folder
        return read_bytes(path)

    def count_parsed(parser: Any) -> Any:
        read[folder.name] += 1
        return parse(parser)

    monkeypatch.setattr(Path, "read_bytes", count_bytes)
    monkeypatch.setattr(container._Parser, "parse", count_parsed)
    config = EngineConfig(name)
    checkpoint = Checkpoint.open(config.model, config)
    checkpoint.model_config(config, ["Qwen3ForCausalLM"])
    with suppress(ValueError) if folder.is_file() else nullcontext():
        load_tokenizer(config, checkpoint)
    files = ["config.json", "generation_config.json", "tokenizer.json"]
    assert {file: n for file, n in read.items() if n} == dict.fromkeys(
        files if folder.is_dir() else [folder.name], 1
    )
