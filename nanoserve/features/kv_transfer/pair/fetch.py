"""Fetches the blocks of one prompt from a prefill engine, while that computes them."""

import math
import selectors
import time
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from nanoserve.features.kv_transfer.connector import BlockKey, Prompt
from nanoserve.features.kv_transfer.pair.messages import Hello, Link, Name, RefusedError
from nanoserve.features.kv_transfer.pair.options import ConsumerOptions
from nanoserve.features.kv_transfer.pair.prefill_request import PrefillError, PrefillRequest

_POLL = 0.05  # seconds between two looks at whether the blocks are still wanted
_GREETING = 5.0  # seconds for a connection, and for the lease
_STALL = 10.0  # seconds for one block
_END = 0.05  # seconds for the answer, which brings nothing new, after the last block


class UnequalError(Exception):
    """The prefill engine has other weights or options."""


class BadBlockError(Exception):
    """The content of a block is not what its checksum says."""


class Fetch:
    """One prompt, and the blocks of it that are wanted.

    `num_received` blocks, from the first one on, have been received and are right; also when `run`
    has raised an exception. deadline: in `time.monotonic()`.
    """

    def __init__(
        self, options: ConsumerOptions, hello: Hello, prompt: Prompt, deadline: float
    ) -> None:
        self._options, self._hello = options, hello
        self._prompt, self._deadline = prompt, deadline
        self.num_received = 0

    def run(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray]) -> None:
        """Write the blocks to `memory`, until all have arrived or no more can be expected.

        Raises `RefusedError` if the other side does not take this prompt, and other exceptions if
        it cannot be used.
        """
        names = [(key.block_hash, key.group) for key in keys]
        with closing(Link(self._options.address.connect(self._within(_GREETING)))) as link:
            soon = time.monotonic() + self._within(_GREETING)
            greet(link, self._hello, soon)
            link.reserve(names, self._within(math.inf), soon)
            request = PrefillRequest(self._options, self._prompt, self._within(_GREETING))
            with closing(request):
                is_answered = self._receive(link, request, names, memory)
                link.confirm(self.num_received, self._deadline)
                if not is_answered and self.num_received == len(keys):
                    request.is_answered(_END)  # closed sooner, it would be aborted

    def _within(self, seconds: float) -> float:
        """Return the seconds until the deadline, and at most so many.

        It is never zero, which would mean not to wait at all.
        """
        return max(min(self._deadline - time.monotonic(), seconds), 1e-3)

    def _receive(
        self,
        link: Link,
        request: PrefillRequest,
        names: Sequence[Name],
        memory: Sequence[np.ndarray],
    ) -> bool:
        """Receive blocks; returns True if the prefill server has answered."""
        is_answered, last = False, time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            selector.register(request, selectors.EVENT_READ)
            while self.num_received < len(names) and self._goes_on:
                ready = [key.fileobj for key, _ in selector.select(_POLL)]
                if request in ready:
                    selector.unregister(request)
                    request.read_answer()
                    is_answered, last = True, time.monotonic()
                if link in ready:
                    self._receive_block(link, names, memory)
                    last = time.monotonic()
                elif is_answered and time.monotonic() - last > self._options.patience:
                    self._check_arrival()
                    break
        return is_answered

    def _check_arrival(self) -> None:
        """Raise `PrefillError` if an answer has brought no block.

        The engine may evict a block before it has been copied, but hardly all of them.
        """
        if not self.num_received:
            raise PrefillError(
                f"it has answered, but no block has come from {self._options.address}; see that "
                f"this is the address of the same engine"
            )

    @property
    def _goes_on(self) -> bool:
        return not self._prompt.abandoned.is_set() and time.monotonic() < self._deadline

    def _receive_block(
        self, link: Link, names: Sequence[Name], memory: Sequence[np.ndarray]
    ) -> None:
        index, deadline = self.num_received, time.monotonic() + self._within(_STALL)
        if not link.receive_block(index, names[index], memory[index], deadline):
            raise BadBlockError(f"block {index} has another checksum than was sent")
        self.num_received += 1


def greet(link: Link, hello: Hello, deadline: float) -> None:
    """Introduce this engine; raises `UnequalError` if the other one does not serve it."""
    try:
        link.greet(hello, deadline)
    except RefusedError as refusal:
        raise UnequalError(f"the prefill engine has {refusal}") from None
