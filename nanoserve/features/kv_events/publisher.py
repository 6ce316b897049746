"""Send the KV events of every step to subscribers, or to a function."""

import logging
import time
from collections.abc import Callable
from typing import Any

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.executor import StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.plan import Plan
from nanoserve.features.kv_events.config import KVEventsConfig
from nanoserve.features.kv_events.events import EventCollector, KVEventBatch

logger = logging.getLogger(__name__)

_LINGER_MS = 1000  # that a closed socket goes on sending what it has, at most


class ZmqPublisher:
    """A PUB socket of ZeroMQ. It never waits for subscribers: that is done by threads of ZeroMQ."""

    def __init__(self, endpoint: str, topic: str, hwm: int) -> None:
        import zmq

        self._topic, self._num_sent = topic.encode(), 0
        # A context of its own, whose end waits until the address is free. Within a process,
        # subscribers are found in the same context only.
        self._is_own = not endpoint.startswith("inproc://")
        self._context = zmq.Context() if self._is_own else zmq.Context.instance()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(hwm)
        try:
            if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
                self._socket.bind(endpoint)
            else:
                self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._close(linger_ms=0)
            raise ValueError(f"endpoint={endpoint!r} of kv_events_config: {error}") from error

    def __call__(self, batch: KVEventBatch) -> None:
        from msgspec import msgpack

        number = self._num_sent.to_bytes(8, "big")
        self._num_sent += 1  # also if it cannot be sent: subscribers see a gap then
        self._socket.send_multipart([self._topic, number, msgpack.encode(batch.wire())])

    def close(self) -> None:
        """Close the socket and free its address. Idempotent."""
        self._close(_LINGER_MS)

    def _close(self, linger_ms: int) -> None:
        self._socket.close(linger=linger_ms)
        if self._is_own:
            self._context.term()


class KVEvents(Extension, EventCollector):
    """Publishes what changes in the prefix cache of `block_manager`.

    An extension of the loop only in order to know when a step is over, and when the engine is
    closed. A batch goes out at the end of each step that has changed anything, and at once when the
    cache is cleared, which may be the last thing that happens. What was cached before a step
    failed is followed by an `AllBlocksCleared`.

    What `publish` raises is logged the first time, and those events are lost.
    """

    def __init__(self, block_manager: BlockManager, publish: Callable[[KVEventBatch], Any]) -> None:
        super().__init__(block_manager.windows)
        self._publish, self._has_failed = publish, False
        block_manager.listeners.append(self)

    def on_cleared(self) -> None:
        super().on_cleared()
        self.flush()

    def on_result(self, plan: Plan, result: StepResult) -> None:
        self.flush()

    def flush(self) -> None:
        """Publish what there is."""
        events = self.take()
        if not events:
            return
        try:
            self._publish(KVEventBatch(time.time(), events))
        except Exception:
            if not self._has_failed:
                logger.exception("kv_events_config: events were lost; later ones are not logged")
            self._has_failed = True

    def close(self) -> None:
        self.flush()
        if isinstance(self._publish, ZmqPublisher):
            self._publish.close()


def prepare_kv_events(
    config: EngineConfig, model_config: ModelConfig
) -> Callable[[GuardedEngine], None]:
    """Return what has an engine publish its events, if `config` says that any are published."""
    options: KVEventsConfig = config.kv_events_config

    def add_to(engine: GuardedEngine) -> None:
        if options.is_active:
            engine.add_extension(make_kv_events(options, engine.scheduler.block_manager))

    return add_to


def make_kv_events(config: KVEventsConfig, block_manager: BlockManager) -> KVEvents:
    """Return the extension that publishes as `config` says, which is active.

    Raises `ValueError` for an endpoint that ZeroMQ cannot open.
    """
    if callable(config.publisher):
        return KVEvents(block_manager, config.publisher)
    return KVEvents(block_manager, ZmqPublisher(config.endpoint, config.topic, config.hwm))
