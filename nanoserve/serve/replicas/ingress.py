"""The server as a deployment of Ray Serve, for `serve run` and `serve deploy`.

    serve run nanoserve.serve.replicas.ingress:build model=tiny-qwen3 data_parallel_size=2

In a YAML file, `args` are the same, and `deployments` may say of `replicas` and `ingress` what else
Serve knows: `autoscaling_config`, `num_replicas`, `ray_actor_options`, and so on. Requests come by
Serve's own HTTP proxies, which have its port, TLS and limits.
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
    """An ASGI application that is made with its deployment, and not where that is defined."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # of this one, which has nothing to begin or to end
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        ingress = serve.get_replica_context().servable_object
        await ingress.server.app(scope, receive, send)


@serve.ingress(Forward())
class Ingress:
    """OpenAI's protocol in front of the replicas. There may be several of it."""

    def __init__(
        self, replicas: DeploymentHandle, settings: dict[str, Any], stream_interval: int
    ) -> None:
        self.server = FleetServer(FleetLLM(replicas, stream_interval), ServerSettings(**settings))

    async def check_health(self) -> None:
        """Without replicas it is well: requests wait for them."""
        await self.server.llm.check_health()

    def __del__(self) -> None:
        """Serve calls this before it stops one; the replicas need not wait for it any more."""
        if hasattr(self, "server"):
            self.server.llm.shutdown()


def build(args: dict[str, Any]) -> Application:
    """The application of `model`, options of the engine, and fields of `ReplicaSettings` and
    `ServerSettings`, with `stream_interval` and the `resources` of each replica, as
    {"num_cpus": 4, "num_gpus": 1}; without those, a CPU each and a GPU for each rank of a model
    with `device="cuda"`.

    Values that are texts, as all of `serve run` are, are read as JSON if they can be.
    `prefix_cache_seed` should be given: it is random otherwise, in each deployment another one, and
    replicas are replaced whenever one of their options has changed.
    """
    given = {name: _value(value) for name, value in args.items()}
    model = given.pop("model", "tiny-qwen3")
    require("ray_address" not in given, "ray_address is where Serve runs already: leave it out")
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
    ingress = serve.deployment(
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
