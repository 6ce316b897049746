"""Replace the weights of a running engine, as reinforcement learning does after each of its steps.

The new weights take the way of the first ones: the strict loader reads each rank's part of them,
quantizes it if the engine does, and fills a model that is built next to the old one. Then the
runner changes from the one to the other. So a source with an error leaves the engine as it was, and
the engine answers as one that was created with these weights, bit for bit.

K and V of the old weights cannot be reused by later requests, because the number of the weights is
a part of the prefix cache's keys (`nanoserve.engine.prefix_cache.root_key`).
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanoserve.checkpoint.checkpoint import Checkpoint, local_checkpoint
from nanoserve.checkpoint.formats.fields import method_of
from nanoserve.checkpoint.state_dict import StateDict, named_tensors, write_files
from nanoserve.checkpoint.weight_files import Weights
from nanoserve.features.sleep import TAGS, Sleeper
from nanoserve.models.registry import supported_architectures, weight_bytes
from nanoserve.utils.checks import is_int, require, shown
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.weight_exchange import TakesWeights, WeightExchange

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine

# All tensors of a checkpoint by name, or the path of a checkpoint.
Source = (
    str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | torch.nn.Module
)
MODES = (None, "abort", "keep", "wait")
# The engine keeps its data type, and the settings of requests.
_MAY_DIFFER = ("dtype", "eos_token_ids", "default_sampling", "multimodal_architecture")
_SHARED_MEMORY = "/dev/shm"


class WeightUpdater:
    """Replaces the weights of one engine, which `sleeper` may have put to sleep."""

    def __init__(self, engine: "GuardedEngine", sleeper: Sleeper) -> None:
        self._engine, self._sleeper = engine, sleeper

    def update(
        self,
        source: Source,
        *,
        mode: str | None = None,
        version: int | str | None = None,
        keep_old: bool = True,
    ) -> int | str:
        """Replace the weights, and return their version; see `LLM.update_weights`."""
        engine = self._engine
        require(mode in MODES, f"mode={shown(mode)} must be one of {', '.join(map(repr, MODES))}")
        require(
            version is None or is_int(version) or isinstance(version, str),
            f"version={shown(version)} must be an integer, a string or None",
        )
        require(isinstance(keep_old, bool), f"keep_old={shown(keep_old)} must be True or False")
        require(
            keep_old or mode != "keep",
            "mode='keep' needs keep_old=True: without weights no request can go on",
        )
        if engine.is_stepping:
            raise RuntimeError("the weights cannot be replaced inside a step: wait for its end")
        has_one_rank = isinstance(engine.executor, ModelRunner)
        if not keep_old and not has_one_rank:
            self._sleeper.check_drafts("keep_old=False with several ranks")
        self._sleeper.check_refusal()
        awake = self._sleeper.awake
        # The source is read before the engine is locked: an iterator may take long.
        with self._opened(source, in_memory=has_one_rank) as weights:
            if mode == "wait":
                require(
                    not engine.pause.is_on,
                    "mode='wait' would wait for ever during a pause; call resume_generation() "
                    "first, or choose mode='keep'",
                )
                while engine.scheduler.has_unfinished():
                    engine.step(fetch=False)
            number = int(version) if is_int(version) else version
            engine.change_weights(partial(self._change, weights, mode, keep_old), number)
        # The weights and their version have changed; an error from here on leaves it asleep.
        self._sleeper.wake_up(awake)
        return engine.weights_version

    def _change(self, weights: Weights, mode: str | None, keep_old: bool) -> None:
        """Replace the weights; no step is in flight."""
        engine = self._engine
        num_unfinished = len(engine.output_processor.requests)
        require(
            num_unfinished == 0 or mode in ("abort", "keep"),
            f"{num_unfinished} requests are unfinished; finish or abort them, or choose "
            f"mode='wait', 'abort' or 'keep'",
        )
        # An error of the source comes before anything has changed, and before any abort.
        exchange = self._exchange()
        if not keep_old and isinstance(engine.executor, ModelRunner):
            exchange.check_weights(weights)
            self._abort(mode)
            self._sleeper.drop()
        if self._sleeper.awake != [*TAGS]:
            self._sleeper.wake_weights(weights)
            return
        if not keep_old:
            exchange.check_weights(weights)
            self._abort(mode)
            self._replace_on_ranks(exchange, weights)
            return
        exchange.load_weights(weights)
        self._abort(mode)
        exchange.use_weights()

    def _exchange(self) -> TakesWeights:
        executor: Any = self._engine.executor
        return WeightExchange(executor) if isinstance(executor, ModelRunner) else executor

    def _replace_on_ranks(self, exchange: TakesWeights, weights: Weights) -> None:
        """Drop the old weights of several ranks, and load others; on an error, put all to sleep."""
        self._engine.loop.reset_prefix_cache()
        try:
            exchange.replace_weights(weights)
            exchange.use_weights()
        except BaseException:
            self._sleeper.drop()  # some ranks may have no weights: their processes end
            raise

    def _abort(self, mode: str | None) -> None:
        """Abort all requests if `mode` says so; the next step returns their outputs."""
        loop = self._engine.loop
        for request_id in list(loop.output_processor.requests) if mode == "abort" else ():
            output = loop.abort(request_id)
            if output is not None:
                loop.outputs.put([output])

    def _check_model(self, folder: Path) -> None:
        """Raise `ValueError` if `folder` has the config of another model.

        Shapes do not show all of it: models may differ in their RoPE only.
        """
        config, own = self._engine.config, self._engine.model_config
        if folder.is_dir() and not (folder / "config.json").is_file():
            return
        found = Checkpoint(folder, folder).model_config(config, supported_architectures())
        differing = [
            field.name
            for field in fields(own)
            if field.name not in _MAY_DIFFER
            and getattr(found, field.name) != getattr(own, field.name)
        ]
        names = ", ".join(differing)
        require(
            not differing, f"{folder} has another model: {names} differs; create another engine"
        )

    @contextmanager
    def _opened(self, source: Source, in_memory: bool) -> Iterator[Weights]:
        """Provide what a loader reads: a folder, or for a single rank a state dictionary."""
        engine = self._engine
        if isinstance(source, (str, os.PathLike)):
            name = os.fspath(source)
            folder = local_checkpoint(name) if isinstance(name, str) else None
            if folder is None:
                raise ValueError(f"source={shown(source)} is neither a folder nor a GGUF file")
            self._check_model(folder)
            yield folder
        else:
            quantized = engine.model_config.quantization_config
            require(
                quantized is None,
                f"the checkpoint of this engine is quantized ({method_of(quantized or {})}), which "
                f"{type(source).__name__} is not; pass a folder or a file of the same format",
            )
            if in_memory:
                yield StateDict(named_tensors(source))
                return
            # In float32, even if the model has 16 bits.
            most_bytes = 2 * weight_bytes(engine.model_config)
            with _temporary_folder(most_bytes) as folder:
                write_files(named_tensors(source), folder)
                yield folder


@contextmanager
def _temporary_folder(num_bytes: int) -> Iterator[Path]:
    """Provide a folder that other processes of this user can read, in memory if it has room."""
    place = None
    if os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free > num_bytes:
        place = _SHARED_MEMORY
    with tempfile.TemporaryDirectory(prefix="nanoserve-", dir=place) as folder:
        yield Path(folder)
