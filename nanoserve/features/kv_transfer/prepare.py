"""Checks the options of KV transfer, and adds its extensions to an engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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

_LOAD_TIMEOUT = 10.0  # seconds, for a connector that has no `load_timeout` of its own


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
    no block, and with several ranks.
    """
    options = config.kv_connector
    num_places = num_staging_places(config, model_config)
    block_bytes = kv_block_bytes(config, model_config)
    _check_size(f"kv_buffer_size={options.kv_buffer_size:.0f} bytes", num_places, block_bytes)
    require(
        config.tensor_parallel_size * config.pipeline_parallel_size == 1,
        f"a KV connector supports one rank (got tensor_parallel_size="
        f"{config.tensor_parallel_size}, pipeline_parallel_size={config.pipeline_parallel_size}); "
        f"kv_offloading_size supports several",
    )
    extra = dict(options.kv_connector_extra_config)
    make = _connector(options)
    usual = getattr(make, "load_timeout", _LOAD_TIMEOUT)
    timeout = check_number("load_timeout", extra.pop("load_timeout", usual), 0)
    transfer = replace(options, kv_connector_extra_config=extra)
    if hasattr(make, "check"):
        make.check(transfer, block_bytes)

    def add_to(engine: GuardedEngine) -> None:
        runner: Any = engine.executor  # of one rank: a `ModelRunner`
        manager, pool = engine.scheduler.block_manager, runner.host_pool
        own = fingerprint(config, model_config, runner.path)
        num_groups = len(manager.windows)
        tiers = [each for each in engine.extensions if isinstance(each, HostTier)]
        connector = make(
            ConnectorContext(
                transfer, pool.place_bytes, manager.block_size, num_groups, own, timeout
            )
        )
        staging = Staging(pool.num_places - num_places, num_places, lambda: pool.memory.numpy())
        keys = BlockKeys(own, manager.block_size, num_groups)
        places = tiers[0].places if tiers else None
        calls = ConnectorCalls(connector, engine.clock)

        def may(part: bool) -> Callable[[], bool]:
            # The fingerprint is that of the weights with which the engine has started.
            return lambda: part and not engine.loop.weights_id

        def copy_now(transfers: KVTransfers) -> None:
            with runner.device.guard():
                pool.copy(runner.kv_caches, transfers)
                runner.device.finish()

        may_load, may_store = may(options.loads), may(options.stores)
        engine.add_extension(
            ConnectorLoads(engine, calls, keys, staging, places, timeout, may_load)
        )
        engine.add_extension(
            ConnectorStores(engine.scheduler, calls, keys, staging, may_store, copy_now)
        )

    return PreparedFeature(add_to)


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
