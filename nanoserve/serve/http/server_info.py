"""The options of a running server, for `/server_info`."""

from dataclasses import fields, is_dataclass
from os import PathLike
from typing import Any

from nanoserve import __version__
from nanoserve.config import EngineConfig
from nanoserve.serve.http.settings import ServerSettings

_SECRETS = ("api_key",)


def server_info(config: EngineConfig, settings: ServerSettings) -> dict[str, Any]:
    """Return the version and all options as JSON; of API keys, only their number."""
    server = {name: value for name, value in _as_json(settings).items() if name not in _SECRETS}
    numbers = {f"num_{name}s": len(getattr(settings, name)) for name in _SECRETS}
    return {"version": __version__, "config": _as_json(config), "server": server | numbers}


def _as_json(value: Any) -> Any:
    """Return dataclasses as objects, and what JSON cannot hold (a function) as a string."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(name): _as_json(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value) if isinstance(value, PathLike) else repr(value)
