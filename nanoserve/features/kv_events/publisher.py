"""Publish the KV events of each step to ZeroMQ subscribers or to a function."""

import logging
import time
from collections.abc import Callable
from typing import Any

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.executor import StepResult
from nanoserve.engine.extension import Extension, PreparedFeature
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.plan import Plan
from nanoserve.features.kv_events.config import KVEventsConfig
from nanoserve.features.kv_events.events import EventCollector, KVEventBatch

logger = logging.getLogger(__name__)

_LINGER_MS = 1000  # the most time for which a closed socket goes on sending queued messages


class ZmqPublisher:
    """A ZeroMQ PUB socket. Sending never blocks, as ZeroMQ's own threads serve the subscribers."""

    def __init__(self, endpoint: str, topic: str, hwm: int) -> None:
        import zmq

        self._topic, self._num_sent = topic.encode(), 0
        # Terminating a context waits until its address is free, so each publisher has its own. But
        # inproc:// only connects sockets of one context.
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
        self._num_sent += 1  # even if sending fails, so that subscribers see a gap
        self._socket.send_multipart([self._topic, number, msgpack.encode(batch.wire())])

    def close(self) -> None:
        """Close the socket and free its address. Idempotent."""
        self._close(_LINGER_MS)

    def _close(self, linger_ms: int) -> None:
        self._socket.close(linger=linger_ms)
        if self._is_own:
            self._context.term()


class KVEvents(Extension, EventCollector):
    """Publishes the changes in the prefix cache of `block_manager`.

    It is an extension so that the engine calls it at the end of each step, and when the engine is
    closed. A batch is published at the end of each step that has changed the cache, and at once
    when the cache is cleared, as no step may follow. If a step fails, the blocks that it has cached
    are followed by an `AllBlocksCleared`.

    If `publish` raises an exception, its events are lost; only the first exception is logged.
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
        """Publish the events since the last call, if there are any."""
        events = self.take()
        if not events:
            return
        try:
            self._publish(KVEventBatch(time.time(), events))
        except Exception:
            if not self._has_failed:
                logger.exception(
                    "kv_events_config: publishing has failed and events were lost; further "
                    "failures are not logged"
                )
            self._has_failed = True

    def close(self) -> None:
        self.flush()
        if isinstance(self._publish, ZmqPublisher):
            self._publish.close()


def prepare_kv_events(config: EngineConfig, model_config: ModelConfig) -> PreparedFeature:
    """Return a feature that adds `KVEvents` to an engine if `config` enables KV events."""
    options: KVEventsConfig = config.kv_events_config

    def add_to(engine: GuardedEngine) -> None:
        if options.is_active:
            engine.add_extension(make_kv_events(options, engine.scheduler.block_manager))

    return PreparedFeature(add_to)


def make_kv_events(config: KVEventsConfig, block_manager: BlockManager) -> KVEvents:
    """Return the extension that publishes events. `config` must be active (`is_active`).

    Raises `ValueError` for an endpoint that ZeroMQ cannot open.
    """
    if callable(config.publisher):
        return KVEvents(block_manager, config.publisher)
    return KVEvents(block_manager, ZmqPublisher(config.endpoint, config.topic, config.hwm))
