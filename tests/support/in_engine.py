"""What tests have done in the process of an engine; so it must be importable there, too."""

import os
import time

from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.parallel import heartbeat


def num_free_blocks(engine: GuardedEngine) -> int:
    return engine.scheduler.block_manager.num_free_blocks


def process_id(engine: GuardedEngine) -> int:
    return os.getpid()


def fail(engine: GuardedEngine) -> None:
    raise ZeroDivisionError("as asked")


def hang(engine: GuardedEngine) -> None:
    """The next step does not end, and one second of that is enough to be taken for it."""
    heartbeat.IDLE_LIMIT = 1.0
    engine.executor.forward = lambda *args: time.sleep(1000)


def sleep_long(engine: GuardedEngine) -> None:
    time.sleep(1000)


def fail_for_good(engine: GuardedEngine) -> None:
    """Every step from here on."""

    def forward(*args: object) -> None:
        raise RuntimeError("the device is gone")

    engine.executor.forward = forward
