"""Formats of tool calls, under the names of vLLM's tool call parsers."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nanoserve.serve.http.tools import (
    granite,
    harmony,
    hermes,
    llama3_json,
    mistral,
    pythonic,
    sections,
    tagged,
)
from nanoserve.serve.http.tools.parse_result import ToolCall
from nanoserve.serve.http.tools.raw_arguments import (
    ArgumentWriter,
    PythonArguments,
    TaggedArguments,
)
from nanoserve.serve.http.tools.sections import Section
from nanoserve.serve.http.tools.tagged import Tags


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls: before + call + separator + call ... + after.

    A call is begin % name + its arguments + end. The arguments are JSON unless `arguments` writes
    them in another form.

    parse: returns (content, calls) of a text, which is complete if its second argument is True.
    trigger: text that begins a call within free text; None if an output is either text or calls.
    other_starts: further texts at which `parse` begins a call, as models leave the trigger out.
    special_tokens: special tokens of the format, which the output text must keep.
    is_in_json: True if the name is written as a JSON string.
    reasoning_parser: the parser of reasoning that the format implies: a whole output has this
    format, not only its calls. reads_schemas: True if `parse` needs the schemas of the functions,
    since arguments are written without types. is_numbered: True if a model counts its calls: the
    last 0 in `begin` stands for any number. names: pattern of the function names that `parse`
    reads; None if it reads all that a request may have.
    """

    name: str
    parse: Callable[..., tuple[str, list[ToolCall]]]
    begin: str
    end: str
    separator: str
    trigger: str | None
    before: str = ""
    after: str = ""
    special_tokens: tuple[str, ...] = ()
    is_in_json: bool = True
    reasoning_parser: str | None = None
    arguments: ArgumentWriter | None = None
    reads_schemas: bool = False
    is_numbered: bool = False
    other_starts: tuple[str, ...] = ()
    names: re.Pattern[str] | None = None

    @property
    def starts(self) -> tuple[str, ...]:
        """All texts at which `parse` begins a call within free text."""
        return () if self.trigger is None else (self.trigger, *self.other_starts)

    def for_functions(self, schemas: Mapping[str, Mapping[str, Any]]) -> "ToolFormat":
        """Return the format for functions with these schemas, by name."""
        if not self.reads_schemas:
            return self
        return replace(self, parse=partial(self.parse, schemas=schemas))

    def call_begin(self, name: str) -> str:
        """Return the text of a call up to its arguments."""
        return self.begin % (json.dumps(name, ensure_ascii=False) if self.is_in_json else name)

    @property
    def keys_of_calls(self) -> list[str]:
        """The properties of a call that is a JSON object without a tag; empty for other calls."""
        is_object = self.trigger is None and self.begin.startswith("{")
        return re.findall(r'"(\w+)":', self.begin) if is_object else []


def _tagged(
    name: str,
    tags: Tags,
    begin: str,
    end: str,
    argument: tuple[str, str, str],
    separator: str = "\n",
    before: str = "",
    after: str = "",
) -> ToolFormat:
    """Return a format with tags. argument: the text up to a value, its tag, and what follows."""
    own = (tags.open, tags.close, tags.key_open, tags.key_close, tags.value_open, tags.value_close)
    return ToolFormat(
        name,
        partial(tagged.parse, tags=tags),
        begin=begin,
        end=end,
        separator=separator,
        trigger=tags.open,
        before=before,
        after=after,
        special_tokens=tuple(filter(None, own)),
        is_in_json=False,
        arguments=TaggedArguments(tags, *argument),
        reads_schemas=True,
        other_starts=tags.starts[1:],
    )


def _in_section(name: str, section: Section, separator: str = "") -> ToolFormat:
    return ToolFormat(
        name,
        partial(sections.parse, section=section),
        before=section.open,
        begin=section.call_begin,
        end=section.call_end,
        separator=separator,
        after=section.close,
        trigger=section.open,
        special_tokens=section.special_tokens,
        is_in_json=False,
        is_numbered=section.is_numbered,
        other_starts=section.starts[1:],
    )


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
    ToolFormat(
        "pythonic",
        pythonic.parse,
        before="[",
        begin="%s(",
        end=")",
        separator=", ",
        after="]",
        trigger=None,
        special_tokens=(pythonic.START, pythonic.END),
        is_in_json=False,
        arguments=PythonArguments(),
        names=pythonic.NAMES,
    ),
    ToolFormat(
        "granite",
        granite.parse,
        before=f"{granite.TAG}[",
        begin='{"name": %s, "arguments": ',
        end="}",
        separator=", ",
        after="]",
        trigger=granite.TAG,
        special_tokens=(granite.TAG,),
        other_starts=granite.TAGS[1:],
    ),
    _in_section("deepseek_v3", sections.DEEPSEEK_V3, separator="\n"),
    _in_section("deepseek_v31", sections.DEEPSEEK_V31),
    _in_section("kimi_k2", sections.KIMI_K2),
    _tagged(
        "qwen3_coder",
        tagged.QWEN3_CODER,
        "<tool_call>\n<function=%s>\n",
        "</function>\n</tool_call>",
        ("<parameter=%s>\n", "\n</parameter>", "\n"),
    ),
    _tagged(
        "seed_oss",
        tagged.SEED_OSS,
        "<seed:tool_call>\n<function=%s>\n",
        "</function>\n</seed:tool_call>",
        ("<parameter=%s>", "</parameter>", "\n"),
    ),
    _tagged(
        "glm45",
        tagged.GLM,
        "<tool_call>%s\n",
        "</tool_call>",
        ("<arg_key>%s</arg_key>\n<arg_value>", "</arg_value>", "\n"),
    ),
    _tagged(
        "glm47",
        tagged.GLM,
        "<tool_call>%s",
        "</tool_call>",
        ("<arg_key>%s</arg_key><arg_value>", "</arg_value>", ""),
        separator="",
    ),
    _tagged(
        "minimax_m2",
        tagged.MINIMAX_M2,
        '<invoke name="%s">\n',
        "</invoke>\n",
        ('<parameter name="%s">', "</parameter>", "\n"),
        separator="",
        before="<minimax:tool_call>\n",
        after="</minimax:tool_call>",
    ),
]
FORMATS = {one.name: one for one in _FORMATS}
# Other names that vLLM has for a format, or for one that the same parser reads.
_ALIASES = {
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
FORMATS |= {alias: FORMATS[name] for alias, name in _ALIASES.items()}
# Newer Mistral models name the function before its arguments. The same parser reads both.
MISTRAL_BY_NAME = replace(
    FORMATS["mistral"],
    before="",
    begin="[TOOL_CALLS]%s[ARGS]",
    end="",
    separator="",
    after="",
    is_in_json=False,
)
