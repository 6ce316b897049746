"""Memory is given back while nobody asks, and taken again.

Level 1 keeps the weights in the host's memory and drops the KV cache; level 2 drops both, and reads
the weights again from the checkpoint. Cached prefixes are forgotten in either case. The pool has as
many blocks afterwards as before, so what was answered is answered the same.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch

from nanoserve.checks import require
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import Executor
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.startup import allocate_pool

TAGS = ("weights", "kv_cache")
_REFUSAL = "asleep: wake_up() first"


class _Kept(Protocol):
    """What is left of an executor."""

    def wake(self, engine: LLMEngine) -> Executor: ...

    def close(self) -> None: ...


class Asleep:
    """An executor that computes nothing; `missing` are the tags that have not been woken."""

    def __init__(self, executor: Executor, level: int, kept: _Kept) -> None:
        self.num_kv_blocks, self.max_model_len = executor.num_kv_blocks, executor.max_model_len
        self.level, self.kept, self.missing = level, kept, set(TAGS)

    def next_batch(self) -> Batch:
        _refuse()

    def forward(self, batch: Batch, changes: list[Any]) -> Any:
        _refuse()

    def expect(self, guesses: dict[int, list[int]], limits: dict[int, Any]) -> None:
        _refuse()

    def sample(self, handle: Any) -> None:
        _refuse()

    def collect(self, handle: Any) -> Any:
        _refuse()

    def close(self) -> None:
        self.kept.close()


class _OnHost:
    """Level 1: a runner without its KV cache, whose weights lie in the host's memory."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        with runner.device.guard():
            runner.device.finish()
            runner.device.drop_recorded()
            runner.kv_cache = None
            runner.model.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self, engine: LLMEngine) -> Executor:
        runner = self._runner
        with runner.device.guard():
            runner.model.to(runner.context.device)
            allocate_pool(runner)
            runner.device.warm_up(runner)
        return runner

    def close(self) -> None:
        self._runner.close()


class _Dropped:
    """Level 2: nothing but the size of the pool."""

    def __init__(self, executor: "Executor | Asleep") -> None:
        self._num_kv_blocks = executor.num_kv_blocks
        executor.close()

    def wake(self, engine: LLMEngine) -> Executor:
        config = engine.config
        same_pool = {"num_kv_blocks": self._num_kv_blocks, "kv_cache_memory_bytes": None}
        return engine.make_executor(replace(config, **same_pool))

    def close(self) -> None:
        pass


def put_to_sleep(engine: LLMEngine, level: int) -> None:
    """Raises `ValueError` while requests are unfinished, and for a level that cannot be had."""
    require(level in (1, 2) and level is not True, f"level={level!r} must be 1 or 2")
    require(
        not engine.has_unfinished_requests(),
        "requests are unfinished: step the engine or streams to the end before sleep()",
    )
    executor, guesses = engine.executor, engine.config.speculative_config
    if isinstance(executor, Asleep):
        _sleep_deeper(engine, executor, level)
        return
    require(engine.refusal is None, f"this engine is {engine.refusal}")
    require(
        guesses is None or guesses.method in ("ngram", "suffix"),
        f"an engine that guesses with a {getattr(guesses, 'method', None)} cannot sleep: its "
        f"weights would stay",
    )
    require(
        level == 2 or isinstance(executor, ModelRunner),
        f"level=1 keeps the weights of one process; with tensor_parallel_size="
        f"{engine.config.tensor_parallel_size} and pipeline_parallel_size="
        f"{engine.config.pipeline_parallel_size} take level=2",
    )
    engine.reset_prefix_cache()
    kept = _OnHost(executor) if level == 1 else _Dropped(executor)
    engine.executor, engine.refusal = Asleep(executor, level, kept), _REFUSAL


def wake_up(engine: LLMEngine, tags: Iterable[str] | None = None) -> None:
    """What is missing is made when all tags are woken. Awake, nothing happens."""
    wanted = set(TAGS if tags is None else tags)
    require(wanted <= set(TAGS), f"tags={tags!r} must be among {list(TAGS)}")
    executor = engine.executor
    if not isinstance(executor, Asleep):
        return
    executor.missing -= wanted
    if not executor.missing:
        try:
            engine.executor = executor.kept.wake(engine)
        except BaseException:
            executor.missing = set(TAGS)  # it sleeps on
            raise
        engine.refusal = None


def _sleep_deeper(engine: LLMEngine, executor: Asleep, level: int) -> None:
    executor.missing = set(TAGS)
    if level > executor.level:
        engine.executor = Asleep(executor, level, _Dropped(executor))


def _refuse() -> NoReturn:
    raise ValueError(f"this engine is {_REFUSAL}")
