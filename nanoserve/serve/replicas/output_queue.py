"""The output queue of a replica for one ingress."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from nanoserve.outputs import RequestOutput
from nanoserve.serve.engine_thread import News
from nanoserve.serve.token_stream import NewTokens


class Outbox:
    """A queue of unsent updates.

    New tokens of a sequence are merged with its queued tokens, and only the net change of cache
    events is kept. Not thread-safe: use it only in the thread of the event loop.
    """

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, int], NewTokens] = {}
        self._outputs: list[RequestOutput] = []
        self._stored: set[bytes] = set()
        self._removed: set[bytes] = set()
        self._news = asyncio.Event()

    def add_tokens(self, new: NewTokens) -> None:
        key = new.request_id, new.index
        earlier = self._tokens.get(key)
        if earlier is not None:
            new = new.after(earlier)
        self._tokens[key] = new
        self._news.set()

    def add_output(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._news.set()

    def add_blocks(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Add hashes of blocks that the prefix cache has stored and removed."""
        for ours, theirs, hashes in (
            (self._stored, self._removed, stored),
            (self._removed, self._stored, removed),
        ):
            for block_hash in hashes:
                if block_hash in theirs:
                    theirs.remove(block_hash)
                else:
                    ours.add(block_hash)
                self._news.set()

    async def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for updates; return True if there are any."""
        if not self._news.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)
        return self._news.is_set()

    def take(self) -> tuple[Any, ...]:
        """Return all updates since the last call: (tokens, outputs, stored, removed)."""
        self._news.clear()
        taken = (
            list(map(tuple, self._tokens.values())),
            self._outputs,
            list(self._stored),
            list(self._removed),
        )
        self._tokens, self._outputs, self._stored, self._removed = {}, [], set(), set()
        return taken


def news_of(tokens: Iterable[tuple[Any, ...]], outputs: list[RequestOutput]) -> News:
    """Convert the tokens and outputs of `Outbox.take` to updates, at the receiver."""
    return News([NewTokens(*new) for new in tokens], outputs)
