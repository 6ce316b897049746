"""Answers of /v1/responses: a response object, or the events of a stream."""

import json
import time
from dataclasses import dataclass
from typing import Any

from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.serve.http import logprobs
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.response_builder import is_aborted
from nanoserve.serve.http.responses.items import new_id, sealed
from nanoserve.serve.http.responses.request import LOGPROBS, ResponsesBody
from nanoserve.serve.http.responses.store import ResponseStore
from nanoserve.serve.http.tools.block_answer import BlockAnswer
from nanoserve.serve.http.tools.blocks import Block, Change, Step
from nanoserve.serve.http.tools.tool_choice import ToolUse
from nanoserve.text.token_bytes import TextPositions

_ITEM_TYPES = {"text": "message", "reasoning": "reasoning", "call": "function_call"}
_NO_LOGPROBS = (
    f"include={LOGPROBS!r} needs an answer without tools and reasoning; /v1/chat/completions has "
    "the log-probabilities of all tokens"
)


@dataclass
class Turn:
    """A request, its own items, and the link of the response that it continues (or None)."""

    body: ResponsesBody
    items: list[dict[str, Any]]
    link: Any
    store: ResponseStore

    @property
    def is_stored(self) -> bool:
        return self.body.store is not False and self.store.most_responses > 0


class ResponsesAnswer(BlockAnswer):
    """The response to a `Turn`. While it is generated, it is in `ResponseStore.running`."""

    def __init__(
        self,
        turn: Turn,
        use: ToolUse | None,
        reasoning_parser: str | None,
        body: ChatBody,
        *args: Any,
    ) -> None:
        super().__init__(use, reasoning_parser, body, *args)
        self._turn, self._given = turn, turn.body
        if self._given.has_logprobs and (use is not None or reasoning_parser is not None):
            raise ApiError(400, _NO_LOGPROBS, "include", "unsupported")
        self._names = logprobs.TokenNames(self._tokenizer.token_bytes, False)
        skips = self.request.params.skip_special_tokens
        self._positions = TextPositions(self._tokenizer.token_bytes, skips, 0)
        self._logprobs: list[dict[str, Any]] = []  # of the text so far
        self._num_sent_logprobs = 0
        self.id = new_id("resp")
        self._ids: list[str] = []  # of the items
        self._created = int(time.time())
        self._number = 0  # of the next event
        self._is_cancelled = False
        self._error: ApiError | None = None
        turn.store.running[self.id] = self

    def cancel(self) -> bool:
        """Mark the response as cancelled; return False if it has ended already."""
        if self.finish_reason is not None or self._error is not None:
            return False
        self._is_cancelled = True
        return True

    def snapshot(self) -> dict[str, Any]:
        """Return the response object as it is now."""
        status, details = self._status
        is_over = status != "in_progress"
        request, params = self._given, self.request.params
        text, reasoning = request.text or {}, request.reasoning or {}
        error = None
        if self._error is not None:
            error = {"code": "server_error", "message": str(self._error)}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": details,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": [self._item(block, is_over) for block in self.output.blocks],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": self._turn.is_stored,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": request.truncation or "disabled",
            "usage": self._usage() if is_over else None,
            "user": request.user,
        }

    @property
    def _status(self) -> tuple[str, dict[str, str] | None]:
        """The status of the response, and why it is incomplete."""
        if self._error is not None:
            return "failed", None
        if self.finish_reason == "length":
            return "incomplete", {"reason": "max_output_tokens"}
        if self.finish_reason is not None:
            return "completed", None
        return ("cancelled" if self._is_cancelled else "in_progress"), None

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_output = self.num_prompt_tokens, self.num_output_tokens
        cached = {"cached_tokens": self.num_cached_tokens or 0, "cache_write_tokens": 0}
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": cached,
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": num_prompt + num_output,
        }

    def _item(self, block: Block, has_ended: bool = True) -> dict[str, Any]:
        """Return a block as an item, complete or not."""
        status = "completed" if block.is_complete else "incomplete"
        if not (has_ended or block.is_complete):
            status = "in_progress"
        item: dict[str, Any] = {"id": self._id_of(block), "type": _ITEM_TYPES[block.kind]}
        item["status"] = status
        if block.kind == "text":
            return item | {"role": "assistant", "content": [self._part(block)]}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return item | call
        seal = sealed(block.text) if self._given.encrypts_reasoning else None
        return item | {"summary": [], "content": [self._part(block)], "encrypted_content": seal}

    def _id_of(self, block: Block) -> str:
        while len(self._ids) <= block.index:
            self._ids.append(new_id(_ITEM_TYPES[self.output.blocks[len(self._ids)].kind]))
        return self._ids[block.index]

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        known = {"annotations": [], "logprobs": self._logprobs}
        return {"type": "output_text", "text": block.text} | known

    # ---------------------------------------------------------------- outputs

    def note(self, completion: CompletionOutput) -> None:
        if completion.logprobs is not None and self._given.has_logprobs:
            num_top, ids = self._given.top_logprobs or 0, completion.token_ids
            entries = completion.logprobs, num_top, self._names, self._positions
            self._logprobs += logprobs.of_chat(ids, *entries)["content"]

    def whole(self, outputs: dict[str, RequestOutput]) -> dict[str, Any]:
        output = outputs[self.request.request_id]
        if self._is_cancelled and is_aborted(output):
            self.add_cancelled(output)
            return self.complete()
        return super().whole(outputs)

    def complete(self) -> dict[str, Any]:
        """Return the response object, and store it."""
        response, turn = self.snapshot(), self._turn
        if turn.is_stored:
            turn.store.put(response, turn.items, turn.link)
        return response

    def add_cancelled(self, output: RequestOutput) -> None:
        """Keep what the output of a cancelled request has."""
        self.num_cached_tokens = output.metrics.num_cached_prompt_tokens
        for completion in output.outputs:
            self.num_output_tokens += len(completion.token_ids)
            self.output.add(completion.text, True, True)

    # ---------------------------------------------------------------- events

    def first_events(self) -> bytes:
        response = self.snapshot()
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def events(self, outputs: list[RequestOutput]) -> bytes:
        for output in outputs:
            if self._is_cancelled and is_aborted(output):
                self.add_cancelled(output)
                return self._event("response.incomplete", response=self.complete())
        return super().events(outputs)

    def last_events(self) -> bytes:
        """Return the last event: the complete response, unless the client has gone or an error."""
        if self.finish_reason is None:
            return b""
        kind = "completed" if self.finish_reason != "length" else "incomplete"
        return self._event(f"response.{kind}", response=self.complete())

    def error_event(self, error: ApiError) -> bytes:
        self._error = error
        return self._event("response.failed", response=self.snapshot())

    def step_events(self, step: Step) -> bytes:
        block = step.block
        if block.kind == "call":
            return self._call_events(step)
        name = "output_text" if block.kind == "text" else "reasoning_text"
        place = {"item_id": self._id_of(block), "output_index": block.index, "content_index": 0}
        if step.change is Change.GROW:
            more = self._new_logprobs() if block.kind == "text" else {}
            return self._event(f"response.{name}.delta", **place, delta=step.text, **more)
        if step.change is Change.BEGIN:
            empty = self._item(block, False) | {"content": []}
            events = self._event("response.output_item.added", output_index=block.index, item=empty)
            part = self._part(block) | {"text": ""}
            return events + self._event("response.content_part.added", **place, part=part)
        done = {"logprobs": self._logprobs} if block.kind == "text" else {}
        events = self._event(f"response.{name}.done", **place, text=block.text, **done)
        events += self._event("response.content_part.done", **place, part=self._part(block))
        return events + self._done(block)

    def _call_events(self, step: Step) -> bytes:
        block, name = step.block, "response.function_call_arguments"
        place = {"item_id": self._id_of(block), "output_index": block.index}
        if step.change is Change.BEGIN:
            empty = self._item(block, False) | {"arguments": ""}
            return self._event("response.output_item.added", output_index=block.index, item=empty)
        if step.change is Change.GROW:
            return self._event(f"{name}.delta", **place, delta=step.text)
        named = {"name": block.name, "arguments": block.text}
        return self._event(f"{name}.done", **place, **named) + self._done(block)

    def _done(self, block: Block) -> bytes:
        item = self._item(block)
        return self._event("response.output_item.done", output_index=block.index, item=item)

    def _new_logprobs(self) -> dict[str, Any]:
        new = self._logprobs[self._num_sent_logprobs :]
        self._num_sent_logprobs = len(self._logprobs)
        return {"logprobs": new}

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(content)}\n\n".encode()
