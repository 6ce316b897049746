"""Replicas as an application of Ray Serve."""

import secrets
from functools import partial
from typing import Any

from ray import serve
from ray.serve import Application

from nanoserve.features.metrics import start_metrics
from nanoserve.serve.replicas.replica import Replica
from nanoserve.serve.replicas.settings import ReplicaSettings

_ROUTER = "nanoserve.serve.replicas.request_router:FleetRouter"
_NO_LIMIT = 100_000  # it is the ingress that refuses, by its max_queue
_DRAIN_SECONDS = 600  # that a replica which is stopped or replaced has for what it has begun


def replicas_app(
    model: str,
    options: dict[str, Any],
    settings: ReplicaSettings,
    resources: dict[str, float],
    model_name: str,
    metrics_prefix: str,
) -> Application:
    """Engines of `model` and `options`, as `LLM` takes them, with `resources` of Ray for each.

    They are restarted when they die or say that they are not well, replaced one after another when
    something of this has changed, and become more and fewer by the requests that are at them: all
    of that is Serve's doing. Their `prefix_cache_seed` is the same for all, and random unless the
    options have one.
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
    deployment = serve.deployment(
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
    """Of the arguments of `replicas_app`; two applications are alike if these are."""
    return repr(arguments)
