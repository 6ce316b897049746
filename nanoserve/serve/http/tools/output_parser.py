"""Parse the outputs of a request into reasoning, content and tool calls, whatever API it used."""

import random
import string
from collections.abc import Callable
from functools import partial
from uuid import uuid4

from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.parse_result import Parsed
from nanoserve.serve.http.tools.parser_state import parse_answer
from nanoserve.serve.http.tools.reasoning import Thought, thought_at_end
from nanoserve.serve.http.tools.tool_choice import ToolUse


class OutputParser:
    """A parser for the outputs that follow one prompt.

    use: the tools that may be called, or None. reasoning_parser: name of the format of reasoning,
    or None. prompt: the text of the prompt, which may end inside the reasoning. continued: the
    message at its end that an output continues (see `thought_at_end`).
    """

    def __init__(
        self, use: ToolUse | None, reasoning_parser: str | None, prompt: str | None, continued: str
    ) -> None:
        self._use = use
        self._read = self._parser(reasoning_parser, prompt, continued)

    def __call__(self, text: str, is_final: bool) -> Parsed:
        """Return the parts of the text so far; `is_final`: nothing follows it."""
        parsed = self._read(text, is_final)
        if self._use is not None and not self._use.allows_several:
            return parsed._replace(calls=parsed.calls[:1])
        return parsed

    def new_call_id(self) -> str:
        """Return an id for a call, in a form that the model's template accepts."""
        if self._use is not None and self._use.format.name == "mistral":
            # Templates of these models accept no other ids when the client sends the call back.
            return "".join(random.choices(string.ascii_letters + string.digits, k=9))
        return f"call_{uuid4().hex[:24]}"

    def _parser(
        self, reasoning_parser: str | None, prompt: str | None, continued: str
    ) -> Callable[[str, bool], Parsed]:
        """Return the function (text so far, is it all?) -> its parts."""
        is_inside = None
        if reasoning_parser == harmony.NAME:
            has_tools, begun = self._use is not None, harmony.begun_in(prompt)
            return partial(harmony.parse, has_tools=has_tools, begun=begun)
        if reasoning_parser is not None:
            is_inside = thought_at_end(prompt, reasoning_parser, continued) is Thought.OPEN
        form = None if self._use is None else self._use.format
        return partial(parse_answer, tools=form, is_inside=is_inside)
