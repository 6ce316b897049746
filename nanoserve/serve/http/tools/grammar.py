"""Grammars for tool calls, which enforce required calls and the schemas of strict functions."""

import json
import re
from collections.abc import Callable
from typing import Any

from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.params import StructuredOutputsParams
from nanoserve.features.structured.schema_numbers import spelled
from nanoserve.features.structured.schemas import COMPACT, json_rule
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.response_format import refusal
from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.content_rules import escaped, not_beginning, not_within, rules_of
from nanoserve.serve.http.tools.reasoning import THINK, ReasoningFormat, Thought
from nanoserve.serve.http.tools.tool_choice import Function, ToolUse

_MOST_CALLS = 16
_ANY_ARGUMENTS = '{"type": "object"}'
_MOST_THOUGHTS = 8  # messages before the last one
_HEAD = "%llguidance {}"
# These begin the grammars of calls in harmony. In the second, an answer has a format of its own.
_CALLS = f"{_HEAD}\n// of harmony"
_EITHER = f"{_CALLS}: calls, or an answer with a format"
_FINAL = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
# Terminals of `content_rules` and of the rules below that may match any text.
_TERMINAL = re.compile(r"^(TEXT|TRIGGER|CONTENT|ANSWER): .*")
# Texts that may be special tokens.
_TAG = re.compile(r"</?[|｜]?[^<>|｜\s]+[|｜]?>|\[/?[A-Z_]+\]")
_ANY = r"/(.|\n)*/"
# Between the reasoning and the answer. Without a bound, a weak model writes nothing else.
_SPACE = r"SPACE: /[ \n]{0,4}/"

# Returns the id of a special token by its text, or None.
SpecialId = Callable[[str], int | None]


def constraint_of_tools(
    use: ToolUse,
    special_id: SpecialId,
    config: StructuredOutputsConfig | None = None,
    content: StructuredOutputsParams | None = None,
    content_field: str = "response_format",
) -> StructuredOutputsParams | None:
    """Return the structured output constraint for an output with tools; None if it is free.

    config: the engine's options, which determine how schemas are compiled. content: the constraint
    on an output without calls, from the request field `content_field`, if `use.is_either`. Raises
    `ApiError` that names the function whose schema is not supported.
    """
    config = config or StructuredOutputsConfig()
    field = field_that_needs_grammar(use, content_field)
    if field is None:
        return None
    if field == "parallel_tool_calls" and not _has_guidance(config):
        return None  # further calls are not enforced to be absent, but left out of the answer
    check_backend(config, field)
    form, writer = use.format, _Writer(special_id, config)
    answer: list[str] = []
    if use.is_either and content is not None:
        answer = rules_of(content, config, content_field, "answer", use)
    if form.reasoning_parser == harmony.NAME:
        return _checked(_messages_that_call(use, writer, answer))
    trigger = form.trigger or ""
    before, separator, after = map(writer.literal, (form.before, form.separator, form.after))
    more = f"({separator} call){{0,{_MOST_CALLS - 1}}}" if use.allows_several else ""
    rules, begin = [f"calls: {before} call {more} {after}"], form.call_begin
    if use.must_call:
        rules.insert(0, "start: calls")
    elif answer:
        rules[:0] = ["start: calls | answer", *answer]
        if form.keys_of_calls and "%json" in answer[0]:
            return _checked([_HEAD, *rules, *writer.calls_as_json(use)])
    elif form.trigger is None:  # an output is text or calls, as its first character decides
        first = re.escape((form.before or form.begin)[0])
        tags = not_beginning(form.special_tokens)
        rules[:0] = ["start: calls | TEXT", rf"TEXT: /[^{first}\s](.|\n)*/{tags}"]
    elif special_id(trigger) is not None:  # free text cannot contain a special token
        rules[:0] = ["start: TEXT | TEXT calls TEXT", f"TEXT: {_ANY}{not_within(form.starts)}"]
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
            "trigger[lazy]: TRIGGER",
            f"TRIGGER: /(.|\\n)*{escaped(trigger)}/{not_within(form.other_starts)}",
            f"TEXT: {_ANY}{not_within(form.starts)}",
        ]
    rules += writer.calls(use, begin, form.end)
    return _checked([_HEAD, *rules])


def check_backend(config: StructuredOutputsConfig, field: str) -> None:
    """Raise `ApiError` that names `field` if the grammar backend does not combine text and JSON.

    Custom backends are consulted when the whole grammar is checked.
    """
    try:
        name = config.backend_name
    except ValueError as error:
        raise ApiError(400, f"{field}: {error}", field, "unsupported") from error
    if name == "xgrammar":
        message = f"{field}: the grammar backend {name!r} of this server cannot enforce a grammar "
        message += "for tool calls or after reasoning; start it with the backend 'guidance'"
        raise ApiError(400, message, field, "unsupported")


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
    if thought is Thought.NONE:  # what begins like reasoning is reasoning, not free text
        rules = [_TERMINAL.sub(rf"\g<0>{not_beginning(form.opens)}", rule) for rule in rules]
    close = special_id(form.closes[0])
    closes = "|".join(map(escaped, form.closes))
    after = ["thought SPACE content"]
    thought_rules = [
        "thought[lazy]: THOUGHT",
        f"THOUGHT: /(.|\\n)*({closes})/{not_within(form.ends)}",
    ]
    if close is not None:
        after += [f"THOUGHT {calls}" for calls in _calls_that_begin(form.ends, rules, writer)]
        thought_rules = [
            f"thought: THOUGHT <[{close}]>",
            f"THOUGHT: {_ANY}{not_within(form.closes + form.ends)}",
        ]
    opened = f"({' | '.join(map(writer.literal, form.opens))}) reasoned"
    other = "reasoned" if thought is Thought.OPEN else "content"
    start = [f"start: {opened} | {other}", f"reasoned: {' | '.join(after)}"]
    return _checked([_HEAD, *start, *thought_rules, _SPACE, *rules], field)


def _calls_that_begin(ends: tuple[str, ...], rules: list[str], writer: "_Writer") -> list[str]:
    """Return the alternatives of the rule `content` that are calls which begin with one of `ends`.

    Such a token ends the reasoning without a closing tag.
    """
    begins = tuple(f"calls: {writer.literal(end)} " for end in ends)
    if not any(rule.startswith(begins) for rule in rules):
        return []
    content = next(rule for rule in rules if rule.startswith("content: "))
    alternatives = content.removeprefix("content: ").split(" | ")
    found = (one.removeprefix("TEXT ") for one in alternatives)
    return [one for one in found if one.startswith("calls")]


def behind_analysis(
    constraint: StructuredOutputsParams,
    special_id: SpecialId,
    config: StructuredOutputsConfig | None = None,
    field: str = "structured_outputs",
    *,
    begun: str = "",
) -> StructuredOutputsParams:
    """Return a constraint on the last message of harmony, after up to `_MOST_THOUGHTS` free ones.

    Free are messages of the channel "analysis". Unless the content of the answer is constrained,
    messages of "commentary" without a recipient are free, too: they are content. begun: see
    `harmony.begun_in`; in a message of the prompt that is content, the constraint on content
    applies at once.
    """
    is_thinking = f"{harmony.CHANNEL}analysis" in begun
    if harmony.MESSAGE in begun and not is_thinking:
        return _content_of(constraint)
    config = config or StructuredOutputsConfig()
    writer, rules = _Writer(special_id, config), _rules_of(constraint, config, field)
    grammar, channels = constraint.grammar or "", ["analysis"]
    if not grammar.startswith(_CALLS):  # the content of the answer
        rules = [re.sub("^content:", "answer:", rule) for rule in rules]
        rules.insert(0, f"content: {writer.literal(_FINAL)} answer")
    elif not grammar.startswith(_EITHER):
        channels.append("commentary")
    between = writer.literal(f"{harmony.END}{harmony.START}{harmony.ROLE}")
    headers = (f"{harmony.CHANNEL}{name}{harmony.MESSAGE}" for name in channels)
    thought = " | ".join(f"{writer.literal(header)} THOUGHT {between}" for header in headers)
    first = f"THOUGHT {between} " if is_thinking and harmony.MESSAGE in begun else ""
    return _checked(
        [
            _HEAD,
            f"start: {first}thought{{0,{_MOST_THOUGHTS}}} content",
            f"thought: {thought}",
            f"THOUGHT: {_ANY}{not_within(harmony.SPECIAL_TOKENS)}",
            *rules,
        ],
        field,
    )


def _content_of(constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the constraint on content, if the constraint is one on calls or content."""
    grammar = constraint.grammar or ""
    if not grammar.startswith(_EITHER):
        return constraint
    return _checked([re.sub("^start: .*", "start: answer", line) for line in grammar.split("\n")])


def field_that_needs_grammar(use: ToolUse, content_field: str) -> str | None:
    """Return a request field that only a grammar can enforce; None if there is none."""
    if use.must_call:
        return "tool_choice"
    if use.is_either:
        return content_field
    if use.is_limited:
        return "tool_choice"
    strict = (one.number for one in use.functions if one.is_strict)
    number = next(strict, None)
    if number is not None:
        return f"tools[{number}].function.strict"
    return None if use.allows_several else "parallel_tool_calls"


def _has_guidance(config: StructuredOutputsConfig) -> bool:
    """Return True if the grammar backend is llguidance, and is installed."""
    try:
        return config.backend_name == "guidance"
    except ValueError:
        return False


def _messages_that_call(use: ToolUse, writer: "_Writer", answer: list[str]) -> list[str]:
    """Return the grammar of the last message: a call, or if none is required, an answer.

    answer: the rule `answer` and those that it needs, if the answer has a format.
    """
    rules = [_EITHER if answer else _CALLS, "start: call"]
    if not use.must_call:
        text = ["answer: TEXT", f"TEXT: {_ANY}{not_within(harmony.SPECIAL_TOKENS)}"]
        final = f"final: {writer.literal(_FINAL)} answer"
        rules[1:] = ["start: call | final", final, *(answer or text)]
    # The end of a call ends the output, and is no part of the grammar.
    return [*rules, *writer.calls(use, use.format.call_begin, "")]


def _rules_of(
    constraint: StructuredOutputsParams, config: StructuredOutputsConfig, field: str
) -> list[str]:
    """Return the rule `content` for a constraint, and the rules that it needs."""
    check_backend(config, field)
    grammar = constraint.grammar or ""
    if not grammar.startswith("%llguidance"):
        return rules_of(constraint, config, field)
    return [re.sub("^start:", "content:", line) for line in grammar.split("\n")[1:]]


def _checked(lines: list[str], field: str = "tools") -> StructuredOutputsParams:
    """Return the constraint for a grammar made here. Raises `ApiError` if it is too large."""
    try:
        return StructuredOutputsParams(grammar="\n".join(lines))
    except ValueError as error:
        size = str(error).removeprefix(_HEAD.split()[0]).strip()
        raise ApiError(400, f"{field}: the grammar made of it {size}", field) from error


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
                rules.append(
                    f"{arguments}: {json_rule(spelled(schema or _ANY_ARGUMENTS), COMPACT)}"
                )
                continue
            parsed = None if schema is None else json.loads(schema)
            try:
                rules += writer.rules(arguments, parsed, _compact_rule)
            except ValueError as error:
                raise refusal(error, function.field) from error
        return rules

    def calls_as_json(self, use: ToolUse) -> list[str]:
        """Return the rule `call` for calls that are JSON objects, if content is JSON as well.

        Their terminals must be those of JSON: llguidance's lexer takes the longest one, so after
        the first characters of a terminal such as `{"name": "f", ` it no longer ends at the brace.
        """
        rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(use.functions)))]
        keys = use.format.keys_of_calls
        for number, function in enumerate(use.functions):
            schema = json.loads(self._schema_of(function) if function.is_strict else _ANY_ARGUMENTS)
            root = {key: schema.pop(key) for key in ("$schema", "$defs") if key in schema}
            values = ({"const": function.name}, schema)
            properties = dict(zip(keys, values, strict=True))
            closed = {"required": keys, "additionalProperties": False}
            whole = json.dumps(root | {"type": "object", "properties": properties} | closed)
            rules.append(f"call_{number}: {json_rule(spelled(whole), COMPACT)}")
        return rules

    def _schema_of(self, function: Function) -> str:
        try:
            return _arguments(function).source(self._config).text
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
