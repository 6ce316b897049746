"""The side of a decode engine: it lets a prefill server compute prompts, and fetches their blocks.

Whatever fails, the tokens whose blocks are not there are computed by the decode engine itself.
"""

import http.client
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from nanoserve.features.kv_transfer.connector import BlockKey, ConnectorContext, Prompt
from nanoserve.features.kv_transfer.pair.fetch import BadBlockError, Fetch, UnequalError, greet
from nanoserve.features.kv_transfer.pair.messages import (
    MOST_BLOCKS,
    Hello,
    Link,
    ProtocolError,
    RefusedError,
)
from nanoserve.features.kv_transfer.pair.options import ConsumerOptions
from nanoserve.features.kv_transfer.pair.outage import Outage
from nanoserve.features.kv_transfer.pair.prefill_request import PrefillError, salt_of

_GREETING = 2.0  # seconds in which a prefill engine must answer when this engine starts
_FAILURES = (
    *(OSError, http.client.HTTPException),
    *(ProtocolError, PrefillError, UnequalError, BadBlockError),
)
_COUNTERS = {
    "kv_prefill_requests": ("num_requests", "Prompts sent to the prefill server."),
    "kv_prefill_failed_requests": ("num_failed", "Prompts that the prefill server failed."),
    "kv_prefill_refused_requests": ("num_refused", "Prompts that it did not take, being busy."),
    "kv_prefill_local_prompts": ("num_local", "Prompts not sent to it, as it had just failed."),
    "kv_prefill_received_blocks": ("num_received", "KV blocks received and found to be right."),
    "kv_prefill_bad_blocks": ("num_bad", "KV blocks received with a wrong checksum."),
}


@dataclass
class PrefillStats:
    """Totals since the start."""

    num_requests: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_local: int = 0
    num_received: int = 0
    num_bad: int = 0


class Consumer:
    """The connector of a decode engine."""

    always_loads = True  # it need not be sooner: decoding is not to wait for prompts

    def __init__(self, context: ConnectorContext) -> None:
        self._options = ConsumerOptions.of(context.config)
        self._hello = Hello(context.fingerprint, context.block_bytes)
        self._tokens_per_key = context.block_size / context.num_groups
        # Less than the engine waits: so what has arrived by then is used, and the server is late.
        self._timeout = 0.9 * context.load_timeout
        self._outage = Outage(self._options.url.geturl(), time.monotonic)
        self._lock = threading.Lock()  # of the counters
        self.stats = PrefillStats()
        self._try_connection()

    def find(self, keys: Sequence[BlockKey], prompt: Prompt | None) -> int:
        """Return all keys of a prompt that is long enough, unless the server has just failed."""
        is_long = len(keys) * self._tokens_per_key >= self._options.min_tokens
        if prompt is None or not is_long or salt_of(prompt) is None:
            return 0
        if not self._outage.may_try():
            self._count("num_local")
            return 0
        return min(len(keys), MOST_BLOCKS)

    def load(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray], prompt: Prompt) -> int:
        """Let the prefill server compute the prompt, and receive its blocks."""
        began = time.monotonic()
        fetch = Fetch(self._options, self._hello, prompt, began + self._timeout)
        self._count("num_requests")
        try:
            fetch.run(keys, memory)
            if fetch.num_received:
                self._outage.note_success()
        except RefusedError:
            self._count("num_refused")
        except _FAILURES as error:
            self._count("num_failed")
            self._count("num_bad", isinstance(error, BadBlockError))
            self._outage.note_failure(began, error)
        self._count("num_received", fetch.num_received)
        return fetch.num_received

    def store(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray]) -> None:
        """Store nothing: blocks that are computed here stay here."""

    def close(self) -> None:
        """Do nothing: no connection outlives its load."""

    def counters(self) -> Iterable[tuple[str, str, int]]:
        for name, (field, meaning) in _COUNTERS.items():
            yield name, meaning, getattr(self.stats, field)

    def _count(self, field: str, number: int = 1) -> None:
        with self._lock:
            setattr(self.stats, field, getattr(self.stats, field) + number)

    def _try_connection(self) -> None:
        """Log it if the prefill engine cannot be used now; it may be started later."""
        deadline = time.monotonic() + _GREETING
        try:
            with closing(Link(self._options.address.connect(_GREETING))) as link:
                greet(link, self._hello, deadline)
        except _FAILURES as error:
            self._outage.note_failure(time.monotonic(), error)
