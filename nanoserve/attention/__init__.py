"""Attention over the paged KV cache, with one interface and several backends."""
