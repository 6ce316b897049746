"""Selects the scheduler class from the option `scheduler_cls`."""

from importlib import import_module
from typing import Any

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import Executor
from nanoserve.engine.extension import Extension
from nanoserve.engine.kv_groups import kv_cache_groups
from nanoserve.engine.scheduler import Scheduler


def make_scheduler(
    config: EngineConfig,
    model_config: ModelConfig,
    executor: Executor,
    extensions: list[Extension],
) -> Scheduler:
    """Create the scheduler of an engine; `extensions` is the engine's list, which may grow."""
    return load_scheduler_class(config.scheduler_cls)(
        config,
        executor.num_kv_blocks,
        executor.max_model_len,
        extensions,
        [group.window for group in kv_cache_groups(config, model_config)],
    )


def load_scheduler_class(scheduler_cls: "type[Scheduler] | str | None") -> type[Scheduler]:
    """Return the class that the option `scheduler_cls` names.

    It is a subclass of `Scheduler`, or its "module.Class". Raises `ValueError` for anything else.
    """
    found: Any = Scheduler if scheduler_cls is None else scheduler_cls
    if isinstance(found, str):
        module, _, name = found.replace(":", ".").rpartition(".")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"scheduler_cls={scheduler_cls!r} cannot be imported: {error}"
            ) from error
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise ValueError(
            f"scheduler_cls={scheduler_cls!r} must be a subclass of "
            f"nanoserve.engine.scheduler.Scheduler, or its 'module.Class'"
        )
    return found
