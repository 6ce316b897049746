"""Options of KV events (`kv_events_config={...}`), under vLLM's names."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from nanoserve.utils.checks import check_bool, check_int, check_names, is_text, require, shown

logger = logging.getLogger(__name__)

_PACKAGES = {"zmq": "pyzmq", "msgspec": "msgspec"}  # modules, and their packages for pip


@dataclass(frozen=True)
class KVEventsConfig:
    """Options of KV events, with vLLM's fields and defaults.

    enable_kv_cache_events: if False, nothing is published, whatever the other options are.
    publisher: "zmq" (ZeroMQ: `pip install 'nanoserve[kv-events]'`), "null" (nothing is published),
        or a function that is called with the `KVEventBatch` of each step. None: "zmq" if
        `enable_kv_cache_events` is True.
    endpoint: a ZeroMQ address. As in vLLM, it is bound if it contains `*` or `::`, or starts with
        ipc:// or inproc://. The engine connects to any other address; subscribers have to bind it.
    topic: the first frame of each message, by which subscribers filter.
    hwm: the most messages queued for a slow subscriber (ZeroMQ's high-water mark). Further
        messages to it are dropped, and it sees a gap in the sequence numbers.
    buffer_steps, max_queue_size: accepted without effect, because messages are sent at the end of
        their step and are not kept.
    replay_endpoint: not supported; a subscriber that has missed messages has to start again.

    Raises `ValueError` for unknown names and values.
    """

    enable_kv_cache_events: bool = False
    publisher: str | Callable[[Any], Any] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def of(cls, options: "Mapping[str, Any] | KVEventsConfig") -> "KVEventsConfig":
        """Return the value passed to `EngineConfig` as a `KVEventsConfig`."""
        if isinstance(options, KVEventsConfig):
            return options
        example = "{'enable_kv_cache_events': True, 'endpoint': 'tcp://*:5557'}"
        check_names("kv_events_config", options, cls, example)
        return cls(**options)

    def __post_init__(self) -> None:
        check_bool("enable_kv_cache_events", self.enable_kv_cache_events)
        require(
            self.publisher in (None, "null", "zmq") or callable(self.publisher),
            f"publisher={shown(self.publisher)} must be 'zmq', 'null' or a function",
        )
        require(
            is_text(self.endpoint), f"endpoint={shown(self.endpoint)} must be a non-empty string"
        )
        require(isinstance(self.topic, str), f"topic={shown(self.topic)} must be a string")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            check_int(name, getattr(self, name), 0)
        require(
            self.replay_endpoint is None,
            f"replay_endpoint={shown(self.replay_endpoint)} is not supported, because messages are "
            f"not kept for a replay; remove it",
        )
        if self.publisher not in (None, "null") and not self.enable_kv_cache_events:
            logger.warning(
                "kv_events_config has publisher=%s, but nothing is published without "
                "enable_kv_cache_events=True",
                shown(self.publisher),
            )
        if self.uses_zmq:
            missing = [pip for module, pip in _PACKAGES.items() if find_spec(module) is None]
            require(
                not missing,
                f"kv_events_config with ZeroMQ needs {', '.join(missing)}: "
                f"pip install 'nanoserve[kv-events]'",
            )

    @property
    def is_active(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def uses_zmq(self) -> bool:
        """True if events are published over ZeroMQ."""
        return self.is_active and not callable(self.publisher)
