"""Tools beside a format: an output is calls or content, and never something between."""

import json
import random
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from cut_texts import check_cuts
from tool_texts import written_as

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
pytest.importorskip("jsonschema", reason="pip install jsonschema")
import jsonschema
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerBackend

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.grammar import count_legal
from nanoserve.features.structured.guidance import Guidance, to_llguidance
from nanoserve.features.structured.params import StructuredOutputsParams
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.grammar import behind_analysis, behind_reasoning
from nanoserve.serve.http.tools.parse_result import Parsed, ToolCall
from nanoserve.serve.http.tools.parser_state import parse_answer
from nanoserve.serve.http.tools.parsers import FORMATS, ToolFormat, detect
from nanoserve.serve.http.tools.reasoning import Thought
from nanoserve.serve.http.tools.tool_choice import ToolUse, tool_use_of
from nanoserve.serve.http.tools.tool_constraints import constrain
from nanoserve.text.tokenizer import Tokenizer

CONFIG = StructuredOutputsConfig()
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
BAD = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
ANSWER = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 60}, "level": {"enum": [1, 2]}},
    "required": ["text", "level"],
}
CLOSED = ANSWER | {"additionalProperties": False}
FORMS = {name: one for name, one in FORMATS.items() if one.name == name}  # others are aliases
FORMS |= {"mistral by name": detect("[TOOL_CALLS] [ARGS]")}
# One of each structure: the others run with --full.
SMALL = ["hermes", "llama3_json", "mistral", "openai", "qwen3_coder", "kimi_k2", "pythonic"]
in_each_format = pytest.mark.parametrize("name", list(FORMS))
Call = tuple[str, str]
PARIS, OSLO = ("city", '{"city": "Paris"}'), ("city", '{"city": "Oslo"}')
ANY = ("free", '{"x": "[1]"}')


def tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters} | fields
    return {"type": "function", "function": function}


# One is strict, and one is not, whose schema cannot be compiled.
TOOLS = [tool("city", CITY, strict=True), tool("free", BAD)]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}


def made(
    form: ToolFormat, thought: Thought = Thought.CLOSED, config: Any = CONFIG, **fields: Any
) -> tuple[ToolUse, Any]:
    """How the output of a request is parsed, and its constraint."""
    asked = {"messages": [], "tools": TOOLS} | fields
    body = ChatBody(**asked)
    choice, several = body.tool_choice, body.parallel_tool_calls
    use = tool_use_of(body.tools, choice, several, form, True)
    assert use is not None
    use = constrain(body, use, lambda text: None, config)
    guide = body.constraint
    if guide is not None and form.reasoning_parser == harmony.NAME:
        guide = behind_analysis(guide, lambda text: None)
    elif guide is not None:
        guide = behind_reasoning(guide, thought, lambda text: None)
    return use, guide


def parser(use: ToolUse, is_inside: bool | None = None) -> Any:
    if use.format.reasoning_parser == harmony.NAME:
        return partial(harmony.parse, is_final_last=use.is_either)
    starts = use.call_starts if use.is_either else ()
    return partial(parse_answer, tools=use.format, is_inside=is_inside, call_starts=starts)


def accepts(guide: StructuredOutputsParams, text: str) -> bool:
    """llguidance's own matcher, byte by byte."""
    tokenizer = byte_tokenizer()
    matcher = LLMatcher(tokenizer, to_llguidance(guide.source(CONFIG)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def calls_of(form: ToolFormat, *calls: Call) -> str:
    is_harmony = form.reasoning_parser == harmony.NAME  # an output ends before <|call|>
    written = [
        form.call_begin(name)
        + (in_json_or_tags(form, arguments) if arguments.startswith("{") else arguments)
        + ("" if is_harmony else form.end)
        for name, arguments in calls
    ]
    return form.before + form.separator.join(written) + form.after


def in_json_or_tags(form: ToolFormat, arguments: str) -> str:
    """Strings of Python may have either quotes; the grammar writes those of JSON."""
    if form.name != "pythonic":
        return written_as(form, arguments)
    return ", ".join(f"{key}={json.dumps(one)}" for key, one in json.loads(arguments).items())


def content_of(form: ToolFormat, content: str) -> str:
    is_harmony = form.reasoning_parser == harmony.NAME
    return f"<|channel|>final<|message|>{content}" if is_harmony else content


TRICKY = [
    "<tool_call>",
    "[TOOL_CALLS]",
    "<|call|>",
    "<|channel|>final<|message|>",
    '{\\"name\\": 1}',
]


@pytest.mark.small(name=SMALL)
@in_each_format
def test_an_output_is_calls_or_content(name: str, by_size: Any) -> None:
    form = FORMS[name]
    use, guide = made(form, response_format=JSON_SCHEMA)
    parse = parser(use)
    for calls in ([PARIS], [ANY], [PARIS, ANY, PARIS][: by_size(2, 3)]):
        if len(calls) > 1 and form.reasoning_parser == harmony.NAME:
            continue  # a call ends an output
        text = calls_of(form, *calls)
        assert accepts(guide, text), text
        told = parse(text, True)
        assert not told.content and [one[:2] for one in told.calls] == calls
        check_cuts(parse, text)
    for inner in ["Well.", *TRICKY]:
        content = f'{{"text": "{inner}", "level": 1}}'
        text = content_of(form, content)
        assert accepts(guide, text), text
        assert parse(text, True) == Parsed("", content, [])
        check_cuts(parse, text)
    one, answer = calls_of(form, PARIS), content_of(form, '{"text": "", "level": 1}')
    wrong = [calls_of(form, OSLO), calls_of(form, ("other", "{}")), calls_of(form, ("free", "5"))]
    wrong += [content_of(form, '{"text": ""}'), content_of(form, "{}"), content_of(form, "Well.")]
    wrong += [one + answer, answer + one, f"Well. {one}", f"{one}\nWell.", one[:-1], ""]
    for text in wrong:
        assert not accepts(guide, text), text


@pytest.mark.small(name=SMALL)
@in_each_format
def test_parallel_tool_calls_false_is_one_call_by_grammar(name: str) -> None:
    form = FORMS[name]
    is_one = form.reasoning_parser == harmony.NAME
    cases: list[dict[str, Any]] = [
        {},
        {"response_format": JSON_SCHEMA},
        {"tool_choice": "required"},
    ]
    cases += [{"tools": [tool("city", CITY), tool("free", CITY)]}]
    for fields in cases:
        fields = {"tools": [tool("city", CITY), tool("free", {}, strict=True)]} | fields
        two = calls_of(form, PARIS, ("free", "{}" if fields.get("tool_choice") else '{"x": 1}'))
        if "strict" in fields["tools"][1]["function"]:
            two = calls_of(form, PARIS, ("free", "{}"))
        _, guide = made(form, **fields, parallel_tool_calls=False)
        assert accepts(guide, calls_of(form, PARIS)) and not accepts(guide, two), fields
        _, guide = made(form, **fields)
        assert guide is None or is_one or accepts(guide, two), fields
    # Behind the last call that is allowed, free text does not begin another.
    _, guide = made(form, parallel_tool_calls=False)
    if form.trigger is not None and not is_one:
        assert accepts(guide, f"I look. {calls_of(form, PARIS)} Well.")
        for start in form.starts:
            assert not accepts(guide, f"{calls_of(form, PARIS)} {start}")


@pytest.mark.small(name=SMALL)
@in_each_format
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_the_tools_that_are_shown_only_those_allowed_are_called(name: str, mode: str) -> None:
    form, allowed = FORMS[name], [{"type": "function", "function": {"name": "free"}}]
    tools = [tool("city", BAD, strict=True), tool("free", CITY)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    fields = {"tools": tools, "tool_choice": choice}
    for more in ({}, {"response_format": JSON_SCHEMA}, {"parallel_tool_calls": False}):
        use, guide = made(form, **fields, **more)
        assert use.must_call is (mode == "required") and not use.is_named and use.is_limited
        assert '"not"' not in guide.grammar  # the schema of the other is not even looked at
        assert accepts(guide, calls_of(form, ("free", '{"city": "Rome"}')))
        assert not accepts(guide, calls_of(form, ("city", "{}")))
        content = content_of(form, '{"text": "", "level": 2}' if "response_format" in more else "A")
        assert accepts(guide, content) is (mode == "auto")
    every = [{"type": "function", "function": {"name": one}} for one in ("city", "free")]
    choice["allowed_tools"] = {"mode": "auto", "tools": every}
    tools = [tool("city", BAD), tool("free", CITY)]
    assert made(form, tools=tools, tool_choice=choice)[1] is None  # nothing is to be enforced


# Texts that a parser reads as a call though the tag of the format does not begin them.
BARE = {
    "qwen3_coder": "<function=%s>\n<parameter=city>\n%s\n</parameter>\n</function>",
    "seed_oss": "<function=%s><parameter=city>%s</parameter></function>",
    "minimax_m2": '<invoke name="%s">\n<parameter name="city">%s</parameter>\n</invoke>',
    "granite": '<tool_call>[{"name": "%s", "arguments": {"city": "%s"}}]',
}
for one in map(FORMS.get, ("deepseek_v3", "deepseek_v31", "kimi_k2")):
    BARE[one.name] = one.begin.replace(":0", ":1") + '{"city": "%s"}' + one.end


@pytest.mark.small(name=["qwen3_coder", "kimi_k2", "granite"])
@pytest.mark.parametrize("name", list(BARE))
@pytest.mark.parametrize("is_special", [False, True])
def test_free_text_has_no_call_that_only_a_parser_sees(name: str, is_special: bool) -> None:
    """Neither before the calls that the grammar knows, nor behind them."""
    form, bare, whole = FORMS[name], BARE[name], calls_of(FORMS[name], PARIS)
    read = form.for_functions({"city": CITY, "free": {}}).parse
    assert [one.name for one in read(bare % ("free", "x"), True)[1]] == ["free"]
    choice = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "city"}}]}
    limited = {"type": "allowed_tools", "allowed_tools": choice}
    plain = Tokenizer(bundled_checkpoint("tiny-qwen3")).backend
    backend = TokenizerBackend.from_str(plain.to_str())
    specials = [tag for tag in form.special_tokens if is_special and "tool" in tag]
    backend.add_special_tokens([AddedToken(tag, special=True) for tag in specials])
    library = Guidance(backend, backend.get_vocab_size())
    ids = {tag: backend.token_to_id(tag) for tag in specials}
    for fields in ({}, {"tool_choice": limited}, {"parallel_tool_calls": False}):
        body = ChatBody(messages=[], tools=TOOLS, **fields)
        use = tool_use_of(body.tools, body.tool_choice, body.parallel_tool_calls, form, True)
        constrain(body, use, ids.get, CONFIG)
        compiled = library.compile(body.constraint.source(CONFIG))

        def is_legal(text: str, compiled: Any = compiled) -> bool:
            grammar, token_ids = compiled.start(), backend.encode(text).ids
            if count_legal(grammar, token_ids) < len(token_ids):
                return False
            grammar.accept(token_ids)
            return bool(grammar.may_end)

        assert is_legal(f"I < {whole} Well.") and is_legal("No <tool, no <func.")
        for function, city in (("city", "Oslo"), ("free", "x")):
            text = bare % (function, city)
            assert not is_legal(text) and not is_legal(f"a {text} b {whole}")
            assert not is_legal(f"{whole}\n{text}")


@pytest.mark.parametrize(
    "allowed",
    [
        None,
        {},
        {"mode": "none", "tools": [{"type": "function", "function": {"name": "free"}}]},
        {"mode": "auto", "tools": []},
        {"mode": "auto", "tools": [{"type": "function", "name": "free"}]},
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
        {"mode": "auto", "tools": {"name": "free"}},
        {"mode": ["auto"], "tools": [{"type": "function", "function": {"name": "free"}}]},
    ],
    ids=str,
)
def test_allowed_tools_that_are_none_are_refused(allowed: Any) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    with pytest.raises(ApiError, match=r"^tool_choice") as caught:
        made(FORMS["hermes"], tool_choice=choice)
    assert caught.value.param == "tool_choice"


def test_a_required_call_wins_over_response_format_and_nothing_else() -> None:
    named = {"type": "function", "function": {"name": "city"}}
    uncompiled = {"type": "json_object", "schema": BAD}
    for choice in ("required", named):
        tools = [tool("city", CITY), tool("free", CITY)]
        use, guide = made(
            FORMS["hermes"], tools=tools, tool_choice=choice, response_format=uncompiled
        )
        assert not use.is_either and '"not"' not in guide.grammar
        assert accepts(guide, calls_of(use.format, PARIS))
        for field in ("guided_json", "structured_outputs"):
            value = ANSWER if field == "guided_json" else {"json": ANSWER}
            with pytest.raises(ApiError, match="cannot be combined with a required") as caught:
                made(FORMS["hermes"], tools=tools, tool_choice=choice, **{field: value})
            assert str(caught.value.param).startswith(field)


@pytest.mark.small(name=SMALL)
@in_each_format
@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"guided_regex": r"\d+(.|\n)?"}, "12!", "a"),
        ({"guided_choice": ["yes", "n\u00f6"]}, "n\u00f6", "no"),
        ({"guided_json": ANSWER}, '{"text": "a", "level": 1}', '{"text": "a", "level": 3}'),
        ({"response_format": {"type": "json_object"}}, '{"a": {"parameters": []}}', "[1]"),
    ],
    ids=str,
)
def test_content_of_other_formats(
    name: str, fields: dict[str, Any], right: str, wrong: str
) -> None:
    form = FORMS[name]
    for config in (CONFIG, StructuredOutputsConfig(disable_any_whitespace=False)):
        _, guide = made(form, config=config, **fields)
        assert accepts(guide, calls_of(form, PARIS)) and not accepts(guide, calls_of(form, OSLO))
        assert accepts(guide, content_of(form, right))
        assert not accepts(guide, content_of(form, wrong))
        spaced = content_of(form, right.replace(": ", " :"))
        if ": " in right and not form.keys_of_calls:
            assert accepts(guide, spaced) is not config.disable_any_whitespace


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (r"a\/b/c", "a/b/c"),
        ("a\nb", "a\nb"),
        ("a\\\nb", "a\nb"),
        ("^ab$", "ab"),
        (r"[/]\d+\\/", "/1\\/"),
        ('\u00fc+"', '\u00fc"'),
    ],
)
def test_a_regex_is_the_same_within_a_grammar(regex: str, text: str) -> None:
    assert accepts(StructuredOutputsParams(regex=regex), text)
    _, guide = made(FORMS["hermes"], Thought.NONE, guided_regex=regex)
    assert accepts(guide, text) and accepts(guide, f"<think></think>{text}")
    assert not accepts(guide, text + "x")


def test_content_that_could_be_a_call_is_none() -> None:
    """Where calls are JSON without a tag; a format of any text does not begin like a call."""
    form = FORMS["llama3_json"]
    use, guide = made(form, response_format={"type": "json_object"})
    for text in (
        '{"name": "x", "a": 1}',
        '{"name": "city", "a": {"parameters": 1}}',
        '{"city": 1}',
    ):
        assert accepts(guide, text) and parser(use)(text, True) == Parsed("", text, [])
        check_cuts(parser(use), text)
    for text in ('{"name": "city", "parameters": 5}', '{"parameters": {}, "name": "city"}'):
        assert not accepts(guide, text)
    named = {"properties": {"name": {"type": "string"}, "parameters": {}}, "required": ["name"]}
    for schema in (named, {"$ref": "#/$defs/a", "$defs": {"a": named}}, {"anyOf": [named, CITY]}):
        with pytest.raises(ApiError, match="'name' and 'parameters' is a tool call") as caught:
            made(form, guided_json=schema | {"type": "object"})
        assert caught.value.param == "guided_json"
        made(FORMS["hermes"], guided_json=schema | {"type": "object"})
    one = {"type": "object", "properties": {"parameters": CITY}, "additionalProperties": True}
    use, guide = made(form, guided_json=one)
    assert accepts(guide, '{"parameters": {"city": "Rome"}}') and accepts(guide, '{"b": 1}')
    assert not accepts(guide, '{"name": "free", "parameters": {"city": "Rome"}}' + "}")
    assert accepts(guide, '{"name": "free", "parameters": {"city": "Oslo"}}')  # as a call
    for form in map(FORMS.get, SMALL):
        use, guide = made(form, guided_regex=r"(.|\n)*")
        text = content_of(form, calls_of(form, OSLO))
        told = parser(use)(text, True)
        assert accepts(guide, text) is (form.reasoning_parser == harmony.NAME)
        assert not told.calls or not accepts(guide, text)
        use, guide = made(form, guided_choice=[calls_of(form, OSLO), "yes"])
        assert accepts(guide, content_of(form, "yes"))


def test_a_thought_comes_first_and_may_say_anything() -> None:
    form = FORMS["hermes"]
    thought = "Shall I <tool_call> it?</think>\n\n"
    call, content = calls_of(form, PARIS), '{"text": "</think>", "level": 1}'
    for fields in ({"response_format": JSON_SCHEMA}, {"parallel_tool_calls": False}):
        for state, before in (
            (Thought.OPEN, thought),
            (Thought.NONE, f"<think>{thought}"),
            (Thought.NONE, ""),
            (Thought.CLOSED, ""),
        ):
            use, guide = made(form, state, **fields)
            parse = parser(use, state is Thought.OPEN)
            assert accepts(guide, before + call) and accepts(guide, before + content)
            assert not accepts(guide, before + calls_of(form, OSLO))
            for text, expected in (
                (call, ("", [ToolCall(*PARIS, True)])),
                (content, (content, [])),
            ):
                told = parse(before + text, True)
                assert (told.content, told.calls) == expected
                assert bool(told.reasoning) is bool(before)
                check_cuts(parse, before + text)
        _, guide = made(form, Thought.CLOSED, **fields)
        again = f"<think>{thought}{content}"
        assert not accepts(guide, again), "a thought that the prompt has closed"


def test_objects_are_closed_in_calls_and_content_unless_the_engine_says_otherwise() -> None:
    for closes in (True, False):
        config = StructuredOutputsConfig(disable_additional_properties=closes)
        for form in map(FORMS.get, SMALL):
            _, guide = made(form, config=config, response_format=JSON_SCHEMA)
            call = calls_of(form, ("city", '{"city": "Rome", "b": 1}'))
            content = content_of(form, '{"text": "", "level": 1, "b": 1}')
            assert accepts(guide, content) is not closes
            is_json = form.arguments is None  # other forms write only what has a name
            assert accepts(guide, call) is (is_json and not closes)


def test_what_another_backend_cannot_enforce_is_refused_by_name() -> None:
    pytest.importorskip("xgrammar", reason="pip install xgrammar")
    config, form = StructuredOutputsConfig(backend="xgrammar"), FORMS["hermes"]
    plain = [tool("city", CITY), tool("free", CITY)]
    only = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "free"}}]}
    for fields, field in (
        ({"response_format": JSON_SCHEMA}, "response_format.json_schema.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [*plain, tool("s", CITY, strict=True)]}, "tools[2].function.strict"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": only}}, "tool_choice"),
    ):
        with pytest.raises(ApiError, match="backend 'xgrammar' of this server") as caught:
            made(form, config=config, **{"tools": plain} | fields)
        assert caught.value.param == field and str(caught.value).startswith(f"{field}: ")
    # Further calls are left out of the answer.
    assert made(form, config=config, tools=plain, parallel_tool_calls=False)[1] is None
    with pytest.raises(ApiError, match=r"^guided_json: .*xgrammar") as caught:
        params = StructuredOutputsParams(json=ANSWER)
        behind_reasoning(params, Thought.NONE, lambda text: None, config, "guided_json")


def test_a_grammar_of_the_whole_output_stays_as_it_is() -> None:
    for fields in (
        {"guided_grammar": 'start: "a"'},
        {"structured_outputs": {"structural_tag": {"structures": [TAG], "triggers": ["<a"]}}},
    ):
        use, guide = made(FORMS["hermes"], tools=[tool("city", CITY)], **fields)
        assert not use.is_either and guide.grammar in ('start: "a"', None)
        with pytest.raises(ApiError, match=r"tools\[0\].function.strict cannot be enforced"):
            made(FORMS["hermes"], **fields)


TAG = {"begin": "<a>", "schema": CITY, "end": "</a>"}


def test_messages_name_what_was_sent() -> None:
    for form in map(FORMS.get, SMALL):
        for fields, field in (
            ({"response_format": {"type": "json_object", "schema": BAD}}, "response_format.schema"),
            ({"guided_json": BAD}, "guided_json"),
            ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
            ({"tools": [tool("a", CITY), tool("b", BAD, strict=True)]}, "tools[1].function.param"),
        ):
            with pytest.raises(ApiError) as caught:
                made(form, **fields)
            assert str(caught.value).startswith(field) and caught.value.param.startswith(field)
    large = {"type": "object", "properties": {f"property{i:030}": {} for i in range(9000)}}
    with pytest.raises(ApiError, match=r"^tools: the grammar made of it has \d+ char"):
        made(FORMS["hermes"], tools=[tool("a", large, strict=True), tool("b", large, strict=True)])


@cache
def compiler() -> Guidance:
    return Guidance(Tokenizer(bundled_checkpoint("tiny-qwen3")).backend, 2048)


@pytest.mark.small(name=SMALL)
@in_each_format
@pytest.mark.parametrize("several", [True, False])
def test_who_tries_to_write_anything_else_does_not_succeed(
    name: str, several: bool, by_size: Any
) -> None:
    """Each text is written token by token; what is not allowed is replaced by what is."""
    form, rng = FORMS[name], random.Random(name)
    use, guide = made(
        form,
        tools=[tool("city", CITY, strict=True), tool("free", CITY)],
        response_format=JSON_SCHEMA,
        parallel_tool_calls=several,
    )
    backend, parse = Tokenizer(bundled_checkpoint("tiny-qwen3")).backend, parser(use)
    compiled, ends = compiler().compile(guide.source(CONFIG)), {"calls": 0, "content": 0}
    texts = [calls_of(form, *calls) for calls in ([PARIS], [OSLO], [ANY], [PARIS, ANY, OSLO])]
    texts += [calls_of(form, ("nobody", "{}")), calls_of(form, ("free", "[5]")), "Well, well."]
    contents = ['{"text": "a", "level": 1}', '{"level": 5, "b": 1}', '{"name": "city"}', "[1]"]
    texts += [content_of(form, content) for content in contents]
    texts += [texts[0] + texts[7], texts[7] + texts[0], f"Well. {texts[0]}"]
    for text in texts * by_size(1, 4, 20):
        grammar, token_ids = compiled.start(), []
        script = list(backend.encode(text).ids)
        for _ in range(300):
            if grammar.is_terminated or (grammar.may_end and not script):
                break
            wanted = script.pop(0) if script else None
            if wanted is None or not grammar.advance(wanted):
                mask = np.empty(64, dtype=np.int32)
                grammar.fill(mask)
                bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                wanted = int(rng.choice(bits))
                grammar.accept([wanted])
            token_ids.append(wanted)
        if not grammar.may_end:
            continue  # a text without a bound
        told = parse(backend.decode(token_ids, skip_special_tokens=False), True)
        assert bool(told.content) is not bool(told.calls), told
        assert several or len(told.calls) <= 1
        ends["calls" if told.calls else "content"] += 1
        for one in told.calls:
            assert one.is_complete and one.name in ("city", "free")
            arguments = json.loads(one.arguments)
            jsonschema.validate(arguments, CITY if one.name == "city" else {"type": "object"})
        if told.content:
            jsonschema.validate(json.loads(told.content), CLOSED)
    assert all(ends.values()), ends
