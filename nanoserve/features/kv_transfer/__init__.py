"""KV beyond the pool: blocks that the KV cache has evicted stay in the host's memory."""
