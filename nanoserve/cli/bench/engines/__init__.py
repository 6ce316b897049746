"""The engines that can be measured, each in a module that is imported only when it runs.

Other engines may be installed in separate environments, so only `nanoserve_engine` imports
nanoserve. Imports between these modules are relative, because in a child this folder is a package.
"""

from argparse import Namespace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

Tokens = list[list[int]]


class Engine:
    """A loaded engine, with the `spec` of the measurement (see `compare.py`) and its `options`."""

    is_online = False  # True if it accepts requests while others run
    versions: dict[str, str]  # of the relevant packages

    @staticmethod
    def prepare(spec: Namespace) -> None:
        """Do preparations that do not count as loading."""

    def __init__(self, spec: Namespace, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        """Start the measured part of a run, after the warm-up."""

    def generate(self, prompts: Tokens, output_lens: list[int]) -> Tokens:
        """Return the tokens of each output. All requests are submitted at once."""
        raise NotImplementedError

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        """Add a request. This and `poll` implement `latency.OnlineEngine`."""
        raise NotImplementedError

    def poll(self, seconds: float) -> list[tuple[int, list[int]]]:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return facts since `begin` for the report, such as KV blocks, steps and options."""
        return {}

    def step_times(self) -> dict[str, float] | None:
        """Return the mean seconds of each part of a step, or None if unknown."""
        return None

    def close(self) -> None:
        """End the engine's threads and processes."""


class Source(NamedTuple):
    """The location of an engine's class, and the packages that it needs."""

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
    """Return the final length of each sequence, for engines that reserve memory for it."""
    return [len(prompt) + n for prompt, n in zip(spec.prompts, spec.output_lens, strict=True)]
