"""Counters of KV blocks that leave the KV cache and come back, for the metrics."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nanoserve.engine.extension import Extension
from nanoserve.features.kv_transfer.calls import TransferStats
from nanoserve.features.kv_transfer.host_places import TierStats
from nanoserve.features.kv_transfer.host_tier import HostTier
from nanoserve.features.kv_transfer.loads import ConnectorLoads

# By metric: the field of the statistics, and its meaning.
_OF_TIER = {
    "kv_offload_stored_blocks": ("num_stored", "KV blocks copied to the host."),
    "kv_offload_loaded_blocks": ("num_loaded", "KV blocks copied from the host."),
    "kv_offload_evicted_blocks": ("num_evicted", "KV blocks dropped by the host."),
}
_OF_CONNECTOR = {
    "kv_connector_stored_blocks": ("num_stored", "KV blocks given to the KV connector."),
    "kv_connector_missed_blocks": ("num_not_stored", "KV blocks evicted before it got them."),
    "kv_connector_loaded_blocks": ("num_loaded", "KV blocks loaded by the KV connector."),
    "kv_connector_late_loads": ("num_late", "Loads that exceeded the time limit."),
    "kv_connector_failed_calls": ("num_failed", "Calls of the KV connector that failed."),
}


class Counter(NamedTuple):
    name: str
    meaning: str
    value: int


def counters(extensions: Iterable[Extension]) -> Iterator[Counter]:
    """Yield the counters of an engine's host tier and of its connector, if it has them."""
    extensions = list(extensions)
    parts: list[TierStats | TransferStats] = [
        each.stats for each in extensions if isinstance(each, HostTier | ConnectorLoads)
    ]
    if not parts:
        return
    # With both, the host tier comes first, and what it has is not sought in the connector.
    sought, found = parts[0].queries, sum(part.hits for part in parts)
    yield Counter("external_prefix_cache_queries", "Prompt tokens sought outside the pool.", sought)
    yield Counter("external_prefix_cache_hits", "Prompt tokens found outside the pool.", found)
    for part in parts:
        table = _OF_TIER if isinstance(part, TierStats) else _OF_CONNECTOR
        for name, (field, meaning) in table.items():
            yield Counter(name, meaning, getattr(part, field))
    for each in extensions:
        if isinstance(each, ConnectorLoads):
            yield from (Counter(*row) for row in each.calls.counters())
