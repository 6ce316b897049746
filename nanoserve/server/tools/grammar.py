"""Grammars for calls: what must be called is, and strict functions get what they ask for."""

import json
import re
from collections.abc import Callable

from nanoserve.server.errors import ApiError
from nanoserve.server.tools.asked import Function, ToolUse
from nanoserve.server.tools.reasoning import CLOSE, OPEN
from nanoserve.structured.config import StructuredOutputsConfig
from nanoserve.structured.params import StructuredOutputsParams
from nanoserve.structured.regex import portable

_MOST_CALLS = 16
# JSON in one way, with a space behind each comma and colon.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# The id of a special token by its text, or None.
SpecialId = Callable[[str], int | None]


def guide_of_tools(use: ToolUse, special_id: SpecialId) -> StructuredOutputsParams | None:
    """What the answer must look like; None if it may say anything."""
    is_strict = any(function.is_strict for function in use.functions)
    if not use.must_call and not is_strict:
        return None
    form, writer = use.format, _Writer(special_id)
    trigger = form.trigger or ""
    before, separator, after = map(writer.literal, (form.before, form.separator, form.after))
    more = f"({separator} call){{0,{_MOST_CALLS - 1}}}" if use.allows_several else ""
    rules, begin = [f"calls: {before} call {more} {after}"], form.call_begin
    if use.must_call:
        rules.insert(0, "start: calls")
    elif form.trigger is None:  # an answer is text or calls, and its first letter tells
        rules[:0] = ["start: calls | TEXT", r"TEXT: /[^{\s](.|\n)*/"]
    elif special_id(trigger) is not None:  # free text cannot hold it
        rules[:0] = ["start: TEXT | TEXT calls TEXT", r"TEXT: /(.|\n)*/"]
    else:  # free text, in which what begins as a call goes on as one
        several = _MOST_CALLS if use.allows_several and not form.before else 1
        if form.before:
            opening = writer.literal(form.before.removeprefix(trigger))
            rules = [f"tagged: trigger {opening} call {more} {after}"]
        else:
            rules = ["tagged: trigger call"]

            def begin(name: str) -> str:
                return form.call_begin(name).removeprefix(trigger)

        rules += [
            f"start: tagged{{0,{several}}} TEXT",
            f"trigger[lazy]: /(.|\\n)*{_escaped(trigger)}/",
            r"TEXT: /(.|\n)*/",
        ]
    rules += writer.calls(use.functions, begin, form.end)
    return StructuredOutputsParams(grammar="\n".join(["%llguidance {}", *rules]))


def behind_reasoning(
    guide: StructuredOutputsParams, is_inside: bool, special_id: SpecialId
) -> StructuredOutputsParams:
    """The same for a model that thinks first: its thoughts are free.

    is_inside: whether the answer begins within one; else it may open one, or not.
    """
    writer, rules = _Writer(special_id), _rules_of(guide)
    close = special_id(CLOSE)
    thought = f"thought[lazy]: /(.|\\n)*{_escaped(CLOSE)}/"
    if close is not None:
        thought = rf"thought: /(.|\n)*/ <[{close}]>"
    opened = f"{writer.literal(OPEN)} thought SPACE content"
    other = "thought SPACE content" if is_inside else "content"
    start = f"start: {opened} | {other}"
    lines = ["%llguidance {}", start, thought, r"SPACE: /[ \n]*/", *rules]
    return StructuredOutputsParams(grammar="\n".join(lines))


def _rules_of(guide: StructuredOutputsParams) -> list[str]:
    """The rule `content`, and those that it needs."""
    if guide.grammar is not None and guide.grammar.startswith("%llguidance"):  # of tools
        lines = guide.grammar.split("\n")[1:]
        return [re.sub("^start:", "content:", line) for line in lines]
    source = guide.source(StructuredOutputsConfig())
    if source.kind == "regex":
        regex = portable(source.text).replace("/", r"\/").replace("\n", r"\n")
        return [f"content: /{regex}/"]
    if source.kind == "choice":
        return ["content: CHOICE", "CHOICE: " + " | ".join(map(json.dumps, guide.choice or ()))]
    if source.kind == "json" and not source.whitespace:
        return [f"content: %json {json.dumps(json.loads(source.text) | {'x-guidance': _COMPACT})}"]
    told = (
        "with a --reasoning-parser, formats are JSON in one line, regular expressions and choices"
    )
    raise ApiError(400, told, "structured_outputs", "unsupported")


class _Writer:
    """Writes rules of Lark's."""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id

    def calls(self, functions: list[Function], begin: Callable[[str], str], end: str) -> list[str]:
        """The rule `call`: one of these functions, with arguments by its schema."""
        rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
        for number, function in enumerate(functions):
            name, schema = function.name, function.parameters | {"x-guidance": _COMPACT}
            rules.append(
                f"call_{number}: {self.literal(begin(name))} args_{number} {self.literal(end)}"
            )
            rules.append(f"args_{number}: %json {json.dumps(schema)}")
        return rules

    def literal(self, text: str) -> str:
        """A text, whose special tokens are themselves and not their letters."""
        parts: list[str] = []
        for tag in re.findall(r"<\|[^|]*\|>|\[[A-Z_]+\]", text):
            token_id = self._special_id(tag)
            if token_id is not None:
                before, _, text = text.partition(tag)
                parts += [json.dumps(before)] if before else []
                parts.append(f"<[{token_id}]>")
        return " ".join(parts + ([json.dumps(text)] if text else []))


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
