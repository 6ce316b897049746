"""KV events: publish which KV blocks an engine caches and evicts, in vLLM's format."""
