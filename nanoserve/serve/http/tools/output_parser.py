"""Parse the outputs of a request into reasoning, content and tool calls, whatever API it used."""

import random
import string
from collections.abc import Callable, Collection
from functools import partial
from uuid import uuid4

from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.parse_result import Parsed, ToolCall
from nanoserve.serve.http.tools.parser_state import parse_answer
from nanoserve.serve.http.tools.reasoning import REASONING, THINK, Thought, thought_at_end
from nanoserve.serve.http.tools.tool_choice import ToolUse


class OutputParser:
    """A parser for the outputs that follow one prompt.

    use: the tools that may be called, or None. reasoning_parser: name of the format of reasoning,
    or None. prompt: the text of the prompt, which may end inside the reasoning. body: the request,
    whose last message an output may continue.
    """

    def __init__(
        self, use: ToolUse | None, reasoning_parser: str | None, prompt: str | None, body: ChatBody
    ) -> None:
        self._use = use
        self._read = self._parser(reasoning_parser, prompt, body)

    def __call__(self, text: str, is_final: bool) -> Parsed:
        """Return the parts of the text so far; `is_final`: nothing follows it."""
        parsed = self._read(text, is_final)
        if self._use is not None and not self._use.allows_several:
            return parsed._replace(calls=parsed.calls[:1])
        return parsed

    def id_of(self, call: ToolCall, taken: Collection[str]) -> str:
        """Return the id of a call: the model's own, or a new one that its template accepts.

        taken: the ids of the calls before it.
        """
        if call.id is not None and call.id not in taken:
            return call.id
        if self._use is not None and self._use.format.name == "mistral":
            # Templates of these models accept no other ids when the client sends the call back.
            return "".join(random.choices(string.ascii_letters + string.digits, k=9))
        return f"call_{uuid4().hex[:24]}"

    def _parser(
        self, reasoning_parser: str | None, prompt: str | None, body: ChatBody
    ) -> Callable[[str, bool], Parsed]:
        """Return the function (text so far, is it all?) -> its parts."""
        use, is_inside, thoughts = self._use, None, THINK
        if reasoning_parser == harmony.NAME:
            has_format = body.constraint is not None if use is None else use.is_either
            begun = harmony.begun_in(prompt)
            read = partial(harmony.parse, has_tools=use is not None, begun=begun)
            return partial(read, is_final_last=has_format)
        if reasoning_parser is not None:
            thought = thought_at_end(prompt, reasoning_parser, body.continued)
            is_inside, thoughts = thought is Thought.OPEN, REASONING[reasoning_parser]
        form = None if use is None else use.format
        starts = use.call_starts if use is not None and use.is_either else ()
        parse = partial(parse_answer, tools=form, is_inside=is_inside, thoughts=thoughts)
        return partial(parse, call_starts=starts)
