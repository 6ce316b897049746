"""Exchange the weights of one rank in two phases: load them, then use them or drop them.

The model with the new weights is built next to the old one by the loader that also built the old
one, because weights in other layouts, or in fewer bits, cannot be overwritten in place. Between the
phases all ranks agree: they change to the new weights together, or not at all.
"""

from dataclasses import replace
from typing import Protocol

from torch import nn

from nanoserve.checkpoint.weight_files import Weights
from nanoserve.config import EngineConfig
from nanoserve.kernels.cpu.memory import give_back_freed
from nanoserve.utils.checks import require
from nanoserve.worker.load_model import check_source, load_model, second_model_memory
from nanoserve.worker.model_runner import ModelRunner


class TakesWeights(Protocol):
    """The interface of a `WeightExchange`, and of executors of several ranks.

    No step may be in flight.
    """

    def check_weights(self, source: Weights) -> None:
        """Raise an error unless the names, shapes and types in `source` fit. Changes nothing."""

    def load_weights(self, source: Weights) -> None:
        """Load other weights beside those in use. If this raises, they have been dropped."""

    def replace_weights(self, source: Weights) -> None:
        """Drop the weights in use and the KV cache, and load other weights in their place.

        If this raises, no step can run any more.
        """

    def use_weights(self) -> None:
        """Use the loaded weights from now on, and release the old ones."""


class WeightExchange:
    """Exchanges the weights of one runner.

    config: determines the format of the weights; by default they are read even if the runner's
    first ones were random.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig | None = None) -> None:
        self._runner = runner
        self._next: nn.Module | None = None
        self._config = config or replace(runner.config, load_format="auto")

    def check_weights(self, source: Weights) -> None:
        """Raise `ValueError` unless the runner's model can be filled from `source`."""
        runner = self._runner
        memory_bytes = runner.device.memory_bytes(runner.context.parallel)
        check_source(self._config, runner.model_config, source, runner.context, memory_bytes)

    def load_weights(self, source: Weights) -> None:
        """Build another model with the weights in `source`; the runner does not use it yet.

        Raises `ValueError` if `source` does not fit, or if memory cannot hold two models.
        """
        runner, self._next = self._runner, None
        memory_bytes = runner.device.memory_bytes(runner.context.parallel)
        if runner.model is not None:
            self._check_room(memory_bytes)
        with runner.device.guard():
            self._next = load_model(
                self._config,
                runner.model_config,
                source,
                runner.context,
                runner.max_model_len,
                memory_bytes,
                shows_progress=False,
            )

    def replace_weights(self, source: Weights) -> None:
        """Drop the runner's model and KV cache, and build a model with the weights in `source`."""
        self._runner.release_kv_caches()
        self._runner.release_weights(keeps_them=False)
        self.load_weights(source)

    def use_weights(self) -> None:
        """Let the runner compute with the loaded model, and release the old one.

        If the device cannot be prepared for the new model, the runner goes on with the old one,
        unless `replace_weights` has dropped it.
        """
        runner, old = self._runner, self._runner.model
        if old is None:
            runner.use_model(self.take_model())
            runner.restore_kv_caches()
            runner.resume()
            self.drop_weights()
            return
        with runner.device.guard():
            runner.device.finish()
        try:
            runner.use_model(self.take_model())
            runner.resume()
        except BaseException:
            runner.use_model(old)
            runner.resume()
            raise
        del old
        self.drop_weights()

    def take_model(self) -> nn.Module:
        """Return the loaded model, for a runner that is asleep."""
        model, self._next = self._next, None
        if model is None:
            raise RuntimeError("load_weights() comes before take_model() and use_weights()")
        return model

    def drop_weights(self) -> None:
        """Release the loaded model, if there is one, and memory that nothing uses any more."""
        self._next = None
        with self._runner.device.guard():
            self._runner.device.release_unused()
        give_back_freed()

    def _check_room(self, memory_bytes: int) -> None:
        runner = self._runner
        weights, _ = second_model_memory(self._config, runner.model_config, runner.context)
        pool = 0
        if runner.kv_caches is not None:
            pool = (runner.num_kv_blocks + 1) * runner.kv_cache_layout.block_bytes
            pool += runner.kv_cache_layout.states.num_bytes
        require(
            2 * weights + pool <= memory_bytes,
            f"two models of {weights} bytes and a KV cache of {pool} bytes do not fit into the "
            f"{memory_bytes} bytes of memory of a rank; use keep_old=False, or a smaller KV cache",
        )
