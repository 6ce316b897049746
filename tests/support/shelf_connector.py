"""KV connectors as their users write them."""

import threading
from collections.abc import Sequence
from itertools import takewhile
from typing import ClassVar

import numpy as np

from nanoserve.features.kv_transfer.connector import BlockKey, ConnectorContext, Prompt


class Shelf:
    """The least that a connector needs. All engines of a test share `blocks`."""

    blocks: ClassVar[dict[BlockKey, bytes]] = {}

    def __init__(self, context: ConnectorContext) -> None:
        self.block_bytes = context.block_bytes

    def find(self, keys: Sequence[BlockKey], prompt: Prompt | None) -> int:
        return sum(1 for _ in takewhile(self.blocks.__contains__, keys))

    def load(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray], prompt: Prompt) -> int:
        for key, content in zip(keys, memory, strict=True):
            content[:] = np.frombuffer(self.blocks[key], dtype=np.uint8)
        return len(keys)

    def store(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray]) -> None:
        for key, content in zip(keys, memory, strict=True):
            assert content.nbytes == self.block_bytes
            self.blocks[key] = content.tobytes()

    def close(self) -> None:
        """Keep the blocks for the next engine."""


class Broken(Shelf):
    """Each call does something that a connector must not do."""

    def find(self, keys: Sequence[BlockKey], prompt: Prompt | None) -> int:
        return {"find": -3, "all": 10**6}.get(self.trouble) or super().find(keys, prompt)

    def load(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray], prompt: Prompt) -> int:
        if self.trouble == "load":
            raise OSError("planted")
        if self.trouble == "half":
            return super().load(keys[:7], memory[:7], prompt)
        if self.trouble == "late":
            self.may_go_on.wait(20)
        return super().load(keys, memory, prompt)

    def store(self, keys: Sequence[BlockKey], memory: Sequence[np.ndarray]) -> None:
        if self.trouble == "store":
            raise OSError("planted")
        super().store(keys, memory)

    trouble = ""
    may_go_on = threading.Event()
