"""Checks the options of KV transfer, and adds its extensions to an engine."""

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.extension import PreparedFeature
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.kv_transfer.host_places import HostPlaces
from nanoserve.features.kv_transfer.host_tier import HostTier
from nanoserve.utils.checks import require
from nanoserve.worker.kv_cache import kv_block_bytes, num_host_places, physical_memory_bytes


def prepare_kv_transfer(config: EngineConfig, model_config: ModelConfig) -> PreparedFeature:
    """Return a feature that adds a `HostTier` with `kv_offloading_size` GiB to an engine.

    Raises `ValueError` for a size that holds no block, or that this machine does not have.
    """
    size, num_places = config.kv_offloading_size, num_host_places(config, model_config)
    block_bytes = kv_block_bytes(config, model_config)
    require(
        num_places > 0,
        f"kv_offloading_size={size} GiB holds no KV block, which takes {block_bytes} bytes",
    )
    available = physical_memory_bytes()
    require(
        num_places * block_bytes <= available,
        f"kv_offloading_size={size} GiB is more than this machine's memory, {available} bytes",
    )

    def add_to(engine: GuardedEngine) -> None:
        manager = engine.scheduler.block_manager
        places = HostPlaces(manager.prefix_cache, num_places)
        engine.add_extension(HostTier(manager, places))

    return PreparedFeature(add_to)
