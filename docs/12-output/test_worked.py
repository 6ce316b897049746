"""Tests of the worked examples on output, against values computed by hand."""

import pytest
import torch
from tokenizers import Tokenizer

from nanoserve import LLM, SamplingParams

from . import worked as output


@pytest.mark.parametrize(
    ("text", "length"), [("a", 1), ("é", 2), ("中", 3), ("👍", 4), ("块表", 6)]
)
def test_bytes_of_a_character(text: str, length: int) -> None:
    assert output.utf8_length(text) == length
    assert output.broken_by_single_tokens(text) == (0 if length == 1 else length)


def test_the_table_of_bytes_shows_a_character_when_its_last_byte_is_there() -> None:
    rows = output.bytes_table("A块").splitlines()[2:]
    assert rows == [
        "| `41` | A | A | A |",
        "| `e5` | \ufffd | A\ufffd | (nothing yet) |",
        "| `9d` | \ufffd | A\ufffd | (nothing yet) |",
        "| `97` | \ufffd | A块 | 块 |",
    ]


def test_decoding_everything_again_is_quadratic() -> None:
    assert output.tokens_decoded(1_000) == 500_500
    assert output.tokens_decoded(8_000) == 32_004_000


def test_characters_sent() -> None:
    assert output.characters_sent(1_000, 4, cumulative=False) == 4_000
    assert output.characters_sent(1_000, 4, cumulative=True) == 2_002_000


@pytest.mark.parametrize(
    ("text", "stops", "length"),
    [
        ("Answ", ["swer"], 2),
        ("aab", ["aabb", "abc"], 3),
        ("aba", ["abab"], 3),
        ("done", ["\n\n"], 0),
        ("", ["ab"], 0),
        ("a", ["a"], 0),  # a stop string of one character is either complete or absent
    ],
)
def test_what_is_held_back(text: str, stops: list[str], length: int) -> None:
    assert output.held_back(text, stops) == length


def test_a_stop_string_across_three_tokens() -> None:
    table = output.stop_table(["It is 4", "2.\n", "User", ":", " no"], ["\nUser:"])
    assert table.splitlines()[2:] == [
        "| `It is 4` | `It is 4` |  |  |",
        "| `2.\n` | `2.` | `\n` |  |".replace("\n", "⏎"),
        "| `User` |  | `\nUser` |  |".replace("\n", "⏎"),
        "| `:` |  |  | `\nUser:` |".replace("\n", "⏎"),
    ]


def test_a_false_alarm_is_shown_when_it_is_over() -> None:
    rows = output.stop_table(["a", "b", "x"], ["abc"]).splitlines()[2:]
    assert rows == ["| `a` |  | `a` |  |", "| `b` |  | `ab` |  |", "| `x` | `abx` |  |  |"]


WORDS = [" scheduler", "unpaged", "preemption", " attention", "块表", "令牌", "🙂", "the", "x"]


@pytest.mark.parametrize("word", WORDS)
def test_the_merges_end_where_the_tokenizer_does(word: str) -> None:
    tokenizer = Tokenizer.from_file(str(output._FILE))
    names = tokenizer.encode(word, add_special_tokens=False).tokens
    first, *_, last = output.merges_table(word).splitlines()[2:] * 2
    assert last.split(" |")[0] == "| " + output._row(names), word
    assert first.count("`") == 2 * len(word.encode()), word


def test_merges_by_hand() -> None:
    assert output.merges_table("unpaged").splitlines()[2:] == [
        "| `u` `n` `p` `a` `g` `e` `d` |  |  |",
        "| `u` `n` `p` `a` `g` `ed` | `e` + `d` | 31 |",
        "| `un` `p` `a` `g` `ed` | `u` + `n` | 91 |",
        "| `un` `p` `ag` `ed` | `a` + `g` | 279 |",
        "| `un` `p` `aged` | `ag` + `ed` | 1,012 |",
    ]


def test_tokens_join_to_their_text_and_are_counted() -> None:
    rows = output.tokens_table(["令牌", "paged KV"]).splitlines()[2:]
    assert rows[0].startswith("| `令牌` | `e4 bb` `a4` `e7 89` `8c` | ")
    assert rows[1].startswith("| `paged␣KV` | `p` `aged` `␣KV` | ")
    # 256 bytes, one token for each merge, and the special ones.
    assert output.vocabulary() == 256 + output.num_merges() + 3 == 2_048


def test_a_token_with_a_full_stop_and_half_an_emoji() -> None:
    assert output.held_table("块表。🌍").splitlines()[2:] == [
        "| `e5 9d 97 e8 a1 a8` | `块表` |  |",
        "| `e3 80 82 f0 9f 8c` |  | `。` |",
        "| `8d` | `。🌍` |  |",
    ]


def test_the_engine_finds_a_stop_string_in_what_the_decoder_holds() -> None:
    prompt = {"prompt_token_ids": [1]}
    wanted = [token_id for token_id, _ in output._pieces("块表。🌍")]

    def force(seen: list[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -1e9)
        forced[wanted[len(seen)]] = 0
        return forced

    params = SamplingParams(temperature=0, max_tokens=3, stop=["。"], logits_processors=[force])
    with LLM("tiny-qwen3", device="cpu") as llm:
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
    assert answer.outputs[0].text == "块表"
    assert answer.outputs[0].token_ids == wanted[:2]
