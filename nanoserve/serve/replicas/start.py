"""Start and shut down the replicas of one server: Ray, Ray Serve and the application.

The ingress is the server's own process, with the same port, TLS, limits, signals and grace period
as without replicas. A token passes through one process less than with Serve's proxy. Serve's
router runs in this process as well. To run ingresses as Serve deployments, for example to have
several or to use a YAML file, use `nanoserve.serve.replicas.ingress:build`.
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
    message = f"replicas need Ray Serve ({error}): run pip install 'nanoserve[ray]'"
    raise ValueError(message) from error

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def start_server(
    model: str,
    options: dict[str, Any],
    replica_settings: ReplicaSettings,
    settings: ServerSettings,
    stream_interval: int,
) -> Iterator[FleetServer]:
    """Start replicas and yield their server; see `ApiServer` and `replicas` for the errors."""
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
    """Start replicas and yield their handle; stop them on exit.

    Replicas that already run on the cluster, for example after their server was killed, are
    reused. If an argument has changed, Serve replaces them one by one. Raises `ValueError`, as
    `LLM` does, for a model or options that cannot be served, and `RuntimeError` if no replica
    starts.
    """
    options, num_replicas = dict(options), settings.num_replicas
    if Path(model).exists():
        model = str(Path(model).resolve())  # a replica may have another working directory
    is_local = settings.ray_address is None
    config = engine_config(model, options)
    kv_events = (
        "kv_events_config needs a single engine, as replicas would share an address; remove it"
    )
    require(config.kv_events_config is None, kv_events)
    require(
        config.kv_offloading_path is None,
        "kv_offloading_path needs a single engine, as each needs a folder of its own; remove it",
    )
    connector = config.kv_connector
    require(
        connector is None or connector.kv_connector != "socket",
        "the KV connector 'socket' (--prefill-server) needs a single engine, as replicas would "
        "share kv_port; start a pair of servers for each, or remove it",
    )
    if is_local:  # otherwise the machines of the cluster must have the checkpoint
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
                logger.info("replicas of %s are already running", model_name)
                yield serve.get_app_handle(name)
            else:
                yield serve.run(replicas_app(*plan), name=name, route_prefix=None)
        finally:
            with contextlib.suppress(Exception):  # the cluster may have terminated
                serve.delete(name)


@contextlib.contextmanager
def _ray(settings: ReplicaSettings, num_cpus: float) -> Iterator[None]:
    """Start Ray and Serve here, or connect to a cluster, whose Ray and Serve keep running."""
    if settings.ray_address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Stop an unhealthy replica without a grace period: its successor needs the resources.
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
            message = f"ray_address={settings.ray_address!r}: {error}; if the cluster needs a token"
            raise ValueError(f"{message}, set RAY_AUTH_MODE=token") from error
    try:
        # Requests do not arrive through Serve's own proxies.
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        # Serve would log the failure of a replica once for each of its requests.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        yield
    finally:
        if settings.ray_address is None:
            with contextlib.suppress(Exception):
                serve.shutdown()
        ray.shutdown()


def _check_room(resources: dict[str, float], num_replicas: int) -> None:
    """Raise `ValueError` if Ray lacks resources, for which Serve would wait forever."""
    there = ray.cluster_resources()
    for name, wanted in (("CPU", resources["num_cpus"]), ("GPU", resources.get("num_gpus", 0))):
        has = there.get(name, 0)
        message = (
            f"data_parallel_size={num_replicas} replicas with {wanted:g} {name}s each need more "
            f"than the {has:g} that Ray has; use fewer replicas or more machines"
        )
        require(num_replicas * wanted <= has, message)


def _plan_of_what_runs(name: str) -> str | None:
    """Return the plan of the replicas that already run; None without replicas or an answer."""
    try:
        handle = serve.get_app_handle(name)
        return handle.plan.remote(Call(b"")).result(timeout_s=10)
    except Exception:
        return None
