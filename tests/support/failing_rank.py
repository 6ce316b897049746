"""Qwen3 whose rank 1 cannot be built while the file that FAILING_RANK names exists.

The content of the file is what happens to it: "raise" or "exit".
"""

import os
from pathlib import Path
from typing import Any

from nanoserve.models.qwen3 import Qwen3ForCausalLM


class FailingForCausalLM(Qwen3ForCausalLM):
    def __init__(self, config: Any, context: Any) -> None:
        order = Path(os.environ["FAILING_RANK"])
        is_there = context.device.type != "meta" and context.parallel.global_rank == 1
        if is_there and order.exists():
            if order.read_text() == "exit":
                os._exit(7)
            raise MemoryError("no room on this rank")
        super().__init__(config, context)
