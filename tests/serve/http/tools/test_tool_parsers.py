"""Calls and reasoning in an answer, however it is cut into pieces."""

import json
import random
import time
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
from tool_texts import CASES_WITH_TAGS, SCHEMAS, SHOWN, TYPED, written_as

from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.parse_result import Parsed, ToolCall
from nanoserve.serve.http.tools.parser_state import NOTHING, difference, parse_answer
from nanoserve.serve.http.tools.parsers import FORMATS, check_parsers, detect, formats_of
from nanoserve.serve.http.tools.partial_json import read_object
from nanoserve.serve.http.tools.reasoning import (
    REASONING,
    STARTS,
    Thought,
    special_tokens_of,
    thought_at_end,
)
from nanoserve.serve.http.tools.sections import DEEPSEEK_V31

ARGUMENTS = [
    "{}",
    '{"city": "Paris"}',
    '{"city": "\u5317\u4eac", "days": [1, 2.5, null, true]}',
    '{"text": "a } ] \\" {", "n": {"deep": {"er": [[]]}}}',
    '{"tag": "</tool_call> <tool_call> [TOOL_CALLS]"}',
    '{ "spaced" :  "out" ,\n "b": -1e5 }',
    '{"back": "\\\\", "line": "\\n", "e": "\\u00e9"}',
]
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def hermes(*objects: str) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


LONG = ['<tool_call>{"a": [', '[TOOL_CALLS][{"a": [', '{"name": "', "[", "[f(a=", "[f(a=1), "]
LONG += ["<tool_call><function=f><parameter=a>", "<tool_call>f<arg_key>", "<|tool_call_begin|>f:"]


def call(name: str, arguments: str, is_complete: bool = True) -> ToolCall:
    return ToolCall(name, arguments, is_complete)


PARIS = call("get_weather", '{"city": "Paris"}')
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
CALL_OF_WEATHER = (
    'commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
)
CALL_OF_WEATHER += "<|call|>"
# By format: texts, and what they say.
CASES: dict[str, list[tuple[str, str, list[ToolCall]]]] = {
    "hermes": [
        ("", "", []),
        ("Just text.", "Just text.", []),
        (" spaces stay \n", " spaces stay \n", []),
        ("1 < 2 and <tool", "1 < 2 and <tool", []),
        (hermes(WEATHER), "", [PARIS]),
        (f"I look.\n\n{hermes(WEATHER)}\n", "I look.", [PARIS]),
        (f"{hermes(WEATHER)}\nThere.", "There.", [PARIS]),
        (f"a\n{hermes(WEATHER)} b {hermes(WEATHER)}\nc", "a\nb\nc", [PARIS, PARIS]),
        (hermes(WEATHER, '{"name": "g", "arguments": {}}'), "", [PARIS, call("g", "{}")]),
        (hermes('{"name": "g"}'), "", [call("g", "{}")]),
        (hermes('{"name": "g", "arguments": null}'), "", [call("g", "{}")]),
        (hermes('{"name": "g", "arguments": "{\\"a\\": 1}"}'), "", [call("g", '{"a": 1}')]),
        (hermes('{"arguments": {"a": 1}, "name": "g"}'), "", [call("g", '{"a": 1}')]),
        (hermes('{"name": "g", "parameters": {"a": 1}}'), "", [call("g", '{"a": 1}')]),
        (hermes('{"name": "g", "name": "h", "arguments": {}}'), "", [call("g", "{}")]),
        (hermes('{"name": "g", "arguments": 5}'), "", [call("g", "5")]),
        (hermes('{"name": "g", "id": 7, "arguments": {}}'), "", [call("g", "{}")]),
        (f"<tool_call>{WEATHER}", "", [PARIS]),  # the closing tag was left out
        (f"<tool_call>{WEATHER}</tool", "", [PARIS]),
        ('<tool_call>\n{"name": "g", "arguments": {"a": [1', "", [call("g", '{"a": [1', False)]),
        (hermes("no JSON"), hermes("no JSON"), []),
        (hermes('{"no name": 1}'), hermes('{"no name": 1}'), []),
        (
            hermes('{"name": "g", "arguments": nope}'),
            hermes('{"name": "g", "arguments": nope}'),
            [],
        ),
        ('<tool_call>\n{"name": "g', '<tool_call>\n{"name": "g', []),
        (f"{hermes('{oops')}\n{hermes(WEATHER)}", hermes("{oops"), [PARIS]),
        (f"Use the <tool_call> tag.\n{hermes(WEATHER)}", "Use the <tool_call> tag.", [PARIS]),
        (
            f'<tool_call>\n{{"name": "g", "arguments": {{"a": 1\n</tool_call> b {hermes(WEATHER)}',
            "b",
            [call("g", '{"a": 1\n', False), PARIS],
        ),
        (f"<tool_call>{WEATHER}}}\n</tool_call> b", "b", [PARIS]),
        (
            '<tool_call>{"name": "g", "arguments": {"a": 1, oops}',
            "oops}",
            [call("g", '{"a": 1, ', False)],
        ),
        (hermes('{"name": "", "arguments": {}}'), hermes('{"name": "", "arguments": {}}'), []),
    ],
    "llama3_json": [
        ("Just text.", "Just text.", []),
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        (f' {WEATHER}; {{"name": "g", "parameters": {{}}}}\n', "", [PARIS, call("g", "{}")]),
        (f"{WEATHER}\n{WEATHER}", "", [PARIS, PARIS]),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('{"answer": [1, 2]} and more', '{"answer": [1, 2]} and more', []),
        ('{"name": "g", "parameters": {"a', "", [call("g", '{"a', False)]),
        (f"{WEATHER} is a call", "is a call", [PARIS]),
        ("{broken", "{broken", []),
        ('{"name": "f", "parameters": {"a": 1} tail', "tail", [call("f", '{"a": 1}', False)]),
    ],
    "mistral": [
        ("Just text. [TOOL", "Just text. [TOOL", []),
        (f"[TOOL_CALLS][{WEATHER}]", "", [PARIS]),
        (f"Well. [TOOL_CALLS] [{WEATHER}, {WEATHER}]", "Well.", [PARIS, PARIS]),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [PARIS]),
        ('[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]g{}', "", [PARIS, call("g", "{}")]),
        ('[TOOL_CALLS][{"name": "g", "arguments": {"a": ', "", [call("g", '{"a": ', False)]),
        ("[TOOL_CALLS]!", "[TOOL_CALLS]!", []),
        (f"[TOOL_CALLS]{WEATHER}", "", [PARIS]),
        ('[TOOL_CALLS]g[CALL_ID]a1[ARGS]{"a": 1}', "", [call("g", '{"a": 1}')]),
        (
            '[TOOL_CALLS]f[ARGS]{"a": 1[TOOL_CALLS]g[ARGS]{}',
            "",
            [call("f", '{"a": 1', False), call("g", "{}")],
        ),
        (f'[TOOL_CALLS][{WEATHER}, {{"no": 1}}]', '{"no": 1}]', [PARIS]),
    ],
    "openai": [
        ("Just text.", "Just text.", []),
        (" spaces stay \n", " spaces stay \n", []),
        ("to be or not", "to be or not", []),
        ("to=be", "to=be", []),
        ("<|channel|>final<|message|>Yes.<|return|>", "Yes.", []),
        ("<|channel|>final<|message|>Yes. 1 <| 2", "Yes. 1 <| 2", []),
        ("<|channel|>analysis<|message|>Hm.<|end|>", "", []),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", "", []),
        (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Yes.", "Yes.", []),
        (f"{THOUGHT}<|channel|>final<|message|>Yes.", "Yes.", []),
        (f"{THOUGHT}\n<|start|>assistant<|channel|>final<|message|>Yes.", "Yes.", []),
        (f"{THOUGHT} Yes.", "Yes.", []),
        (
            f"<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>{CALL_OF_WEATHER}",
            "",
            [PARIS],
        ),
        (f"<|channel|>{CALL_OF_WEATHER}", "", [PARIS]),
        (f"<|channel|>{CALL_OF_WEATHER}".removesuffix("<|call|>"), "", [PARIS]),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>"
            f"{CALL_OF_WEATHER}",
            "I look.",
            [PARIS],
        ),
        (
            " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"
            '{"city": "Paris"}<|call|>',
            "",
            [PARIS],
        ),
        (
            f"{THOUGHT}<|start|>assistant to=functions.get_weather<|channel|>commentary json"
            f'<|message|>{{"city": "Paris"}}<|call|>',
            "",
            [PARIS],
        ),
        ("<|channel|>commentary to=functions.now<|message|><|call|>", "", [call("now", "{}")]),
        (
            '<|channel|>commentary to=functions.g<|message|>{"a": [1',
            "",
            [call("g", '{"a": [1', True)],  # the output has ended, and nothing is checked
        ),
        ("<|channel|>commentary to=functions.g", "", []),
        ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", "", []),
        ("<|start|>functions.now to=assistant<|channel|>commentary<|message|>9<|end|>", "", []),
        (
            "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final"
            "<|message|>b",
            "a\nb",
            [],
        ),
    ],
}
CASES |= CASES_WITH_TAGS
NAMES = [name for name, one in FORMATS.items() if one.name == name]  # others are aliases
EVERY = [(name, *case) for name, cases in CASES.items() for case in cases]


def parser(name: str, is_inside: bool | None = None) -> Callable[[str, bool], Parsed]:
    if name == "openai":
        return harmony.parse
    form = FORMATS[name].for_functions(SCHEMAS)
    return lambda text, is_final: parse_answer(text, is_final, form, is_inside)


@pytest.mark.parametrize(("name", "text", "content", "calls"), EVERY)
def test_an_answer_says(name: str, text: str, content: str, calls: list[ToolCall]) -> None:
    assert FORMATS[name].for_functions(SCHEMAS).parse(text, True) == (content, calls)


def check_growth(parse: Callable[[str, bool], Parsed], text: str) -> None:
    """Of no beginning need anything be taken back."""
    states = [NOTHING, *(parse(text[:end], False) for end in range(len(text) + 1))]
    states.append(parse(text, True))
    for before, now in pairwise(states):
        assert now.content.startswith(before.content), (before, now)
        assert now.reasoning.startswith(before.reasoning), (before, now)
        assert len(now.calls) >= len(before.calls)
        for old, new in zip(before.calls, now.calls, strict=False):
            assert new.name == old.name and new.arguments.startswith(old.arguments)


def streamed(parse: Callable[[str, bool], Parsed], pieces: list[str]) -> Parsed:
    """What a client has who puts the differences together."""
    text, before, told = "", NOTHING, Parsed("", "", [])
    calls: list[list[str]] = []
    for number, piece in enumerate([*pieces, ""]):
        text += piece
        now = parse(text, number == len(pieces))
        delta = difference(before, now)
        told = Parsed(told.reasoning + delta.reasoning, told.content + delta.content, [])
        for index, name, arguments in delta.calls:
            assert (name is not None) == (index == len(calls))
            if name is not None:
                calls.append([name, ""])
            calls[index][1] += arguments
        before = now
    whole = [
        ToolCall(*call, one.is_complete, one.id)
        for call, one in zip(calls, before.calls, strict=True)
    ]
    return told._replace(calls=whole)


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in EVERY])
def test_however_it_is_cut_it_says_the_same(
    name: str, text: str, by_size: Callable[..., int]
) -> None:
    parse, rng = parser(name), random.Random(text)
    check_growth(parse, text)
    expected = parse(text, True)
    cuts = [[], *([i] for i in range(len(text))), range(len(text))]
    pairs = list(combinations(range(len(text)), 2))
    cuts += rng.sample(pairs, min(len(pairs), by_size(20, 300)))
    for _ in range(by_size(8, 50)):
        cuts.append(sorted(rng.sample(range(len(text)), min(len(text), 7))))
    for cut in cuts:
        borders = [0, *cut, len(text)]
        pieces = [text[a:b] for a, b in pairwise(borders)]
        assert streamed(parse, pieces) == expected, pieces


PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>"]
PIECES += [*harmony.SPECIAL_TOKENS, "<|start|>assistant", "<|channel|>final", "to=functions.g"]
PIECES += [
    "<function=",
    "</function>",
    "<parameter=city>",
    "</parameter>",
    "<arg_key>",
    "</arg_key>",
]
PIECES += ["<arg_value>", "</arg_value>", "[f(", "a=", "'", ")", DEEPSEEK_V31.open, "<|tool_call|>"]
PIECES += [DEEPSEEK_V31.call_open, DEEPSEEK_V31.call_close, DEEPSEEK_V31.arguments_open, "```json"]
PIECES += ["</think>", '{"name": "g", "arguments": ', "{", "}", '"', "\\", "]", "[", ",", " ", "\n"]


def test_garbage_is_no_danger(by_size: Callable[..., int]) -> None:
    """Neither lost, nor taken back, nor an exception."""
    rng = random.Random(5)
    for number in range(by_size(200, 2000, 20_000)):
        name, text, *_ = rng.choice(EVERY)
        for _ in range(rng.randint(1, 4)):
            at, kind = rng.randrange(len(text) + 1), rng.randrange(3)
            if kind == 0:
                text = text[:at] + text[at + rng.randint(1, 5) :]
            elif kind == 1:
                text = text[:at] + rng.choice(PIECES) + text[at:]
            else:
                text = text[:at] + text[at - rng.randint(0, 20) :]
        reasoning = rng.choice([None, None, False, True])
        parse = parser(name, reasoning)
        check_growth(parse, text)
        pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
        expected = parse(text, True)
        assert streamed(parse, pieces) == expected
        if reasoning is None and name == "hermes" and not expected.calls:
            assert expected.content == text, number


NEWER_MISTRAL = "[TOOL_CALLS] [ARGS]"
KIMI_SECTION = "<|tool_calls_section_begin|>"


@pytest.mark.parametrize("name", [*NAMES, NEWER_MISTRAL])
def test_what_a_format_writes_is_what_it_reads(name: str) -> None:
    one, rng = FORMATS.get(name) or detect(name), random.Random(name)
    schemas = dict.fromkeys(("f", "get_weather", "a-b_c"), TYPED)
    known = ARGUMENTS
    if one.arguments is not None:  # arguments are not written as they are
        known = [json.dumps(json.loads(text), ensure_ascii=False) for text in ARGUMENTS]
    for _ in range(50):
        wanted = [
            call(rng.choice(list(schemas)), rng.choice(known)) for _ in range(rng.randint(1, 4))
        ]
        written = [
            one.call_begin(name) + written_as(one, arguments) + one.end
            for name, arguments, *_ in wanted
        ]
        text = one.before + one.separator.join(written) + one.after
        content, calls = one.for_functions(schemas).parse(text, True)
        assert content == "" and [call._replace(id=None) for call in calls] == wanted, text
        assert all(json.loads(arguments) is not None for _, arguments, *_ in wanted)


@pytest.mark.parametrize(
    ("parser_name", "text", "reasoning", "answer"),
    [
        ("qwen3", "<think>\nWell.\n</think>\n\nYes.", "Well.", "Yes."),
        ("qwen3", "Yes.", "", "Yes."),
        ("qwen3", "<think>and on and on", "and on and on", ""),
        ("qwen3", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("qwen3", "No <think>tag</think>", "", "No <think>tag</think>"),
        ("deepseek_r1", "Well.\n</think>\nYes.", "Well.", "Yes."),
        ("deepseek_r1", "<think>Well.</think>Yes.", "Well.", "Yes."),
        ("deepseek_r1", "never an end </thin", "never an end </thin", ""),
        ("mistral", "[THINK]Well.[/THINK]Yes.", "Well.", "Yes."),
        ("mistral", "[THIN] <think>Yes.</think>", "", "[THIN] <think>Yes.</think>"),
        ("seed_oss", "<seed:think>a</think>b</seed:think>Yes.", "a</think>b", "Yes."),
        (
            "granite",
            "Here is my thought process:\nHere, well.\nHere is my response: Yes.",
            "Here, well.",
            "Yes.",
        ),
        ("granite", "Here's my thought process: a Here's my response: b", "a", "b"),
        ("granite", "Here is the answer.", "", "Here is the answer."),
        ("granite", "Here is my thought process: on, Here is my re", "on, Here is my re", ""),
        ("step3", "Well.</think>Yes.", "Well.", "Yes."),
        ("kimi_k2", "<think>a</think><|tool_calls_section_begin|>", "a", KIMI_SECTION),
        ("kimi_k2", "<think>a <|tool_calls_section_begin|>", "a", KIMI_SECTION),
        ("kimi_k2", "<think>a <|tool_calls_</think>b", "a <|tool_calls_", "b"),
    ],
)
def test_reasoning_is_split_off(parser_name: str, text: str, reasoning: str, answer: str) -> None:
    def parse(text: str, is_final: bool) -> Parsed:
        form, is_inside = REASONING[parser_name], STARTS[parser_name] is Thought.OPEN
        return parse_answer(text, is_final, None, is_inside, form)

    assert parse(text, True) == Parsed(reasoning, answer, [])
    check_growth(parse, text)
    assert streamed(parse, list(text)) == parse(text, True)


def test_a_call_amid_a_thought_is_none() -> None:
    text = f"<think>{hermes(WEATHER)}</think>{hermes(WEATHER)}"
    assert parser("hermes", False)(text, True) == Parsed(hermes(WEATHER), "", [PARIS])


def test_names_that_are_no_text_are_none() -> None:
    """JSON can say half a character, which nobody could send on."""
    content, calls = FORMATS["hermes"].parse(hermes('{"name": "\\ud83d", "arguments": {}}'), True)
    assert not calls and content.isascii()
    text = hermes('{"name": "g", "arguments": "{\\ud83d"}')
    assert FORMATS["hermes"].parse(text, True)[1][0].arguments.isascii()


@pytest.mark.parametrize("piece", LONG)
@pytest.mark.parametrize("name", NAMES)
def test_a_long_answer_is_read_in_time(name: str, piece: str) -> None:
    began = time.thread_time()  # however busy the machine is
    FORMATS[name].for_functions(SCHEMAS).parse(piece * (80_000 // len(piece)), True)
    assert time.thread_time() - began < 3  # quadratic, it would take ten times as long


def test_depth_and_length_are_no_danger() -> None:
    deep = '{"name": "g", "arguments": {"a": ' + "[" * 20_000
    (content, calls) = FORMATS["hermes"].parse(f"<tool_call>{deep}", True)
    assert content == "" and calls[0].arguments.endswith("[[[")
    assert read_object("{" * 20_000, 0).stop == 1


def test_the_end_of_a_prompt_tells_whether_a_thought_is_open() -> None:
    for name, usual in STARTS.items():
        opens, closes = REASONING[name].opens[-1], REASONING[name].closes[-1]
        assert {opens, closes} <= {*special_tokens_of(name)}
        assert thought_at_end(f"...assistant\n{opens}\n", name) is Thought.OPEN
        closed = f"...assistant\n{opens}\n\n{closes}\n\n"
        assert thought_at_end(closed, name) is Thought.CLOSED
        assert thought_at_end("...assistant\n", name) is thought_at_end(None, name) is usual
        begun = (f"{opens}a", Thought.OPEN), (f"{opens}a{closes} {{", Thought.CLOSED)
        for text, state in begun:
            assert thought_at_end("...assistant\n" + text, name, text) is state
        answering = Thought.CLOSED if usual is Thought.OPEN else usual
        assert thought_at_end("...assistant\nYes", name, "Yes") is answering


def test_a_template_tells_the_format() -> None:
    assert detect("<tool_call> <function=f>") is detect("<tool_call> <arg_key>") is None
    for name, written in SHOWN.items():
        assert detect(f"... {written} ...") is FORMATS[name], name
    assert detect(NEWER_MISTRAL).call_begin("f") == "[TOOL_CALLS]f[ARGS]"
    assert detect("... <tool_call> ...").name == "hermes"
    assert detect("... [TOOL_CALLS] ...").name == "mistral"
    assert detect('<|start_header_id|> ... "parameters"').name == "llama3_json"
    assert detect("... <|channel|>analysis ...").name == "openai"
    assert detect("{{ message.content }}") is None and detect(None) is None


# ---------------------------------------------------------------- harmony

FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "has_tools", "begun", "expected"),
    [
        (f"{THOUGHT}{FINAL}Yes.", False, "", Parsed("Hm.", "Yes.", [])),
        (f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}Yes.", True, "", ("Hm.\nHm.", "Yes.", [])),
        (
            "Hm.<|end|>" + FINAL + "Yes.",
            True,
            "<|channel|>analysis<|message|>",
            ("Hm.", "Yes.", []),
        ),
        ("Yes.<|return|>", True, "<|channel|>final<|message|>", ("", "Yes.", [])),
        (f"<|channel|>{CALL_OF_WEATHER}", True, "", ("", "", [PARIS])),
        (f"<|channel|>{CALL_OF_WEATHER}", False, "", ("", PARIS.arguments, [])),
        ("<|channel|>analysis to=browser.search<|message|>{}<|call|>", True, "", ("{}", "", [])),
        ("<|start|>user<|message|>And now?<|end|>", True, "", ("And now?", "", [])),
    ],
)
def test_messages_of_harmony(
    text: str, has_tools: bool, begun: str, expected: tuple[str, str, list[ToolCall]]
) -> None:
    def parse(text: str, is_final: bool) -> Parsed:
        return harmony.parse(text, is_final, has_tools, begun)

    assert parse(text, True) == Parsed(*expected)
    check_growth(parse, text)
    assert streamed(parse, list(text)) == parse(text, True)


def test_what_a_prompt_has_begun_in_harmony() -> None:
    turn = "<|start|>user<|message|>Well?<|end|>"
    assert harmony.begun_in(None) == harmony.begun_in("plain") == ""
    assert harmony.begun_in(f"{turn}<|start|>assistant") == ""
    header = "<|channel|>final<|message|>"
    assert harmony.begun_in(f"{turn}<|start|>assistant{header}It is") == header
    assert harmony.begun_in(f"{turn}<|start|>assistant<|channel|>final") == "<|channel|>final"


def test_parsers_that_belong_together() -> None:
    template = "... <|channel|> ..."
    openai = FORMATS["openai"], harmony.NAME
    assert formats_of(None, None, template) == formats_of("openai", None, None) == openai
    assert formats_of(None, harmony.NAME, None) == formats_of("openai", harmony.NAME, "") == openai
    assert formats_of(None, "qwen3", template) == (None, "qwen3")
    assert formats_of("hermes", "qwen3", template) == (FORMATS["hermes"], "qwen3")
    assert formats_of(None, None, "<tool_call>") == (FORMATS["hermes"], None)
    for pair in (("hermes", harmony.NAME), ("openai", "qwen3")):
        with pytest.raises(ValueError, match="belong together"):
            check_parsers(*pair)
    check_parsers("openai", harmony.NAME)
    check_parsers("hermes", "qwen3")
