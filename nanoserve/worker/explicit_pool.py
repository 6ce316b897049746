"""A KV pool of the size that the user has fixed."""

from nanoserve.config import EngineConfig


def explicit_num_kv_blocks(config: EngineConfig, block_bytes: int, memory_bytes: int) -> int:
    """Usable blocks, without the dummy block 0, of a pool that `num_kv_blocks` or
    `kv_cache_memory_bytes` fixes; `ValueError` if it is larger than the memory, or holds none.
    """
    asked = config.kv_cache_memory_bytes or (config.num_kv_blocks or 0) * block_bytes
    if asked > memory_bytes:
        raise ValueError(
            f"the KV pool asked for takes {asked} bytes; this machine has {memory_bytes}"
        )
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if asked < 2 * block_bytes:
        raise ValueError(
            f"kv_cache_memory_bytes={asked} holds no KV block: one takes {block_bytes} "
            f"bytes, and one more is the dummy block"
        )
    return asked // block_bytes - 1
