"""What tests have done in the process of an engine; so it must be importable there, too."""

import os

from nanoserve.engine.llm_engine import LLMEngine


def num_free_blocks(engine: LLMEngine) -> int:
    return engine.scheduler.block_manager.num_free_blocks


def process_id(engine: LLMEngine) -> int:
    return os.getpid()


def fail(engine: LLMEngine) -> None:
    raise ZeroDivisionError("as asked")


def fail_for_good(engine: LLMEngine) -> None:
    """Every step from here on."""

    def forward(*args: object) -> None:
        raise RuntimeError("the device is gone")

    engine.executor.forward = forward
