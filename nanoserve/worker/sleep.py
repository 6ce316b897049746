"""Memory is given back while nobody asks, and taken again.

Level 1 keeps the weights in the host's memory and drops the KV cache; level 2 drops both, and reads
the weights again from the checkpoint. Cached prefixes are forgotten in either case. The pool has as
many blocks afterwards as before, so what was answered is answered the same.

Weights and KV cache can be woken one after the other, as reinforcement learning does it: weights
come back, are written anew, and only when the trainer has given its memory back, the KV cache does.
Requests are refused until both are there.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch

from nanoserve.checks import require
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import Executor
from nanoserve.engine.guard import GuardedEngine
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.startup import allocate_pool, load_model

TAGS = ("weights", "kv_cache")  # in the order in which they are woken


class _Kept(Protocol):
    """What is left of an executor."""

    def wake(self, tags: list[str]) -> Executor | None:
        """Wake what `tags` name; the executor, if nothing is missing any more."""

    @property
    def missing(self) -> list[str]:
        """Tags that have not been woken."""

    def close(self) -> None: ...


class Asleep:
    """An executor that computes nothing."""

    def __init__(self, executor: Executor, kept: _Kept) -> None:
        self.num_kv_blocks, self.max_model_len = executor.num_kv_blocks, executor.max_model_len
        self.kept = kept

    def next_batch(self) -> Batch:
        self._refuse()

    def forward(self, batch: Batch, changes: list[Any]) -> Any:
        self._refuse()

    def expect(self, guesses: dict[int, list[int]], limits: dict[int, Any]) -> None:
        self._refuse()

    def sample(self, handle: Any) -> None:
        self._refuse()

    def collect(self, handle: Any) -> Any:
        self._refuse()

    def close(self) -> None:
        self.kept.close()

    @property
    def refusal(self) -> str:
        """Return the state of the engine, for the message of a refusal."""
        return f"asleep: wake_up() first; missing: {', '.join(self.kept.missing)}"

    def _refuse(self) -> NoReturn:
        raise ValueError(f"this engine is {self.refusal}")


class _SleepingRunner:
    """A runner without its KV cache, whose weights lie in the host's memory, or are gone."""

    def __init__(self, runner: ModelRunner, level: int) -> None:
        self._runner = runner
        self._are_weights_awake = True
        self.sleep(level)

    def sleep(self, level: int) -> None:
        """Weights that level 2 has dropped are not read again for level 1."""
        runner = self._runner
        with runner.device.guard():
            runner.device.finish()
            runner.device.drop_recorded()
            runner.kv_cache = None
            if level == 2:
                runner.model = runner.sampler = None
            elif runner.model is not None:
                runner.model.to("cpu")
        self._are_weights_awake = False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def missing(self) -> list[str]:
        is_there = {
            "weights": self._are_weights_awake,
            "kv_cache": self._runner.kv_cache is not None,
        }
        return [tag for tag in TAGS if not is_there[tag]]

    def wake(self, tags: list[str]) -> Executor | None:
        runner = self._runner
        with runner.device.guard():
            for tag in self.missing:
                if tag in tags:
                    self._wake_weights() if tag == "weights" else allocate_pool(runner)
            if self.missing:
                return None
            try:
                runner.device.warm_up(runner)
            except BaseException:
                runner.kv_cache = None  # it sleeps on
                raise
        return runner

    def _wake_weights(self) -> None:
        runner = self._runner
        if runner.model is not None:
            runner.model.to(runner.context.device)
        else:
            try:
                load_model(runner, runner.path, runner.max_model_len)
            except BaseException:
                runner.model = runner.sampler = None  # half of them are of no use
                raise
        self._are_weights_awake = True

    def close(self) -> None:
        self._runner.close()


class _DroppedRanks:
    """Level 2 of several ranks: nothing but the size of the pool. They are started anew."""

    def __init__(self, engine: GuardedEngine, executor: Executor) -> None:
        self._engine, self._num_kv_blocks = engine, executor.num_kv_blocks
        executor.close()

    @property
    def missing(self) -> list[str]:
        return list(TAGS)

    def wake(self, tags: list[str]) -> Executor | None:
        if not tags:
            return None
        require(
            set(tags) == set(TAGS),
            f"tags={tags!r}: an engine of several ranks wakes as a whole: wake_up() without tags",
        )
        same_pool = {"num_kv_blocks": self._num_kv_blocks, "kv_cache_memory_bytes": None}
        return self._engine.make_executor(replace(self._engine.config, **same_pool))

    def close(self) -> None:
        pass


def put_to_sleep(engine: GuardedEngine, level: int) -> None:
    """Raises `ValueError` while requests are unfinished, and for a level that cannot be had."""
    require(level in (1, 2) and level is not True, f"level={level!r} must be 1 or 2")
    require(
        not engine.has_unfinished_requests(),
        "requests are unfinished: step the engine or streams to the end before sleep()",
    )
    executor, guesses = engine.executor, engine.config.speculative_config
    if isinstance(executor, Asleep):
        _check_not_closed(engine, executor)
        if isinstance(executor.kept, _SleepingRunner):
            executor.kept.sleep(level)
            engine.refusal = executor.refusal
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
    is_runner = isinstance(executor, ModelRunner)
    kept = _SleepingRunner(executor, level) if is_runner else _DroppedRanks(engine, executor)
    engine.executor = asleep = Asleep(executor, kept)
    engine.refusal = asleep.refusal


def wake_up(engine: GuardedEngine, tags: Iterable[str] | None = None) -> None:
    """Wake the weights, the KV cache, or both (None); what is awake stays so.

    In any order. Raises `ValueError` for other tags, and for one alone of an engine of several
    ranks. If anything raises, what was woken before it stays awake, and the engine asleep.
    """
    wanted = list(TAGS) if tags is None else tags
    is_list = isinstance(wanted, (list, tuple, set, frozenset))
    require(
        is_list and all(tag in TAGS for tag in wanted),
        f"tags={tags!r} must be a list of {list(TAGS)}, or None for all",
    )
    asleep = engine.executor
    if not isinstance(asleep, Asleep):
        return
    _check_not_closed(engine, asleep)
    try:
        awake = asleep.kept.wake([tag for tag in TAGS if tag in wanted])
    finally:
        engine.refusal = asleep.refusal
    if awake is not None:
        engine.executor, engine.refusal = awake, None


def _check_not_closed(engine: GuardedEngine, asleep: Asleep) -> None:
    require(engine.refusal == asleep.refusal, f"this engine is {engine.refusal}")
