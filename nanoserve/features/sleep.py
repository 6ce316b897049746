"""Sleep mode releases the memory of an idle engine, and allocates it again on waking.

Level 1 keeps the weights in host memory and drops the KV cache. Level 2 drops both, and reads the
weights from the checkpoint again. Cached prefixes are evicted in either case. The KV cache has as
many blocks afterwards as before, so outputs are the same.

Weights and KV cache can be woken one after the other. Reinforcement learning does so: it restores
or replaces the weights (`nanoserve.features.weight_update`), and restores the KV cache after the
trainer has released its memory. The engine is suspended, i.e. rejects requests, until both are
restored.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from nanoserve.checkpoint.weight_files import Weights
from nanoserve.utils.checks import require
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.weight_exchange import WeightExchange

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine

TAGS = ("weights", "kv_cache")  # in the order in which they are woken


class _Asleep(Protocol):
    """The state of an executor while it sleeps."""

    @property
    def missing(self) -> list[str]:
        """The tags of the parts that have not been woken."""

    def sleep(self, level: int) -> None:
        """Drop the parts that have been woken since, and with level 2 the weights."""

    def wake(self, tags: list[str]) -> None:
        """Wake the parts that `tags` name."""

    def take_weights(self, source: Weights) -> None:
        """Replace the weights by those in `source`; if this raises, they stay as they were."""


class Sleeper:
    """Controls the sleep mode of one engine, and holds the state of the sleeping executor."""

    def __init__(self, engine: "GuardedEngine") -> None:
        self._engine = engine
        self._asleep: _Asleep | None = None  # None: the engine is awake

    def sleep(self, level: int) -> None:
        """Put the engine to sleep.

        Raises `ValueError` while requests are unfinished, and for an unsupported level.
        """
        engine = self._engine
        require(level in (1, 2) and level is not True, f"level={level!r} must be 1 or 2")
        require(
            not engine.has_unfinished_requests(),
            "sleep() needs an engine without requests; wait for unfinished requests or abort them",
        )
        self.check_refusal()
        if self._asleep is None:
            self._check_supported(level)
            engine.reset_prefix_cache()
            self._asleep = self._put_to_sleep(level)
        else:
            self._asleep.sleep(level)
        self._suspend_or_resume(self._asleep)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Wake the weights, the KV cache, or both (None); parts that are awake stay awake.

        The order of tags is free. Raises `ValueError` for unknown tags, and for a single tag if the
        engine has several ranks. If an error is raised, the parts woken before it stay awake, but
        the engine stays asleep.
        """
        wanted = list(TAGS) if tags is None else tags
        is_list = isinstance(wanted, (list, tuple, set, frozenset))
        require(
            is_list and all(tag in TAGS for tag in wanted),
            f"tags={tags!r} must be a list of {list(TAGS)}, or None for all",
        )
        asleep = self._asleep
        if asleep is None:
            return
        self.check_refusal()
        try:
            asleep.wake([tag for tag in TAGS if tag in wanted])
        finally:
            self._suspend_or_resume(asleep)

    @property
    def awake(self) -> list[str]:
        """The tags of the parts that are awake."""
        return [tag for tag in TAGS if self._asleep is None or tag not in self._asleep.missing]

    def wake_weights(self, source: Weights) -> None:
        """Wake a sleeping engine's weights, or replace those it has woken, by those in `source`.

        If this raises, nothing has changed. The engine stays asleep until `wake_up`, even if
        nothing is missing any more.
        """
        asleep = self._asleep
        if asleep is not None:
            asleep.take_weights(source)
            self._engine.suspend(_refusal(asleep))

    def drop(self) -> None:
        """Drop the weights and the KV cache, awake or not; the processes of several ranks end."""
        self._engine.loop.reset_prefix_cache()
        if self._asleep is None:
            self._asleep = self._put_to_sleep(2)
        else:
            self._asleep.sleep(2)
        self._engine.suspend(_refusal(self._asleep))

    def _note_reread(self) -> None:
        """Note that the weights in use are those of the checkpoint again."""
        loop = self._engine.loop
        if loop.weights_id:
            loop.begin_weights(0)

    def _suspend_or_resume(self, asleep: _Asleep) -> None:
        if asleep.missing:
            self._engine.suspend(_refusal(asleep))
        else:
            self._asleep = None
            self._engine.resume()

    def _put_to_sleep(self, level: int) -> _Asleep:
        executor = self._engine.executor
        if isinstance(executor, ModelRunner):
            return _SleepingRunner(executor, level, self._note_reread)
        return _DroppedRanks(self._engine, self._note_reread)

    def check_refusal(self) -> None:
        """Raise `ValueError` if the engine rejects requests for a reason other than sleep."""
        own = None if self._asleep is None else _refusal(self._asleep)
        refusal = self._engine.refusal
        require(refusal in (None, own), f"this engine is {refusal}")

    def check_drafts(self, what: str) -> None:
        """Raise `ValueError`, which names `what`, if the engine has a draft model."""
        drafts = self._engine.config.speculative_config
        require(
            drafts is None or drafts.method in ("ngram", "suffix"),
            f"speculative_config method {getattr(drafts, 'method', None)!r} is not supported by "
            f"{what}, because the weights of the draft model would stay in memory; use 'ngram' or "
            f"'suffix'",
        )

    def _check_supported(self, level: int) -> None:
        config = self._engine.config
        self.check_drafts("sleep()")
        require(
            level == 2 or isinstance(self._engine.executor, ModelRunner),
            f"level=1 supports only one rank (got tensor_parallel_size="
            f"{config.tensor_parallel_size}, pipeline_parallel_size="
            f"{config.pipeline_parallel_size}); use level=2",
        )


def _refusal(asleep: _Asleep) -> str:
    return f"asleep: wake_up() first; missing: {', '.join(asleep.missing)}"


class _SleepingRunner:
    """A runner without its KV cache. Its weights are in host memory, or dropped."""

    def __init__(self, runner: ModelRunner, level: int, note_reread: Callable[[], None]) -> None:
        self._runner, self._note_reread = runner, note_reread
        self._are_weights_awake = True
        self.sleep(level)

    def sleep(self, level: int) -> None:
        """Drop the parts that are awake; level 1 does not read weights that level 2 dropped."""
        self._runner.release_kv_caches()
        self._runner.release_weights(keeps_them=level == 1)
        self._are_weights_awake = False

    @property
    def missing(self) -> list[str]:
        is_there = {
            "weights": self._are_weights_awake,
            "kv_cache": self._runner.kv_caches is not None,
        }
        return [tag for tag in TAGS if not is_there[tag]]

    def wake(self, tags: list[str]) -> None:
        wanted = [tag for tag in self.missing if tag in tags]
        if "weights" in wanted:
            if self._runner.model is None:
                self._take(self._runner.path, WeightExchange(self._runner, self._runner.config))
                self._note_reread()
            else:
                self._runner.restore_weights()
            self._are_weights_awake = True
        if "kv_cache" in wanted:
            self._runner.restore_kv_caches()
        self._resume()

    def take_weights(self, source: Weights) -> None:
        self._take(source, WeightExchange(self._runner))
        self._are_weights_awake = True

    def _take(self, source: Weights, exchange: WeightExchange) -> None:
        exchange.load_weights(source)
        self._runner.use_model(exchange.take_model())
        exchange.drop_weights()  # what is left of the old ones

    def _resume(self) -> None:
        """Make the runner ready for steps if all parts are awake."""
        if self.missing:
            return
        try:
            self._runner.resume()
        except BaseException:
            self._runner.release_kv_caches()  # the engine stays asleep
            raise


class _DroppedRanks:
    """The state of level 2 with several ranks: all processes have ended, and waking starts them."""

    def __init__(self, engine: "GuardedEngine", note_reread: Callable[[], None]) -> None:
        self._engine, self._note_reread = engine, note_reread
        self._are_awake = False
        engine.executor.close()

    @property
    def missing(self) -> list[str]:
        return [] if self._are_awake else list(TAGS)

    def sleep(self, level: int) -> None:
        """Do nothing: all parts have been dropped."""

    def wake(self, tags: list[str]) -> None:
        if not tags:
            return
        require(
            set(tags) == set(TAGS),
            f"tags={tags!r} is not supported with several ranks, whose parts wake together; "
            f"call wake_up() without tags",
        )
        engine = self._engine
        same_pool: dict[str, Any] = {
            "num_kv_blocks": engine.executor.num_kv_blocks,
            "kv_cache_memory_bytes": None,
        }
        engine.replace_executor(engine.make_executor(replace(engine.config, **same_pool)))
        self._are_awake = True
        self._note_reread()

    def take_weights(self, source: Weights) -> None:
        raise ValueError(
            "several ranks wake as a whole, with the weights of the checkpoint; call wake_up(), "
            "and then update_weights()"
        )
