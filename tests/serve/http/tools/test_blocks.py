"""Blocks of an output: every way to cut a text yields the same ones, in the order of the text."""

import itertools
import json
import random
import sys
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")

from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.blocks import BlockStream, Change, is_no_object, object_so_far
from nanoserve.serve.http.tools.output_parser import OutputParser
from nanoserve.serve.http.tools.parsers import FORMATS
from nanoserve.serve.http.tools.tool_choice import Function, ToolUse

FUNCTIONS = [Function(name, {}, False) for name in ("f", "g")]


def use_of(name: str, several: bool = True) -> ToolUse:
    return ToolUse(FORMATS[name], FUNCTIONS, False, False, several)


HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
# By name: the parsers, the text, and its blocks.
TEXTS: dict[str, tuple[str | None, str | None, str, list[tuple[str, ...]]]] = {
    "plain": (None, None, "Hello, <wörld>. ", [("text", "Hello, <wörld>. ")]),
    "empty": (None, None, "", [("text", "")]),
    "thought": (
        None,
        "qwen3",
        "<think>\nHm, a <b>. \n</think>\n\nYes.",
        [("reasoning", "Hm, a <b>."), ("text", "Yes.")],
    ),
    "thought alone": (
        "hermes",
        "qwen3",
        "<think>Hm.</think>",
        [("reasoning", "Hm."), ("text", "")],
    ),
    "text, call, text, call": (
        "hermes",
        "qwen3",
        "<think>Hm.</think>Let me see.\n"
        + HERMES.format("f", '{"a": "</think>"}')
        + "\nAnd more.\n"
        + HERMES.format("g", '{"b": [1, 2]}'),
        [
            ("reasoning", "Hm."),
            ("text", "Let me see."),
            ("call", '{"a": "</think>"}', "f"),
            ("text", "And more."),
            ("call", '{"b": [1, 2]}', "g"),
        ],
    ),
    "calls": (
        "hermes",
        None,
        HERMES.format("f", "{}") + "\n" + HERMES.format("f", '{"x": "é🦙"}'),
        [("call", "{}", "f"), ("call", '{"x": "é🦙"}', "f")],
    ),
    "call, text": (
        "hermes",
        None,
        HERMES.format("f", "{}") + "\nSo it is. ",
        [("call", "{}", "f"), ("text", "So it is.")],
    ),
    "harmony": (
        "openai",
        harmony.NAME,
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}<|call|>',
        [
            ("reasoning", "One."),
            ("text", "I look."),
            ("reasoning", "Two."),
            ("call", '{"a": 1}', "f"),
        ],
    ),
    "mistral": (
        "mistral",
        None,
        'So: [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [("text", "So:"), ("call", '{"a": 1}', "f"), ("call", "{}", "g")],
    ),
}

BODY = ChatBody(messages=[])
MOST = sys.float_info.max


def stream_of(tools: str | None, reasoning: str | None) -> BlockStream:
    use = None if tools is None else use_of(tools)
    return BlockStream(OutputParser(use, reasoning, "prompt", BODY))


def blocks_of(stream: BlockStream) -> list[tuple[str, ...]]:
    return [
        (block.kind, block.text, block.name) if block.name else (block.kind, block.text)
        for block in stream.blocks
    ]


def add_in_pieces(stream: BlockStream, pieces: list[str]) -> None:
    """Checks that what the steps say is what the blocks are, one open at a time."""
    texts: dict[int, str] = {}
    open_block = None
    for number, piece in enumerate(pieces):
        for step in stream.add(piece, number == len(pieces) - 1):
            if step.change is Change.BEGIN:
                assert open_block is None and step.block.index == len(texts)
                texts[step.block.index] = ""
                open_block = step.block
            assert step.block is open_block
            if step.change is Change.GROW:
                assert step.text
                texts[step.block.index] += step.text
            if step.change is Change.END:
                open_block = None
    assert open_block is None
    assert [texts[block.index] for block in stream.blocks] == [b.text for b in stream.blocks]


@pytest.mark.parametrize("name", list(TEXTS))
def test_every_cut_yields_the_same_blocks(name: str, by_size: Any) -> None:
    tools, reasoning, text, expected = TEXTS[name]
    whole = stream_of(tools, reasoning)
    add_in_pieces(whole, [text])
    assert blocks_of(whole) == expected
    assert all(block.is_complete for block in whole.blocks)
    cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    cuts.append([*text, ""])
    rng = random.Random(name)
    for _ in range(by_size(3, 30, 300)):
        ends = sorted(rng.choices(range(len(text) + 1), k=4))
        cuts.append([text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])])
    for pieces in cuts:
        stream = stream_of(tools, reasoning)
        add_in_pieces(stream, pieces)
        assert blocks_of(stream) == expected, pieces


def test_what_was_cut_off_is_not_complete() -> None:
    tools, reasoning, text, expected = TEXTS["text, call, text, call"]
    for length in range(len("<think>H"), len(text)):
        stream = stream_of(tools, reasoning)
        stream.add(text[:length], True, is_cut=True)
        assert blocks_of(stream)[:-1] == expected[: len(stream.blocks) - 1]
        assert all(block.is_complete for block in stream.blocks[:-1])
        last = stream.blocks[-1] if stream.blocks else None
        assert last is None or last.kind == "call" or not last.is_complete


def test_one_call_is_one() -> None:
    text = TEXTS["calls"][2]
    stream = BlockStream(OutputParser(use_of("hermes", several=False), None, "", BODY))
    stream.add(text, True)
    assert blocks_of(stream) == [("call", "{}", "f")]


def test_an_output_that_alternates_for_pages_costs_no_more_than_its_bound() -> None:
    calls = 0

    class Counting(OutputParser):
        def __call__(self, text: str, is_final: bool) -> Any:
            nonlocal calls
            calls += 1
            return super().__call__(text, is_final)

    stream = BlockStream(Counting(use_of("hermes"), None, "", ""))
    stream.add(f"text\n{HERMES.format('f', '{}')}\n" * 200, True)
    assert calls < 600
    assert [block.kind for block in stream.blocks].count("call") == 200


def test_arguments_that_break_off() -> None:
    whole = json.dumps({"a": [1, {"b": "x"}], "c": None})
    assert object_so_far(whole) == json.loads(whole)
    assert object_so_far("") == {}
    for length in range(1, len(whole)):
        value = object_so_far(whole[:length])
        assert isinstance(value, dict)
    assert object_so_far("no JSON") == {"arguments": "no JSON"}
    assert object_so_far('["a"]') == {"arguments": ["a"]}
    assert object_so_far('{"a": [1e999, -1e999], "b": 0.5}') == {"a": [MOST, -MOST], "b": 0.5}
    assert not is_no_object("") and not is_no_object(' {"a') and is_no_object(" [")
