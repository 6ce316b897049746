"""Adapters that clients use by name: as the `model` of their requests."""

import json
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI, Request, Response

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.lora_request import LoRARequest
from nanoserve.serve.http.body_reader import BodyReader
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import Body, Int
from nanoserve.serve.http.unknown_fields import UnknownNames
from nanoserve.utils.checks import require, shown

if TYPE_CHECKING:
    from nanoserve.engine.request import Request as EngineRequest

_MOST_NAMES = 10_000  # /v1/models lists all of them
_LONGEST_NAME = 256  # characters


class LoadAdapterBody(Body):
    """Request body of `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterBody(Body):
    """Request body of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: Int | None = None


class AdapterServer(Protocol):
    """The interface of a server that the endpoints use."""

    bodies: BodyReader

    async def prepare(self, make: Any, is_large: bool = False) -> Any: ...


class ServedAdapters:
    """The adapters of a server by their names, which are added to `names`, those of the model.

    root: the folder of adapters that clients may load; None: they may load none.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        names: list[str],
        modules: Iterable[str],
        root: str | None,
    ) -> None:
        """Check the adapters of `modules`, each `name=path` or a JSON object.

        Raises `ValueError` if one cannot be used, and for an engine without `enable_lora`.
        """
        self._configs, self.names, self._root = (config, model_config), names, root
        self._requests: dict[str, LoRARequest] = {}
        self._numbers = count(1)
        for option, value in (("lora_modules", list(modules)), ("lora_root", root)):
            is_enabled = config.enable_lora or not value
            require(is_enabled, f"{option}={shown(value)} needs enable_lora=True")
        for module in modules:
            name, path, base = parse_module(module)
            self._check_name(name)
            self._read(path, None)
            self._add(LoRARequest(name, next(self._numbers), path, base))

    def get(self, model: str | None) -> LoRARequest | None:
        """Return the adapter of that name; None for the model itself."""
        return None if model is None else self._requests.get(model)

    def give_to(self, requests: "Iterable[EngineRequest]", model: str | None) -> None:
        """Set the adapter of requests that are not queued yet.

        Raises `ApiError` if it was unloaded while they were tokenized: without it, the model itself
        would answer.
        """
        adapter = self.get(model)
        if model is not None and model not in self.names:
            raise ApiError(404, f"the model {model!r:.200} is unloaded", "model", "model_not_found")
        for request in requests if adapter is not None else ():
            request.use_lora(adapter)

    def about(self, name: str, base: dict[str, Any]) -> dict[str, Any]:
        """Return the entry of `/v1/models` for a name; base: that of the model itself."""
        adapter = self._requests.get(name)
        if adapter is None:
            return base
        parent = adapter.base_model_name or self.names[0]
        return {**base, "root": adapter.path, "parent": parent}

    def load(self, body: LoadAdapterBody) -> None:
        """Check an adapter, and serve it under its name. It reads files, so call it in a thread.

        Raises `ValueError` for one that cannot be used, and for a name that is in use, and
        `ApiError` if there is none, as vLLM does.
        """
        from nanoserve.features.lora.adapter_files import NoAdapterError

        if not body.load_inplace or body.lora_name not in self._requests:
            self._check_name(body.lora_name)
        request = LoRARequest(body.lora_name, next(self._numbers), body.lora_path)
        try:
            self._read(body.lora_path, self._root)
        except NoAdapterError as error:
            raise ApiError(404, str(error), "lora_path", "adapter_not_found") from None
        self._add(request)

    def unload(self, body: UnloadAdapterBody) -> None:
        """Serve an adapter no more; requests that have it run to their end.

        Raises `ApiError` for a name that is none of an adapter.
        """
        if body.lora_name not in self._requests:
            message = f"there is no adapter {body.lora_name!r:.200}"
            raise ApiError(404, message, "lora_name", "adapter_not_found")
        del self._requests[body.lora_name]
        self.names.remove(body.lora_name)

    def _check_name(self, name: str) -> None:
        require(name not in self.names, f"lora_name={shown(name)} is in use; unload it first")
        require(
            len(name) <= _LONGEST_NAME,
            f"lora_name has {len(name)} characters, more than {_LONGEST_NAME}",
        )
        require(
            len(self._requests) < _MOST_NAMES,
            f"{len(self._requests)} adapters have a name, which is the most; unload one first",
        )

    def _read(self, path: str, root: str | None) -> None:
        from nanoserve.features.lora.prepare import check_adapter

        check_adapter(*self._configs, path, root)

    def _add(self, request: LoRARequest) -> None:
        # In this order: a name that is served without its adapter would be the model itself.
        self._requests[request.lora_name] = request
        if request.lora_name not in self.names:
            self.names.append(request.lora_name)


def parse_module(module: str) -> tuple[str, str, str | None]:
    """Return name, path and base model of an adapter: "name=path", or vLLM's JSON object."""
    if module.lstrip().startswith("{"):
        try:
            given = json.loads(module)
        except ValueError as error:
            raise ValueError(f"lora_modules: {shown(module)} is not JSON: {error}") from None
        known = {"name", "path", "base_model_name"}
        is_right = given.keys() <= known and all(isinstance(one, str) for one in given.values())
        if is_right and {"name", "path"} <= given.keys():
            return given["name"], given["path"], given.get("base_model_name")
    name, sign, path = module.partition("=")
    is_pair = bool(name and sign and path) and not module.lstrip().startswith("{")
    rule = 'must be name=path, or {"name": ..., "path": ..., "base_model_name": ...}'
    require(is_pair, f"lora_modules: {shown(module)} {rule}")
    return name, path, None


class AdapterEndpoints:
    """The endpoints by which clients load and unload adapters."""

    def __init__(self, api: AdapterServer, adapters: ServedAdapters) -> None:
        self._api, self._adapters = api, adapters

    async def load(self, request: Request) -> Response:
        """Serve an adapter in `lora_root` under a name; `load_inplace` replaces one."""
        body = await self._api.bodies.read(request, LoadAdapterBody, _check_fields)
        # Not in the thread of short prompts: reading an adapter may take seconds.
        await self._api.prepare(partial(self._adapters.load, body), is_large=True)
        return _success(body.lora_name, "added")

    async def unload(self, request: Request) -> Response:
        """Serve an adapter no more."""
        body = await self._api.bodies.read(request, UnloadAdapterBody, _check_fields)
        self._adapters.unload(body)
        return _success(body.lora_name, "removed")


def add_adapters(app: FastAPI, api: AdapterServer, adapters: ServedAdapters) -> None:
    """Add the endpoints."""
    own = AdapterEndpoints(api, adapters)
    for path, endpoint in (
        ("/v1/load_lora_adapter", own.load),
        ("/v1/unload_lora_adapter", own.unload),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)


def _check_fields(body: Body, unknown: UnknownNames, template: str) -> None:
    """Raise `ApiError` for unknown fields."""
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            message = f"{name!r:.100} is not a field of this endpoint"
            raise ApiError(400, message, name[:100], "unknown_field")


def _success(name: str, what: str) -> Response:
    return Response(f"Success: LoRA adapter {name!r} {what} successfully.", media_type="text/plain")
