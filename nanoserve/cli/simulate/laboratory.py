"""Load a scheduler class or an extension from a reader's own file, to be compared in simulation."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from nanoserve.engine.extension import Extension
from nanoserve.engine.scheduler import Scheduler
from nanoserve.utils.checks import require


def load_policy(location: str) -> type[Scheduler]:
    """Return the subclass of `Scheduler` at "FILE.py:Class" or "module:Class"."""
    return _load(location, Scheduler)


def load_extension(location: str) -> Any:
    """Return the subclass of `Extension` at a location; it is constructed with the engine."""
    return _load(location, Extension)


def _load(location: str, base: type) -> Any:
    """Return a class. Raises `ValueError` if it is not there, or not a subclass of `base`."""
    place, _, name = location.rpartition(":")
    require(
        bool(place and name),
        f"{location!r} must be FILE.py:Class or module:Class, such as policies.py:ShortestFirst",
    )
    module = _module(place, location)
    found = getattr(module, name, None)
    classes = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    ]
    require(
        isinstance(found, type) and issubclass(found, base) and found is not base,
        f"{location!r} is not a subclass of {base.__name__}; {place} has {classes or 'none'}",
    )
    return found


def _module(place: str, location: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return import_module(place)
        except ImportError as error:
            raise ValueError(f"{location!r} cannot be imported: {error}") from error
    path = Path(place)
    require(path.is_file(), f"{location!r}: there is no file {path}")
    name = f"nanoserve_laboratory_{path.stem}"
    spec = spec_from_file_location(name, path)
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module
