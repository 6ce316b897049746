"""To forget all cached prefixes, as when the weights have changed."""

from typing import Any

from nanoserve.engine.interrupts import recovery
from nanoserve.engine.recovery import restart


def reset(engine: Any, of_running: bool) -> None:
    """What an `LLMEngine` is asked from now on is computed.

    What runs keeps its blocks, of which nobody else learns; with `of_running` it computes its own
    tokens again, too, when the steps under way have ended. There is no connector to reset.
    """
    manager = engine.scheduler.block_manager
    if of_running:
        with recovery(engine):
            while engine._in_flight:
                engine._finish_step()
        requests = engine.output_processor.requests.values()
        restart(engine.scheduler, [seq for request in requests for seq in request.sequences])
    for block in range(1, manager.num_blocks + 1):
        manager.evict(block)
