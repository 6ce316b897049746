"""What tests have done in the process of an engine; so it must be importable there, too."""

import os
import time

from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.worker import heartbeat


def num_free_blocks(engine: LLMEngine) -> int:
    return engine.scheduler.block_manager.num_free_blocks


def process_id(engine: LLMEngine) -> int:
    return os.getpid()


def fail(engine: LLMEngine) -> None:
    raise ZeroDivisionError("as asked")


def hang(engine: LLMEngine) -> None:
    """The next step does not end, and one second of that is enough to be taken for it."""
    heartbeat.IDLE_LIMIT = 1.0
    engine.executor.forward = lambda *args: time.sleep(1000)


def sleep_long(engine: LLMEngine) -> None:
    time.sleep(1000)


def fail_for_good(engine: LLMEngine) -> None:
    """Every step from here on."""

    def forward(*args: object) -> None:
        raise RuntimeError("the device is gone")

    engine.executor.forward = forward
