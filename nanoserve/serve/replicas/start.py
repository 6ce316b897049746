"""Replicas for one server: Ray, Ray Serve and the application, begun and ended with it.

The ingress is the server's own process, as without replicas: the same port, TLS, limits, signals
and grace period, and a token passes one process less than it would behind Serve's proxy. Its router
is Serve's, in this process, too. Who wants the ingress to be one of Serve's deployments, with
several of them or a YAML file, uses `nanoserve.serve.replicas.ingress:build`.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.compat.options import engine_config
from nanoserve.models.registry import supported_architectures
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.serve.replicas.settings import ReplicaSettings, num_cores_here, resources_of
from nanoserve.utils.checks import require
from nanoserve.worker.build_executor import device_kind

try:
    import ray
    from ray import serve
    from ray.serve.handle import DeploymentHandle

    from nanoserve.serve.replicas.app import plan_of, replicas_app
    from nanoserve.serve.replicas.fleet_llm import FleetLLM, FleetServer
    from nanoserve.serve.replicas.messages import Call
except ModuleNotFoundError as error:
    raise ValueError(f"replicas need Ray Serve ({error}): pip install 'nanoserve[ray]'") from error

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def start_server(
    model: str,
    options: dict[str, Any],
    replica_settings: ReplicaSettings,
    settings: ServerSettings,
    stream_interval: int,
) -> Iterator[FleetServer]:
    """What `ApiServer` is, of replicas; for arguments and errors see there, and `replicas`."""
    names = settings.served_model_name or [model]
    settings = replace(settings, served_model_name=names)
    names_metrics = names[0], settings.metrics_prefix
    with replicas(model, options, replica_settings, *names_metrics) as handle:
        llm = FleetLLM(handle, stream_interval)
        try:
            yield FleetServer(llm, settings)
        finally:
            llm.shutdown()


@contextlib.contextmanager
def replicas(
    model: str | Path,
    options: dict[str, Any],
    settings: ReplicaSettings,
    model_name: str,
    metrics_prefix: str,
) -> Iterator[DeploymentHandle]:
    """A handle of replicas that are there.

    On a cluster where they run already, as after a server that was killed, they are taken over; if
    something has changed, Serve replaces them one after another. Raises `ValueError`, as `LLM`
    does, for what cannot be served, and `RuntimeError` if no replica comes up.
    """
    options, num_replicas = dict(options), settings.num_replicas
    if Path(model).exists():
        model = str(Path(model).resolve())  # a replica may run in another folder
    is_local = settings.ray_address is None
    config = engine_config(model, options)
    kv_events = "kv_events_config is for one engine: replicas would publish at one address"
    require(config.kv_events_config is None, kv_events)
    if is_local:  # else it is the cluster's machines that must have it
        checkpoint = Checkpoint.open(model, config, config.revision)
        checkpoint.model_config(config, supported_architectures())
        is_cuda, num_cores = device_kind(config.device) == "cuda", num_cores_here()
        resources = resources_of(options, num_replicas, num_cores, is_cuda)
    with _ray(settings, 0 if not is_local else num_replicas * resources["num_cpus"]):
        if not is_local:
            there = ray.cluster_resources()
            is_cuda = config.device != "cpu" and there.get("GPU", 0) > 0
            resources = resources_of(options, num_replicas, int(there["CPU"]), is_cuda)
        _check_room(resources, settings.data_parallel_size)
        what = str(model), options, replace(settings, ray_address=None), resources
        plan = *what, model_name, metrics_prefix
        name = re.sub(r"\W", "-", f"nanoserve-{model_name}")
        try:
            if _plan_of_what_runs(name) == plan_of(*plan):
                logger.info("replicas of %s run already", model_name)
                yield serve.get_app_handle(name)
            else:
                yield serve.run(replicas_app(*plan), name=name, route_prefix=None)
        finally:
            with contextlib.suppress(Exception):  # of a cluster that is gone nothing is left
                serve.delete(name)


@contextlib.contextmanager
def _ray(settings: ReplicaSettings, num_cpus: float) -> Iterator[None]:
    """Ray and Serve, here or in a cluster that is left as it was."""
    if settings.ray_address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A replica that does not answer has nothing to finish; it must make room for the next one.
        os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
        ray.init(
            address="local",
            num_cpus=max(int(num_cpus), num_cores_here()),
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
    else:
        try:
            ray.init(address=settings.ray_address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError) as error:
            told = f"ray_address={settings.ray_address!r}: {error}; if that cluster wants a token"
            raise ValueError(f"{told}, set RAY_AUTH_MODE=token") from error
    try:
        # Nothing comes by Serve's own proxies.
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        # What it says here of a replica that has died, it says for each request that was there.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        yield
    finally:
        if settings.ray_address is None:
            with contextlib.suppress(Exception):
                serve.shutdown()
        ray.shutdown()


def _check_room(resources: dict[str, float], num_replicas: int) -> None:
    """Raise `ValueError` where Serve would wait for ever."""
    there = ray.cluster_resources()
    for name, wanted in (("CPU", resources["num_cpus"]), ("GPU", resources.get("num_gpus", 0))):
        has = there.get(name, 0)
        told = (
            f"data_parallel_size={num_replicas} replicas of {wanted:g} {name}s are more than the "
            f"{has:g} that Ray has: fewer replicas, or more machines"
        )
        require(num_replicas * wanted <= has, told)


def _plan_of_what_runs(name: str) -> str | None:
    """Of replicas that are there already; None if there are none, or none that answers."""
    try:
        handle = serve.get_app_handle(name)
        return handle.plan.remote(Call(b"")).result(timeout_s=10)
    except Exception:
        return None
