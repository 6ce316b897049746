"""Calls a connector: an exception in it costs computing time, and no request."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nanoserve.features.kv_transfer.connector import BlockKey, KVConnector, Prompt

logger = logging.getLogger(__name__)


@dataclass
class TransferStats:
    """Totals since the start."""

    num_stored: int = 0  # blocks given to the connector
    num_not_stored: int = 0  # blocks evicted while the staging places were in use
    num_loaded: int = 0  # blocks that the connector has loaded
    num_late: int = 0  # loads that took longer than the time limit
    num_failed: int = 0  # calls of the connector that raised an exception
    queries: int = 0  # prompt tokens that neither the KV cache nor the host tier had
    hits: int = 0  # those of them that were loaded instead of computed


class ConnectorCalls:
    """The calls of a connector's methods, with `stats` of all that it does.

    clock: returns seconds.
    """

    def __init__(self, connector: KVConnector, clock: Callable[[], float]) -> None:
        self._connector, self._clock = connector, clock
        self.stats = TransferStats()
        self.always_loads = bool(getattr(connector, "always_loads", False))
        self.is_awaited = bool(getattr(connector, "is_awaited", False))

    def find(self, keys: list[BlockKey], prompt: Prompt | None = None) -> int:
        """Return how many blocks the connector has, from the first one on."""
        try:
            return max(0, min(self._connector.find(keys, prompt), len(keys)))
        except Exception:
            self._note_failure("find")
            return 0

    def load(
        self, keys: list[BlockKey], memory: list[np.ndarray], prompt: Prompt
    ) -> tuple[int, float]:
        """Return the number of blocks that have been loaded, and the seconds that it took."""
        began = self._clock()
        try:
            num_keys = max(0, min(self._connector.load(keys, memory, prompt), len(keys)))
        except Exception:
            self._note_failure("load")
            num_keys = 0
        self.stats.num_loaded += num_keys
        return num_keys, self._clock() - began

    def store(self, keys: Sequence[BlockKey], memory: list[np.ndarray]) -> None:
        try:
            self._connector.store(keys, memory)
            self.stats.num_stored += len(keys)
        except Exception:
            self._note_failure("store")

    def counters(self) -> Iterable[tuple[str, str, int]]:
        """Return the connector's own counters, if it has some: name, meaning and value."""
        if not hasattr(self._connector, "counters"):
            return ()
        rows: Iterable[tuple[str, str, int]] = self._connector.counters()
        return rows

    def close(self) -> None:
        self._connector.close()

    def _note_failure(self, method: str) -> None:
        self.stats.num_failed += 1
        if self.stats.num_failed == 1:
            logger.exception(
                "%s.%s of the KV connector raised an exception; later ones are counted, and not "
                "logged",
                type(self._connector).__qualname__,
                method,
            )
