"""Formats of tool calls, under the names of vLLM's tool call parsers."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanoserve.serve.http.tools import hermes, llama3_json, mistral
from nanoserve.serve.http.tools.parse_result import ToolCall


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls: before + call + separator + call ... + after.

    A call is begin % name + its arguments as JSON + end.

    trigger: text that begins a call within free text; None if an output is either text or calls.
    special_tokens: special tokens of the format, which the output text must keep.
    is_in_json: True if the name is written as a JSON string.
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

    def call_begin(self, name: str) -> str:
        """Return the text of a call up to its arguments."""
        return self.begin % (json.dumps(name, ensure_ascii=False) if self.is_in_json else name)


_FORMATS = [
    ToolFormat(
        "hermes",
        hermes.parse,
        begin='<tool_call>\n{"name": %s, "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
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
    if any(sign in template for sign in _UNKNOWN):
        return None
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if mistral.TAG in template:
        return _MISTRAL_BY_NAME if mistral.ARGUMENTS in template else FORMATS["mistral"]
    is_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return FORMATS["llama3_json"] if is_llama or llama3_json.TAG in template else None
