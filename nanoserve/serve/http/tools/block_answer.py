"""The base of responses that consist of blocks, written in the format of an API by subclasses."""

from typing import Any

from nanoserve.engine.request import Request
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.response_builder import error_of, is_aborted
from nanoserve.serve.http.tools.blocks import BlockStream, Step
from nanoserve.serve.http.tools.output_parser import OutputParser
from nanoserve.serve.http.tools.tool_choice import ToolUse
from nanoserve.text.tokenizer import Tokenizer


class BlockAnswer:
    """One answer to one request, and its token counts.

    finish_reason, stop_reason: as in `CompletionOutput`; None while it is being generated.
    num_cached_tokens: of the prompt, taken from the prefix cache; None if that is not known.
    """

    heartbeat = b": heartbeat\n\n"  # a comment

    def __init__(
        self,
        use: ToolUse | None,
        reasoning_parser: str | None,
        body: ChatBody,
        model: str,
        requests: list[Request],
        tokenizer: Tokenizer,
    ) -> None:
        self.requests, self.model = requests, model
        (self.request,) = requests
        parser = OutputParser(use, reasoning_parser, self.request.prompt, body)
        self.output = BlockStream(parser)
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.num_output_tokens = 0
        self.num_cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer

    def events(self, outputs: list[RequestOutput]) -> bytes:
        """Return new outputs as server-sent events."""
        return b"".join(map(self._events_of, outputs))

    def whole(self, outputs: dict[str, RequestOutput]) -> dict[str, Any]:
        """Return the complete response. Raises `ApiError` if the request has failed."""
        output = outputs[self.request.request_id]
        if output.error is not None or is_aborted(output):
            raise error_of(output)
        self.add(output)
        return self.complete()

    def add(self, output: RequestOutput) -> list[Step]:
        """Count an output, and return what it changes."""
        steps: list[Step] = []
        self.num_cached_tokens = output.metrics.num_cached_prompt_tokens
        for completion in output.outputs:
            self.num_output_tokens += len(completion.token_ids)
            self.note(completion)
            reason = completion.finish_reason
            steps += self.output.add(completion.text, reason is not None, reason == "length")
            if reason is not None:
                self.finish_reason, self.stop_reason = reason, completion.stop_reason
        return steps

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens of the reasoning, found by encoding its text."""
        texts = [block.text for block in self.output.blocks if block.kind == "reasoning"]
        counts = (len(self._tokenizer.encode(text, False)) for text in texts)
        return min(sum(counts), self.num_output_tokens)

    def _events_of(self, output: RequestOutput) -> bytes:
        if output.error is None and not is_aborted(output):
            return b"".join(map(self.step_events, self.add(output)))
        return self.error_event(error_of(output))

    def note(self, completion: CompletionOutput) -> None:
        """Keep what else the answer needs of an output."""

    def step_events(self, step: Step) -> bytes:
        """Return the events for a change of a block."""
        raise NotImplementedError

    def error_event(self, error: ApiError) -> bytes:
        """Return the events that end the stream of a request that has failed."""
        raise NotImplementedError

    def complete(self) -> dict[str, Any]:
        """Return the complete response, after its last output."""
        raise NotImplementedError
