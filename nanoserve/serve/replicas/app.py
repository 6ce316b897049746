"""The Ray Serve application of the replicas."""

import secrets
from functools import partial
from typing import Any

from ray import serve
from ray.serve import Application

from nanoserve.features.metrics import start_metrics
from nanoserve.serve.replicas.replica import Replica
from nanoserve.serve.replicas.settings import ReplicaSettings

_ROUTER = "nanoserve.serve.replicas.request_router:FleetRouter"
_NO_LIMIT = 100_000  # the ingress limits requests, by its max_queue
_DRAIN_SECONDS = 600  # that a stopped or replaced replica has for its running requests


def replicas_app(
    model: str,
    options: dict[str, Any],
    settings: ReplicaSettings,
    resources: dict[str, float],
    model_name: str,
    metrics_prefix: str,
) -> Application:
    """Return the application of replicas of an engine, each with the given Ray `resources`.

    model, options: as for `LLM`.

    Serve restarts replicas that fail or report that they are unhealthy, replaces them one by one
    when an argument has changed, and scales their number with the number of ongoing requests. All
    replicas have the same `prefix_cache_seed`, which is random unless it is set in `options`.
    """
    scaling: dict[str, Any] = {"num_replicas": settings.data_parallel_size}
    if settings.max_data_parallel_size is not None:
        scaling = {
            "autoscaling_config": {
                "min_replicas": settings.data_parallel_size,
                "max_replicas": settings.max_data_parallel_size,
                "target_ongoing_requests": settings.target_ongoing_requests,
            }
        }
    deployment: Any = serve.deployment(
        Replica,
        name="replicas",
        max_ongoing_requests=_NO_LIMIT,
        ray_actor_options=resources,
        health_check_period_s=1,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=_DRAIN_SECONDS,
        request_router_config={"request_router_class": _ROUTER},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **scaling,
    )
    measure = partial(start_metrics, model_name, metrics_prefix)
    plan = plan_of(model, options, settings, resources, model_name, metrics_prefix)
    options = {"prefix_cache_seed": secrets.randbits(63)} | options
    return deployment.bind(model, options, measure, settings.router == "exact", plan)


def plan_of(*arguments: Any) -> str:
    """Return a description of the arguments of `replicas_app`, equal for equal applications."""
    return repr(arguments)
