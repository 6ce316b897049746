"""Answers of /v1/messages: a message, or the events of a stream."""

import json
from typing import Any
from uuid import uuid4

from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.messages.errors import error_event
from nanoserve.serve.http.messages.request import MessagesBody
from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.tools.block_answer import BlockAnswer
from nanoserve.serve.http.tools.blocks import (
    NO_OBJECT,
    Block,
    Change,
    Step,
    is_no_object,
    object_so_far,
)
from nanoserve.serve.http.tools.tool_choice import ToolUse

# Clients keep blocks of thinking only with a signature. Here it proves nothing, and is not checked.
_SIGNATURE = "unsigned"


class MessagesAnswer(BlockAnswer):
    """The answer to a request of the Messages API."""

    heartbeat = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(
        self,
        given: MessagesBody,
        use: ToolUse | None,
        reasoning_parser: str | None,
        body: ChatBody,
        *args: Any,
    ) -> None:
        super().__init__(use, reasoning_parser, body, *args)
        self._given = given
        self._id = f"msg_{uuid4().hex}"
        self._has_failed = False

    def complete(self) -> dict[str, Any]:
        content = list(map(self._content_block, self.output.blocks))
        return self._message(content, *self._stop)

    def _message(
        self, content: list[Any], reason: str | None, stop_sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage(),
        }

    @property
    def _stop(self) -> tuple[str, str | None]:
        """The reason for which the answer has ended, and the stop sequence that has ended it."""
        if self.finish_reason == "length":
            is_full = self.num_output_tokens < self._given.max_tokens
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        reason = self.stop_reason
        if isinstance(reason, str) and reason in (self._given.stop_sequences or ()):
            return "stop_sequence", reason
        has_called = any(block.kind == "call" for block in self.output.blocks)
        return ("tool_use" if has_called else "end_turn"), None

    def _usage(self) -> dict[str, int]:
        """Return the token counts; in this API, tokens from the cache are no input tokens."""
        num_cached = self.num_cached_tokens or 0
        return {
            "input_tokens": self.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self.num_output_tokens,
        }

    def _content_block(self, block: Block) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            thinking = "" if self._given.hides_thinking else block.text
            return {"type": "thinking", "thinking": thinking, "signature": _SIGNATURE}
        call = {"type": "tool_use", "id": block.call_id, "name": block.name}
        return call | {"input": object_so_far(block.text)}

    # ---------------------------------------------------------------- events

    def first_events(self) -> bytes:
        return _event("message_start", message=self._message([], None, None))

    def step_events(self, step: Step) -> bytes:
        block, index = step.block, step.block.index
        if step.change is Change.BEGIN:
            empty = self._content_block(Block(block.kind, index, block.name, block.call_id))
            if block.kind == "reasoning":
                empty["signature"] = ""  # follows at its end
            return _event("content_block_start", index=index, content_block=empty)
        if step.change is Change.GROW:
            delta = self._delta(step)
            return _event("content_block_delta", index=index, delta=delta) if delta else b""
        last = b""
        if block.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": _SIGNATURE}
            last = _event("content_block_delta", index=index, delta=signed)
        elif block.kind == "call" and block.is_complete and is_no_object(block.text):
            closed = {"type": "input_json_delta", "partial_json": NO_OBJECT[1]}
            last = _event("content_block_delta", index=index, delta=closed)
        return last + _event("content_block_stop", index=index)

    def _delta(self, step: Step) -> dict[str, str] | None:
        if step.block.kind == "text":
            return {"type": "text_delta", "text": step.text}
        if step.block.kind == "call":
            is_first = step.text == step.block.text
            opening = NO_OBJECT[0] if is_first and is_no_object(step.text) else ""
            return {"type": "input_json_delta", "partial_json": opening + step.text}
        if self._given.hides_thinking:
            return None
        return {"type": "thinking_delta", "thinking": step.text}

    def last_events(self) -> bytes:
        """Return the last events, unless the client has gone or an error has ended the stream."""
        if self.finish_reason is None or self._has_failed:
            return b""
        reason, stop_sequence = self._stop
        delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
        end = _event("message_delta", delta=delta, usage=self._usage())
        return end + _event("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        self._has_failed = True
        return error_event(error)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n".encode()
