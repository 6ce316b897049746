"""Grammars for tool calls, which enforce required calls and the schemas of strict functions."""

import json
import re
from collections.abc import Callable
from typing import Any

from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.params import StructuredOutputsParams
from nanoserve.features.structured.regex import portable
from nanoserve.features.structured.schema_numbers import spelled
from nanoserve.features.structured.schemas import COMPACT, json_rule
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.response_format import refusal
from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.reasoning import THINK, ReasoningFormat, Thought
from nanoserve.serve.http.tools.tool_choice import Function, ToolUse

_MOST_CALLS = 16
_ANY_ARGUMENTS = '{"type": "object"}'
_MOST_THOUGHTS = 8  # messages before the last one
_CALLS = "%llguidance {}\n// of harmony"  # begins the grammars of calls in harmony
_FINAL = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
_TAG = re.compile(r"</?[|｜]?[^<>|｜\s]+[|｜]?>|\[/?[A-Z_]+\]")  # may be a special token

# Returns the id of a special token by its text, or None.
SpecialId = Callable[[str], int | None]


def constraint_of_tools(
    use: ToolUse, special_id: SpecialId, config: StructuredOutputsConfig | None = None
) -> StructuredOutputsParams | None:
    """Return the structured output constraint for an output with tools; None if it is free.

    config: the engine's options, which determine how schemas are compiled. Raises `ApiError` that
    names the function whose schema is not supported.
    """
    is_strict = any(function.is_strict for function in use.functions)
    if not use.must_call and not is_strict:
        return None
    form, writer = use.format, _Writer(special_id, config or StructuredOutputsConfig())
    if form.reasoning_parser == harmony.NAME:
        return StructuredOutputsParams(grammar=_messages_that_call(use, writer))
    trigger = form.trigger or ""
    before, separator, after = map(writer.literal, (form.before, form.separator, form.after))
    more = f"({separator} call){{0,{_MOST_CALLS - 1}}}" if use.allows_several else ""
    rules, begin = [f"calls: {before} call {more} {after}"], form.call_begin
    if use.must_call:
        rules.insert(0, "start: calls")
    elif form.trigger is None:  # an output is text or calls, as its first character decides
        first = re.escape((form.before or form.begin)[0])
        rules[:0] = ["start: calls | TEXT", rf"TEXT: /[^{first}\s](.|\n)*/"]
    elif special_id(trigger) is not None:  # free text cannot contain a special token
        rules[:0] = ["start: TEXT | TEXT calls TEXT", r"TEXT: /(.|\n)*/"]
    else:  # free text, in which the trigger must be followed by a valid call
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
    rules += writer.calls(use, begin, form.end)
    return StructuredOutputsParams(grammar="\n".join(["%llguidance {}", *rules]))


def schemas_of_tools(use: ToolUse) -> list[tuple[str, StructuredOutputsParams]]:
    """Return the schemas that `constraint_of_tools` enforces, each with its request field."""
    return [(one.field, _arguments(one)) for one in use.functions if use.must_call or one.is_strict]


def behind_reasoning(
    constraint: StructuredOutputsParams,
    thought: Thought,
    special_id: SpecialId,
    config: StructuredOutputsConfig | None = None,
    field: str = "structured_outputs",
    form: ReasoningFormat = THINK,
) -> StructuredOutputsParams:
    """Return a constraint that applies after the reasoning of the model, which is free text.

    thought: state of the reasoning at the end of the prompt. Open reasoning is closed first; after
    closed reasoning the constraint applies at once; otherwise the output may open some.
    field: request field that an `ApiError` names for a constraint that cannot follow reasoning.
    form: the format of the reasoning.
    """
    if thought is Thought.CLOSED:
        return constraint
    config = config or StructuredOutputsConfig()
    writer, rules = _Writer(special_id, config), _rules_of(constraint, config, field)
    close = special_id(form.closes[0])
    closes = "|".join(map(_escaped, form.closes))
    rule = f"thought[lazy]: /(.|\\n)*({closes})/"
    if close is not None:
        rule = rf"thought: /(.|\n)*/ <[{close}]>"
    opens = " | ".join(map(writer.literal, form.opens))
    opened = f"({opens}) thought SPACE content"
    other = "thought SPACE content" if thought is Thought.OPEN else "content"
    start = f"start: {opened} | {other}"
    lines = ["%llguidance {}", start, rule, r"SPACE: /[ \n]*/", *rules]
    return StructuredOutputsParams(grammar="\n".join(lines))


def behind_analysis(
    constraint: StructuredOutputsParams,
    special_id: SpecialId,
    config: StructuredOutputsConfig | None = None,
    field: str = "structured_outputs",
    *,
    begun: str = "",
) -> StructuredOutputsParams:
    """Return a constraint on the last message of harmony, after up to `_MOST_THOUGHTS` free ones.

    Free are messages of the channel "analysis", and of "commentary" without a recipient. begun: see
    `harmony.begun_in`; inside of a message of the prompt, the constraint applies at once.
    """
    if harmony.MESSAGE in begun:
        return constraint
    config = config or StructuredOutputsConfig()
    writer, rules = _Writer(special_id, config), _rules_of(constraint, config, field)
    if not (constraint.grammar or "").startswith(_CALLS):  # the content of the answer
        rules = [re.sub("^content:", "answer:", rule) for rule in rules]
        rules.insert(0, f"content: {writer.literal(_FINAL)} answer")
    between = writer.literal(f"{harmony.END}{harmony.START}{harmony.ROLE}")
    headers = (f"{harmony.CHANNEL}{name}{harmony.MESSAGE}" for name in ("analysis", "commentary"))
    thought = " | ".join(f"{writer.literal(header)} THOUGHT {between}" for header in headers)
    lines = [
        "%llguidance {}",
        f"start: thought{{0,{_MOST_THOUGHTS}}} content",
        f"thought: {thought}",
        r"THOUGHT: /(.|\n)*/",
        *rules,
    ]
    return StructuredOutputsParams(grammar="\n".join(lines))


def _messages_that_call(use: ToolUse, writer: "_Writer") -> str:
    """Return the grammar of the last message: a call, or if none is required, an answer."""
    rules = [_CALLS, "start: call"]
    if not use.must_call:
        rules[1:] = ["start: call | answer", f"answer: {writer.literal(_FINAL)} TEXT"]
        rules += [r"TEXT: /(.|\n)*/"]
    # The end of a call ends the output, and is no part of the grammar.
    return "\n".join([*rules, *writer.calls(use, use.format.call_begin, "")])


def _rules_of(
    constraint: StructuredOutputsParams, config: StructuredOutputsConfig, field: str
) -> list[str]:
    """Return the rule `content` for a constraint, and the rules that it needs."""
    if constraint.grammar is not None and constraint.grammar.startswith(
        "%llguidance"
    ):  # made for tools
        lines = constraint.grammar.split("\n")[1:]
        return [re.sub("^start:", "content:", line) for line in lines]
    source = constraint.source(config)
    if source.kind == "regex":
        regex = portable(source.text).replace("/", r"\/").replace("\n", r"\n")
        return [f"content: /{regex}/"]
    if source.kind == "choice":
        return [
            "content: CHOICE",
            "CHOICE: " + " | ".join(map(json.dumps, constraint.choice or ())),
        ]
    if source.kind == "json" and not source.whitespace:
        return [f"content: {json_rule(spelled(source.text), COMPACT)}"]
    raise ApiError(
        400,
        f"{field}: with --reasoning-parser, only JSON without free whitespace, regular expressions "
        f"and choices are supported",
        field,
        "unsupported",
    )


def _arguments(function: Function) -> StructuredOutputsParams:
    """Return the constraint on the arguments of a function, which are always an object."""
    schema = function.parameters
    if "type" not in schema and "properties" in schema:
        schema = {"type": "object"} | schema
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


class _Writer:
    """Writes rules in Lark's syntax."""

    def __init__(self, special_id: SpecialId, config: StructuredOutputsConfig) -> None:
        self._special_id, self._config = special_id, config

    def calls(self, use: ToolUse, begin: Callable[[str], str], end: str) -> list[str]:
        """Return the rule `call`: one of the functions, with arguments that follow its schema.

        The schema of a function that is neither strict nor required is not enforced.
        """
        functions = use.functions
        rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
        rules += ["NUMBER: /[0-9]{1,4}/"] if use.format.is_numbered else []
        for number, function in enumerate(functions):
            text, after = begin(function.name), self.literal(end)
            before = self.literal(text)
            if use.format.is_numbered:
                head, _, tail = text.rpartition("0")
                before = f"{self.literal(head)} NUMBER {self.literal(tail)}"
            rules.append(f"call_{number}: {before} args_{number} {after}")
            schema = None
            if use.must_call or function.is_strict:
                schema = self._schema_of(function)
            arguments, writer = f"args_{number}", use.format.arguments
            if writer is None:
                rules.append(f"{arguments}: {json_rule(schema or _ANY_ARGUMENTS, COMPACT)}")
                continue
            parsed = None if schema is None else json.loads(schema)
            try:
                rules += writer.rules(arguments, parsed, _compact_rule)
            except ValueError as error:
                raise refusal(error, function.field) from error
        return rules

    def _schema_of(self, function: Function) -> str:
        try:
            return spelled(_arguments(function).source(self._config).text)
        except ValueError as error:
            raise refusal(error, function.field) from error

    def literal(self, text: str) -> str:
        """Return the terminals for a string, with special tokens as tokens, not as characters."""
        parts: list[str] = []
        for tag in _TAG.findall(text):
            token_id = self._special_id(tag)
            if token_id is not None:
                before, _, text = text.partition(tag)
                parts += [json.dumps(before)] if before else []
                parts.append(f"<[{token_id}]>")
        return " ".join(parts + ([json.dumps(text)] if text else []))


def _compact_rule(schema: dict[str, Any]) -> str:
    return json_rule(spelled(json.dumps(schema)), COMPACT)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
