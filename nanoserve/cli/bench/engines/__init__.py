"""The engines that can be measured, each in a file of its own that is imported when it runs.

Peers may live in an environment of their own, so nothing here but `nanoserve_engine` imports
nanoserve, and they import each other relatively: in a child this folder is a package of its own.
"""

from argparse import Namespace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

Tokens = list[list[int]]


class Engine:
    """A loaded engine. `spec` is the measurement's, see `compare.py`; `options` are its own."""

    is_online = False  # whether it can take requests while others run
    versions: dict[str, str]  # of the packages that matter

    @staticmethod
    def prepare(spec: Namespace) -> None:
        """What is done before, and does not count as loading."""

    def __init__(self, spec: Namespace, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        """The engine is warm, and what is measured starts now."""

    def generate(self, prompts: Tokens, output_lens: list[int]) -> Tokens:
        """Every output's tokens, all requests given at once."""
        raise NotImplementedError

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        """Take a request; this and `poll` are `latency.OnlineEngine`."""
        raise NotImplementedError

    def poll(self, seconds: float) -> list[tuple[int, list[int]]]:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What the report prints of the time since `begin`: KV blocks, steps, options, ..."""
        return {}

    def step_times(self) -> dict[str, float] | None:
        """Mean seconds per step of each of its parts, where an engine tells."""
        return None

    def close(self) -> None:
        """Let threads and processes end."""


class Source(NamedTuple):
    """Where an engine's class is, and the packages without which it cannot run."""

    module: str
    class_name: str
    packages: tuple[str, ...]


SOURCES = {
    "nanoserve": Source("nanoserve_engine", "NanoserveEngine", ("nanoserve",)),
    "transformers": Source("hugging_face", "StaticBatches", ("transformers",)),
    "transformers-cb": Source("hugging_face", "ContinuousBatches", ("transformers",)),
    "vllm": Source("vllm_engine", "VllmEngine", ("vllm",)),
    "llama.cpp": Source("llama_cpp_engine", "LlamaCppEngine", ("llama_cpp", "gguf")),
    "nanovllm": Source("nano_vllm_engine", "NanoVllmEngine", ("nanovllm",)),
}


def missing_packages(name: str) -> list[str]:
    return [package for package in SOURCES[name].packages if find_spec(package) is None]


def engine_class(name: str) -> type[Engine]:
    source = SOURCES[name]
    return getattr(import_module(f".{source.module}", __name__), source.class_name)


def total_lens(spec: Namespace) -> list[int]:
    """Tokens of each sequence at its end; for engines that reserve what they need."""
    return [len(prompt) + n for prompt, n in zip(spec.prompts, spec.output_lens, strict=True)]
