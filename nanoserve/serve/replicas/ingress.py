"""An HTTP server as a deployment of Ray Serve, for `serve run` and `serve deploy`.

    serve run nanoserve.serve.replicas.ingress:build model=tiny-qwen3 data_parallel_size=2

In a YAML file, `args` has the same arguments, and `deployments` may set other options of Serve for
`replicas` and `ingress`: `autoscaling_config`, `num_replicas`, `ray_actor_options` and so on.
Requests arrive through Serve's own HTTP proxies, which set the port, TLS and limits.
"""

import json
from dataclasses import fields
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.types import Receive, Scope, Send

from nanoserve.compat.options import engine_config
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.serve.replicas.app import replicas_app
from nanoserve.serve.replicas.fleet_llm import FleetLLM, FleetServer
from nanoserve.serve.replicas.settings import ReplicaSettings, resources_of
from nanoserve.utils.checks import require


class Forward:
    """An ASGI application that forwards to the server of its `Ingress`.

    The server is created in the deployment, whereas Serve needs an application at its definition.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # this application has nothing to start or stop
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        ingress: Any = serve.get_replica_context().servable_object
        await ingress.server.app(scope, receive, send)


@serve.ingress(Forward())
class Ingress:
    """A deployment with OpenAI-compatible endpoints for the replicas. There may be several."""

    def __init__(
        self, replicas: DeploymentHandle, settings: dict[str, Any], stream_interval: int
    ) -> None:
        self.server = FleetServer(FleetLLM(replicas, stream_interval), ServerSettings(**settings))

    async def check_health(self) -> None:
        """Raise if the fleet has ended. An ingress without replicas is healthy: requests wait."""
        await self.server.llm.check_health()

    def __del__(self) -> None:
        """Shut down; Serve calls this before it stops an ingress, so replicas can drop it."""
        if hasattr(self, "server"):
            self.server.llm.shutdown()


def build(args: dict[str, Any]) -> Application:
    """Return the Serve application of an ingress and its replicas.

    args: `model`, engine options, fields of `ReplicaSettings` and `ServerSettings`,
    `stream_interval`, and the Ray `resources` of each replica, such as
    {"num_cpus": 4, "num_gpus": 1}. By default, a replica gets one CPU, and with `device="cuda"` a
    GPU per rank. Strings, such as all arguments of `serve run`, are parsed as JSON if possible.

    Set `prefix_cache_seed`. Otherwise each deployment draws a random seed, which replaces all
    replicas, as any changed option does.
    """
    given = {name: _value(value) for name, value in args.items()}
    model = given.pop("model", "tiny-qwen3")
    require("ray_address" not in given, "ray_address is set by Serve's own cluster; remove it")
    replicas, server = (
        {field.name: given.pop(field.name) for field in fields(kind) if field.name in given}
        for kind in (ReplicaSettings, ServerSettings)
    )
    server.setdefault("served_model_name", [model])
    replica_settings, settings = ReplicaSettings(**replicas), ServerSettings(**server)
    stream_interval = given.pop("stream_interval", 1)
    resources, options = given.pop("resources", None), given
    config = engine_config(model, options)
    if resources is None:
        num_cores = replica_settings.num_replicas
        resources = resources_of(options, num_cores, num_cores, config.device == "cuda")
    engines = replicas_app(
        model,
        options,
        replica_settings,
        resources,
        settings.served_model_name[0],
        settings.metrics_prefix,
    )
    ingress: Any = serve.deployment(
        Ingress, name="ingress", max_ongoing_requests=settings.max_connections
    )
    return ingress.bind(engines, server, stream_interval)


def _value(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given
