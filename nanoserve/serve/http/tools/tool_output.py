"""Responses with tool calls or reasoning."""

import json
from typing import Any

from nanoserve.outputs import CompletionOutput
from nanoserve.serve.http.chat_completions import ChatAnswer
from nanoserve.serve.http.tools.output_parser import OutputParser
from nanoserve.serve.http.tools.parse_result import Parsed
from nanoserve.serve.http.tools.parser_state import NOTHING, difference
from nanoserve.serve.http.tools.tool_choice import ToolUse


def chat_answer(use: ToolUse | None, reasoning_parser: str | None, *args: Any) -> ChatAnswer:
    """Return the response of /v1/chat/completions; it is parsed only if there is reason to."""
    if use is None and reasoning_parser is None:
        return ChatAnswer(*args)
    return ToolAnswer(use, reasoning_parser, *args)


class ToolAnswer(ChatAnswer):
    """A response with tool calls or reasoning.

    For each output, the complete text so far is parsed again, and the difference is sent.
    """

    def __init__(self, use: ToolUse | None, reasoning_parser: str | None, *args: Any) -> None:
        super().__init__(*args)
        self._use, self._has_reasoning = use, reasoning_parser is not None
        self._parser = OutputParser(use, reasoning_parser, self.requests[0].prompt, self._body)
        self._texts: dict[int, str] = {}  # by choice, like the two below
        self._parsed: dict[int, Parsed] = {}
        self._ids: dict[int, list[str]] = {}

    def _parse(self, index: int, completion: CompletionOutput) -> Parsed:
        text = self._texts[index] = self._texts.get(index, "") + completion.text
        parsed = self._parser(text, completion.finish_reason is not None)
        ids = self._ids.setdefault(index, [])
        for call in parsed.calls[len(ids) :]:
            ids.append(self._parser.id_of(call, ids))
        return parsed

    def _news(self, index: int, completion: CompletionOutput) -> str:
        before, now = self._parsed.get(index, NOTHING), self._parse(index, completion)
        self._parsed[index] = now
        new = difference(before, now)
        delta: dict[str, Any] = {}
        if new.reasoning:
            delta |= {"reasoning": new.reasoning, "reasoning_content": new.reasoning}
        if new.content:
            delta["content"] = new.content
        if new.calls:
            delta["tool_calls"] = [
                {"index": number, "function": {"arguments": arguments}}
                if name is None
                else self._call(index, number, name, arguments) | {"index": number}
                for number, name, arguments in new.calls
            ]
        return json.dumps(delta) if delta else ""

    def _message(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        parsed = self._parsed[index] = self._parse(index, completion)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if self._has_reasoning:
            reasoning = parsed.reasoning or None
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                self._call(index, number, call.name, call.arguments)
                for number, call in enumerate(parsed.calls)
            ]
        return message | {"refusal": None}

    def _reason(self, index: int, completion: CompletionOutput) -> str | None:
        """Return the finish reason: "tool_calls" after calls that the model itself has chosen."""
        has_called = self._use is not None and not self._use.is_named and self._parsed[index].calls
        if completion.finish_reason == "stop" and has_called:
            return "tool_calls"
        return completion.finish_reason

    def _call(self, index: int, number: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": self._ids[index][number], "type": "function", "function": function}
