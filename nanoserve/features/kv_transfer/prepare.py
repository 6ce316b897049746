"""Checks the options of KV transfer, and adds its extensions to an engine."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.extension import PreparedFeature
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.features.kv_transfer.block_keys import BlockKeys
from nanoserve.features.kv_transfer.calls import ConnectorCalls
from nanoserve.features.kv_transfer.config import KVTransferConfig
from nanoserve.features.kv_transfer.connector import KV_CONNECTORS, ConnectorContext
from nanoserve.features.kv_transfer.fingerprint import fingerprint
from nanoserve.features.kv_transfer.host_places import HostPlaces
from nanoserve.features.kv_transfer.host_tier import HostTier
from nanoserve.features.kv_transfer.loads import ConnectorLoads
from nanoserve.features.kv_transfer.staging import Staging
from nanoserve.features.kv_transfer.stores import ConnectorStores
from nanoserve.utils.checks import check_number, require
from nanoserve.utils.registry import import_location
from nanoserve.worker.host_pool import num_host_places, num_staging_places
from nanoserve.worker.kv_cache import kv_block_bytes, physical_memory_bytes
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.worker_functions import call_function

_LOAD_TIMEOUT = 10.0  # seconds, for a connector that has no `load_timeout` of its own
_COPY_TO_HOST = "nanoserve.worker.worker_functions:copy_to_host"


def prepare_host_tier(config: EngineConfig, model_config: ModelConfig) -> PreparedFeature:
    """Return a feature that adds a `HostTier` with `kv_offloading_size` GiB to an engine.

    Raises `ValueError` for a size that holds no block, or that this machine does not have.
    """
    num_places = num_host_places(config, model_config)
    name = f"kv_offloading_size={config.kv_offloading_size} GiB"
    _check_size(name, num_places, kv_block_bytes(config, model_config))

    def add_to(engine: GuardedEngine) -> None:
        manager = engine.scheduler.block_manager
        engine.add_extension(HostTier(manager, HostPlaces(manager.prefix_cache, num_places)))

    return PreparedFeature(add_to)


def prepare_connector(config: EngineConfig, model_config: ModelConfig) -> PreparedFeature:
    """Return a feature that adds a KV connector to an engine.

    Raises `ValueError` for an unknown connector or options that it rejects, for a buffer that holds
    no block, and with pipeline stages or ranks on several machines.
    """
    options = config.kv_connector
    num_places = num_staging_places(config, model_config)
    block_bytes = kv_block_bytes(config, model_config)
    _check_size(f"kv_buffer_size={options.kv_buffer_size:.0f} bytes", num_places, block_bytes)
    num_stages, backend = config.pipeline_parallel_size, config.distributed_executor_backend
    require(
        num_stages == 1 and backend != "ray",
        f"a KV connector supports tensor-parallel ranks on one machine (got "
        f"pipeline_parallel_size={num_stages}, distributed_executor_backend={backend!r}); "
        f"kv_offloading_size supports others, too",
    )
    extra = dict(options.kv_connector_extra_config)
    make = _connector(options)
    usual = getattr(make, "load_timeout", _LOAD_TIMEOUT)
    timeout = check_number("load_timeout", extra.pop("load_timeout", usual), 0)
    transfer = replace(options, kv_connector_extra_config=extra)
    if hasattr(make, "check"):
        make.check(transfer, block_bytes)

    def add_to(engine: GuardedEngine) -> None:
        manager, runner = engine.scheduler.block_manager, _rank_0(engine)
        pool, own = runner.host_pool, fingerprint(config, model_config, runner.path)
        num_groups = len(manager.windows)
        tiers = [each for each in engine.extensions if isinstance(each, HostTier)]
        connector = make(
            ConnectorContext(
                transfer, pool.place_bytes, manager.block_size, num_groups, own, timeout
            )
        )
        staging = Staging(pool.num_places - num_places, num_places, lambda: _memory(engine))
        keys = BlockKeys(own, manager.block_size, num_groups)
        places = tiers[0].places if tiers else None
        calls = ConnectorCalls(connector, engine.clock)

        # The fingerprint is that of the weights with which the engine has started. Others, or the
        # same ones read again, whose files may have changed, are another model object.
        fingerprinted = weakref.ref(runner.model)

        def may(part: bool) -> Callable[[], bool]:
            return lambda: part and _rank_0(engine).model is fingerprinted()

        may_load, may_store = may(options.loads), may(options.stores)
        engine.add_extension(
            ConnectorLoads(engine, calls, keys, staging, places, timeout, may_load)
        )
        engine.add_extension(
            ConnectorStores(
                engine.scheduler, calls, keys, staging, may_store, partial(_copy_to_host, engine)
            )
        )

    return PreparedFeature(add_to)


def _rank_0(engine: GuardedEngine) -> ModelRunner:
    """Return the runner of rank 0; with several ranks, `sleep` and `wake_up` replace it."""
    executor: Any = engine.executor
    return executor if isinstance(executor, ModelRunner) else executor.runner


def _memory(engine: GuardedEngine) -> np.ndarray:
    return _rank_0(engine).host_pool.memory.numpy()


def _copy_to_host(engine: GuardedEngine, transfers: KVTransfers) -> None:
    """Copy blocks to places on all ranks, and wait for it; no step is under way."""
    executor: Any = engine.executor
    order = json.dumps([_COPY_TO_HOST, [transfers.to_host], {}]).encode()
    if isinstance(executor, ModelRunner):
        answers = {0: call_function(order, executor)}
    else:
        answers = executor.call_function(order, timeout=None)
    errors = [answer["error"] for answer in answers.values() if "error" in answer]
    if errors:
        raise RuntimeError(f"KV blocks could not be copied to the host: {errors[0]}")


def _check_size(name: str, num_places: int, block_bytes: int) -> None:
    require(num_places > 0, f"{name} holds no KV block, which takes {block_bytes} bytes")
    available = physical_memory_bytes()
    require(
        num_places * block_bytes <= available,
        f"{name} is more than this machine's memory, {available} bytes",
    )


def _connector(options: KVTransferConfig) -> Any:
    """Return the connector's class; raises `ValueError` for an unknown one."""
    name, module = options.kv_connector, options.kv_connector_module_path
    if module is None:
        return KV_CONNECTORS.get(name)
    try:
        return import_location(f"{module}:{name}")
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"kv_connector={name!r} is not in kv_connector_module_path={module!r}: {error}"
        ) from error
