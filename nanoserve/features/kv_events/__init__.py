"""Publish which KV blocks an engine caches and evicts, in vLLM's format, to routers and others."""
