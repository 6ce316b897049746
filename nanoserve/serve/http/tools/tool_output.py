"""Responses with tool calls or reasoning."""

import json
import random
import string
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

from nanoserve.outputs import CompletionOutput
from nanoserve.serve.http.chat_completions import ChatAnswer
from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.parse_result import Parsed
from nanoserve.serve.http.tools.parser_state import NOTHING, difference, parse_answer
from nanoserve.serve.http.tools.reasoning import REASONING, THINK, Thought, thought_at_end
from nanoserve.serve.http.tools.tool_choice import ToolUse


class ToolAnswer(ChatAnswer):
    """A response with tool calls or reasoning.

    For each output, the complete text so far is parsed again, and the difference is sent.
    """

    def __init__(self, use: ToolUse | None, reasoning_parser: str | None, *args: Any) -> None:
        super().__init__(*args)
        self._use, self._has_reasoning = use, reasoning_parser is not None
        self._read = self._parser(reasoning_parser)
        self._texts: dict[int, str] = {}  # by choice, like the two below
        self._parsed: dict[int, Parsed] = {}
        self._ids: dict[int, list[str]] = {}

    def _parser(self, reasoning_parser: str | None) -> Callable[[str, bool], Parsed]:
        """Return the function (text so far, is it all?) -> its parts."""
        prompt, is_inside, use, thoughts = self.requests[0].prompt, None, self._use, THINK
        if reasoning_parser == harmony.NAME:
            has_format = self._body.constraint is not None if use is None else use.is_either
            begun = harmony.begun_in(prompt)
            read = partial(harmony.parse, has_tools=use is not None, begun=begun)
            return partial(read, is_final_last=has_format)
        if reasoning_parser is not None:
            thought = thought_at_end(prompt, reasoning_parser, self._body.continued)
            is_inside, thoughts = thought is Thought.OPEN, REASONING[reasoning_parser]
        form = None if use is None else use.format
        starts = use.call_starts if use is not None and use.is_either else ()
        parse = partial(parse_answer, tools=form, is_inside=is_inside, thoughts=thoughts)
        return partial(parse, call_starts=starts)

    def _parse(self, index: int, completion: CompletionOutput) -> Parsed:
        text = self._texts[index] = self._texts.get(index, "") + completion.text
        is_final = completion.finish_reason is not None
        parsed = self._read(text, is_final)
        if self._use is not None and not self._use.allows_several:
            parsed = parsed._replace(calls=parsed.calls[:1])
        ids = self._ids.setdefault(index, [])
        for call in parsed.calls[len(ids) :]:
            is_new = call.id is not None and call.id not in ids
            ids.append(call.id if call.id is not None and is_new else self._new_id())
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

    def _new_id(self) -> str:
        if self._use is not None and self._use.format.name == "mistral":
            # Templates of these models accept no other ids when the client sends the call back.
            return "".join(random.choices(string.ascii_letters + string.digits, k=9))
        return f"call_{uuid4().hex[:24]}"
