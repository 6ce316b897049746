"""Formats of tool calls, under the names of vLLM's tool call parsers."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanoserve.serve.http.tools import harmony, hermes, llama3_json, mistral
from nanoserve.serve.http.tools.parse_result import ToolCall
from nanoserve.utils.checks import require


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls: before + call + separator + call ... + after.

    A call is begin % name + its arguments as JSON + end.

    trigger: text that begins a call within free text; None if an output is either text or calls.
    special_tokens: special tokens of the format, which the output text must keep.
    is_in_json: True if the name is written as a JSON string.
    reasoning_parser: the parser of reasoning that the format implies: a whole output has this
    format, not only its calls.
    """

    name: str
    parse: Callable[[str, bool], tuple[str, list[ToolCall]]]
    begin: str
    end: str
    separator: str
    trigger: str | None
    before: str = ""
    after: str = ""
    special_tokens: tuple[str, ...] = ()
    is_in_json: bool = True
    reasoning_parser: str | None = None

    def call_begin(self, name: str) -> str:
        """Return the text of a call up to its arguments."""
        return self.begin % (json.dumps(name, ensure_ascii=False) if self.is_in_json else name)

    @property
    def keys_of_calls(self) -> list[str]:
        """The properties of a call that is a JSON object without a tag; empty for other calls."""
        is_object = self.trigger is None and self.begin.startswith("{")
        return re.findall(r'"(\w+)":', self.begin) if is_object else []


_FORMATS = [
    ToolFormat(
        "hermes",
        hermes.parse,
        begin='<tool_call>\n{"name": %s, "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
        special_tokens=(hermes.OPEN, hermes.CLOSE),
    ),
    ToolFormat(
        "llama3_json",
        llama3_json.parse,
        begin='{"name": %s, "parameters": ',
        end="}",
        separator="; ",
        trigger=None,
        special_tokens=(llama3_json.TAG,),
    ),
    ToolFormat(
        "mistral",
        mistral.parse,
        before="[TOOL_CALLS][",
        begin='{"name": %s, "arguments": ',
        end="}",
        separator=", ",
        after="]",
        trigger="[TOOL_CALLS]",
        special_tokens=(mistral.TAG, mistral.ARGUMENTS),
    ),
    ToolFormat(
        "openai",
        harmony.content_and_calls,
        begin="<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
        end="<|call|>",
        separator="<|start|>assistant",
        trigger=harmony.CHANNEL,
        special_tokens=harmony.SPECIAL_TOKENS,
        is_in_json=False,
        reasoning_parser=harmony.NAME,
    ),
]
FORMATS = {one.name: one for one in _FORMATS}
# Newer Mistral models name the function before its arguments. The same parser reads both.
_MISTRAL_BY_NAME = replace(
    FORMATS["mistral"],
    before="",
    begin="[TOOL_CALLS]%s[ARGS]",
    end="",
    separator="",
    after="",
    is_in_json=False,
)
# Signs in a template that its model uses a format for which there is no parser.
_UNKNOWN = ("<function=", "<arg_key>")


def detect(chat_template: str | None) -> ToolFormat | None:
    """Return the format of calls that a chat template shows to its model; None if unknown."""
    template = chat_template or ""
    if harmony.CHANNEL in template:
        return FORMATS["openai"]
    if any(sign in template for sign in _UNKNOWN):
        return None
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if mistral.TAG in template:
        return _MISTRAL_BY_NAME if mistral.ARGUMENTS in template else FORMATS["mistral"]
    is_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return FORMATS["llama3_json"] if is_llama or llama3_json.TAG in template else None


def formats_of(
    tool_call_parser: str | None, reasoning_parser: str | None, chat_template: str | None
) -> tuple[ToolFormat | None, str | None]:
    """Return the format of calls, None if unknown, and the name of the reasoning parser, or None.

    What is not given follows from the template, or from the other: in harmony, both are one format.
    """
    if tool_call_parser is not None:
        form: ToolFormat | None = FORMATS[tool_call_parser]
    elif reasoning_parser == harmony.NAME:
        form = FORMATS["openai"]
    else:
        form = detect(chat_template)
    implied = None if form is None else form.reasoning_parser
    if implied is not None and reasoning_parser not in (None, implied):
        form, implied = None, None  # the template's format is not that of the reasoning
    return form, reasoning_parser or implied


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise `ValueError` for two parsers that contradict each other: see `formats_of`."""
    if tool_call_parser is None or reasoning_parser is None:
        return
    implied = FORMATS[tool_call_parser].reasoning_parser
    require(
        reasoning_parser == implied or (implied is None and reasoning_parser != harmony.NAME),
        f"tool_call_parser={tool_call_parser!r} and reasoning_parser={reasoning_parser!r} "
        f"contradict each other: 'openai' and {harmony.NAME!r} belong together; omit one of them",
    )
