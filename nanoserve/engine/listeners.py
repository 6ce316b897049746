"""What an engine tells those who watch it. Listeners only look; extensions take part.

`LLMEngine.listeners` hear of requests, `BlockManager.listeners` of blocks in the prefix cache (the
field's *KV events*), and `LLMEngine.observers` of steps: each of these is called as
`observer(plan, batch, result, times)` when a step is over.
"""

from typing import TYPE_CHECKING

from nanoserve.outputs import RequestOutput

if TYPE_CHECKING:
    from nanoserve.engine.request import Request


class RequestListener:
    """Base of those who hear of requests: every method does nothing."""

    def on_start(self, request: "Request") -> None:
        """Called when a request has been added."""

    def on_finish(self, output: RequestOutput) -> None:
        """Called once for each request, with its last output: finished, aborted or failed."""
