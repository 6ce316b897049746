"""Grammars of calls in every format: what they allow, the parser reads, and the schema holds."""

import json
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
pytest.importorskip("jsonschema", reason="pip install jsonschema")
pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
import jsonschema
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerBackend

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.grammar import count_legal
from nanoserve.features.structured.guidance import Guidance
from nanoserve.features.structured.params import StructuredOutputsParams
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.tools.grammar import behind_reasoning, constraint_of_tools
from nanoserve.serve.http.tools.parser_state import parse_answer
from nanoserve.serve.http.tools.parsers import FORMATS
from nanoserve.serve.http.tools.reasoning import REASONING, Thought
from nanoserve.serve.http.tools.tool_choice import Function, ToolUse, tool_use_of
from nanoserve.text.tokenizer import Tokenizer

NAMES = [name for name, one in FORMATS.items() if one.name == name and name != "openai"]
TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$", "maxLength": 8},
        "level": {"enum": ["easy", "hard", 3]},
        "note": {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}], "default": None},
        "id": {
            "anyOf": [
                {"type": "string", "minLength": 2, "maxLength": 8},
                {"type": "integer", "minimum": 5, "maximum": 99},
            ]
        },
        "when": {"type": "string", "format": "date"},
        "inner": {"$ref": "#/$defs/Inner"},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["city", "days", "level", "inner", "id"],
    "additionalProperties": False,
    "$defs": {
        "Inner": {
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 4}},
            "required": ["a"],
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [
    Function("plan_trip", TRIP, True),
    Function("now", NOTHING, True),
    Function("free", {"type": "object"}, True),
]
SCHEMAS = {one.name: one.parameters for one in FUNCTIONS}
# What random text hardly ever has, but what ends a value.
ENDS = ["\n</parameter>", "</parameter>", "</arg_value>", '"', "\n", "</function>", "]", ")"]


@pytest.fixture(scope="module")
def guidance() -> tuple[Any, Guidance]:
    backend = Tokenizer(bundled_checkpoint("tiny-qwen3")).backend
    return backend, Guidance(backend, 2048)


def compiled(guidance: Guidance, name: str, *functions: Function, **other: Any) -> Any:
    use = ToolUse(FORMATS[name], list(functions), True, False, True)
    constraint = constraint_of_tools(use, lambda text: None, **other)
    assert constraint is not None
    return guidance.compile(constraint.source(StructuredOutputsConfig()))


@pytest.mark.small(name=["pythonic", "kimi_k2", "qwen3_coder"])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_the_grammar_allows_is_a_call_that_its_schema_allows(
    name: str, guidance: Any, by_size: Any
) -> None:
    backend, library = guidance
    whole, rng = compiled(library, name, *FUNCTIONS), random.Random(name)
    form, num_ended = FORMATS[name].for_functions(SCHEMAS), 0
    first_of_ends = [backend.encode(text).ids[0] for text in ENDS]
    for _ in range(by_size(4, 40)):
        grammar, token_ids = whole.start(), []
        mask = np.empty(64, dtype=np.int32)
        for _ in range(400):
            if grammar.is_terminated or (grammar.may_end and rng.random() < 0.5):
                break
            grammar.fill(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            ends = [token_id for token_id in first_of_ends if bits[token_id]]
            chooses_end = ends and rng.random() < 0.4
            token_ids.append(rng.choice(ends) if chooses_end else rng.choice(np.flatnonzero(bits)))
            grammar.accept(token_ids[-1:])
        if not grammar.may_end:
            continue
        num_ended += 1
        text = backend.decode(token_ids)
        content, calls = form.parse(text, True)
        assert content == "" and calls, text
        for call in calls:
            assert call.is_complete, text
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert num_ended >= by_size(1, 15)


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2", "glm45"])
@pytest.mark.parametrize("must_call", [True, False])
def test_tags_that_are_special_tokens_are_these_tokens(name: str, must_call: bool) -> None:
    form = FORMATS[name].for_functions(SCHEMAS)
    backend = TokenizerBackend.from_str(
        Tokenizer(bundled_checkpoint("tiny-qwen3")).backend.to_str()
    )
    specials = [tag for tag in form.special_tokens if not tag.startswith(("<arg", "</arg"))]
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in specials])
    functions = [Function("f", {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, True)]
    use = ToolUse(form, functions, must_call, False, True)
    ids = {tag: backend.token_to_id(tag) for tag in specials}
    constraint = constraint_of_tools(use, ids.get)
    assert constraint is not None
    library = Guidance(backend, backend.get_vocab_size())
    whole = library.compile(constraint.source(StructuredOutputsConfig()))
    arguments = (
        '{"a": 5}' if name != "glm45" else "<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n"
    )
    call = form.call_begin("f") + arguments + form.end
    text = form.before + call + form.separator + call + form.after
    assert [one.name for one in form.parse(text, True)[1]] == ["f", "f"]
    assert legal((backend, library), whole, text)
    assert not legal((backend, library), whole, text.replace("5", '"x"'))
    assert legal((backend, library), whole, "No call.") is not must_call


def legal(guidance: Any, whole: Any, text: str) -> bool:
    token_ids = guidance[0].encode(text).ids
    grammar = whole.start()
    if count_legal(grammar, token_ids) < len(token_ids):
        return False
    grammar.accept(token_ids)
    return grammar.may_end


def written(value: str) -> str:
    argument = f"<parameter=a>\n{value}\n</parameter>\n"
    return f"<tool_call>\n<function=f>\n{argument}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["", "a\n<b>", '{"'], ["a</parameter>", "a\n</function>"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        ({"type": "string", "pattern": "b/?c"}, ["abc", "ab/cd"], ["ab", "acb"]),
        ({"type": "string", "pattern": "^(a|b)$"}, ["a"], ["aa", "c"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024-02-29"]),
        ({"type": "string", "format": "custom"}, ["x"], []),
        ({"enum": ["a", "b c"]}, ["b c"], ["b", '"a"']),
        ({"type": ["string", "null"]}, ["text", "null"], ["7"]),
        ({"type": "boolean"}, ["true"], ["True", "yes"]),
        ({"type": "number", "maximum": 5}, ["-1.5"], ["6", "a"]),
        ({}, ["anything", "5"], []),
    ],
    ids=str,
)
def test_values_without_quotes(
    schema: dict[str, Any], right: list[str], wrong: list[str], guidance: Any
) -> None:
    function = Function("f", {"properties": {"a": schema}, "required": ["a"]}, True)
    whole = compiled(guidance[1], "qwen3_coder", function)
    for value in right:
        assert legal(guidance, whole, written(value)), value
    for value in wrong:
        assert not legal(guidance, whole, written(value)), value


@pytest.mark.parametrize(
    ("name", "parameters", "what"),
    [
        ("glm45", {"properties": {"a": {"type": "string", "format": "uri"}}}, "format='uri'"),
        ("glm45", {"properties": {"a": {"type": "string", "pattern": "a^b"}}}, "anchor"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "anchor"),
        ("qwen3_coder", {"properties": {"a>b": {"type": "string"}}}, "a>b"),
        ("qwen3_coder", {"properties": {"a": {"enum": ["</parameter>"]}}}, "contains a tag"),
        ("minimax_m2", {"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ("pythonic", {"properties": {"a-b": {}}}, "a-b"),
        ("pythonic", {"properties": {"a": {}}, "maxProperties": 1}, "maxProperties"),
    ],
)
def test_what_a_format_cannot_follow_is_refused_by_name(
    name: str, parameters: dict[str, Any], what: str
) -> None:
    use = ToolUse(FORMATS[name], [Function("f", parameters, True, 3)], True, False, True)
    with pytest.raises(ApiError) as caught:
        constraint_of_tools(use, lambda text: None)
    assert what in str(caught.value) and caught.value.param == "tools[3].function.parameters"


@pytest.mark.parametrize("name", ["mistral", "granite", "seed_oss"])
def test_a_grammar_begins_behind_each_spelling_of_a_thought(name: str, guidance: Any) -> None:
    form, params = REASONING[name], StructuredOutputsParams(choice=["yes", "no"])
    behind = behind_reasoning(params, Thought.NONE, lambda text: None, form=form)
    whole = guidance[1].compile(behind.source(StructuredOutputsConfig()))
    for begin in form.opens:
        for end in form.closes:
            assert legal(guidance, whole, f"{begin} Is it no? {end} yes")
    assert legal(guidance, whole, "no") and not legal(guidance, whole, "maybe")
    assert not legal(guidance, whole, f"{form.opens[0]} Well. yes")
    assert legal(guidance, whole, f"{form.opens[0]} Well. {form.closes[0]}\n\n no")
    spaces = f"{form.opens[0]} Well. {form.closes[0]}{' ' * 5}no"
    assert not legal(guidance, whole, spaces), "a model might write nothing else"


CALLED = [
    Function("f", {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, True),
    Function("g", {"properties": {}}, True),
]


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("must_call", [False, True])
@pytest.mark.parametrize("thought", [Thought.OPEN, Thought.NONE])
def test_a_section_of_calls_ends_a_thought_of_kimi(
    is_special: bool, must_call: bool, thought: Thought
) -> None:
    """The parser ends it there, so no call is hidden in what a grammar takes for a thought."""
    form, thoughts = FORMATS["kimi_k2"], REASONING["kimi_k2"]
    backend = TokenizerBackend.from_str(
        Tokenizer(bundled_checkpoint("tiny-qwen3")).backend.to_str()
    )
    specials = [*form.special_tokens, *thoughts.tags] if is_special else []
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in specials])
    ids = {tag: backend.token_to_id(tag) for tag in specials}
    constraint = constraint_of_tools(ToolUse(form, CALLED, must_call, False, True), ids.get)
    assert constraint is not None
    behind = behind_reasoning(constraint, thought, ids.get, form=thoughts)
    library = Guidance(backend, backend.get_vocab_size())
    whole = library.compile(behind.source(StructuredOutputsConfig()))

    def is_legal(text: str) -> bool:
        return legal((backend, library), whole, opening + text)

    opening = "" if thought is Thought.OPEN else "<think>"
    call = f'{form.before}{form.call_begin("f")}{{"a": 5}}{form.end}{form.after}'
    wrong = call.replace("5", '"x"')
    assert is_legal(f"Hm.</think>{call}") and not is_legal(f"Hm.</think>{wrong}")
    assert not is_legal(f"Hm. {wrong}") and not is_legal(f"Hm. {wrong}</think>{call}")
    assert not is_legal(f"Hm. {form.before} a</think>{call}")
    # Where the tags are tokens, as in the vocabulary of Kimi, it may end without a closing tag.
    assert is_legal(f"Hm. {call}") is is_special
    told = parse_answer(f"<think>Hm. {call}", True, form, False, thoughts)
    assert told.reasoning == "Hm." and [one.name for one in told.calls] == ["f"]
    params = StructuredOutputsParams(choice=["yes", "no"])
    behind = behind_reasoning(params, thought, ids.get, form=thoughts)
    whole = library.compile(behind.source(StructuredOutputsConfig()))
    assert is_legal("Hm.</think>yes") and not is_legal(f"Hm. {form.before} a</think>yes")


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder", "hermes"])
@pytest.mark.parametrize(
    "number", ["1e999", "-1.5E+400", "9" * 4500, "0." + "3" * 5000, "1e-999", "-0", "7"]
)
def test_numbers_of_any_size_stay_numbers(name: str, number: str, guidance: Any) -> None:
    schema = {"properties": {"a": {"type": "number"}}, "required": ["a"]}
    form = FORMATS[name].for_functions({"f": schema})
    arguments = {"pythonic": f"a={number}", "hermes": f'{{"a": {number}}}'}.get(name, "")
    if form.reads_schemas:
        arguments = f"<parameter=a>\n{number}\n</parameter>\n"
    text = form.before + form.call_begin("f") + arguments + form.end + form.after
    if len(number) < 100:  # a grammar takes a while for more
        whole = compiled(guidance[1], name, Function("f", schema, True))
        assert legal(guidance, whole, text)
    content, [call] = form.parse(text, True)
    assert content == "" and call.is_complete
    as_written = f'{{"a": {number}}}'
    if name == "pythonic" and number in ("1e-999", "-0"):  # Python's own spelling of the value
        assert json.loads(call.arguments) == json.loads(as_written)
    else:
        assert call.arguments == as_written


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_a_name_that_pythonic_cannot_read_is_refused(choice: str, guidance: Any) -> None:
    tools = [
        {"type": "function", "function": {"name": name}} for name in ("a-b", "class", "1st", "-")
    ]
    form = FORMATS["pythonic"]
    for number in (2, 3):
        given = [*tools[:2], *tools[3:], *tools[2:3]] if number == 3 else tools
        asked = given, choice, None
        if choice == "none":
            assert tool_use_of(*asked, form, True) is None
            continue
        with pytest.raises(ApiError, match="begins with a letter or _") as caught:
            tool_use_of(*asked, form, True)
        assert caught.value.param == "tools[2].function.name" and caught.value.status == 400
        assert tool_use_of(*asked, FORMATS["hermes"], True) is not None
    use = tool_use_of(tools[:2], "required", None, form, True)
    assert use is not None
    whole = compiled(guidance[1], "pythonic", *use.functions)
    text = "[a-b(), class()]"
    assert legal(guidance, whole, text)
    assert [one.name for one in form.parse(text, True)[1]] == ["a-b", "class"]
