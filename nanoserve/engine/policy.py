"""The scheduler that an engine has, by the option `scheduler_cls`."""

from importlib import import_module
from typing import Any

from nanoserve.engine.scheduler import Scheduler


def load_scheduler_class(scheduler_cls: "type[Scheduler] | str | None") -> type[Scheduler]:
    """Return the class that the option `scheduler_cls` names: a subclass of `Scheduler`, or its
    "module.Class". Raises `ValueError` for anything else."""
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
