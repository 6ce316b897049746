"""The numbers in the chapter on output, against values worked out by hand."""

import pytest

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
        ("a", ["a"], 0),  # a stop string of one character is complete or not there
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
