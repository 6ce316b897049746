"""Whose KV blocks a request may share: those of requests with the same `cache_salt`."""

from typing import Any


def key_of_salt(salt: Any) -> tuple[str, ...]:
    """What is folded into the root of its prefixes; `ValueError` unless it is a text."""
    if not isinstance(salt, str) or not salt:
        raise ValueError(f"cache_salt={salt!r} must be a text that is not empty")
    return ("cache_salt", salt)
