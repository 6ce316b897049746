"""Checks and copies the lists and dictionaries of a request, and limits their sizes.

They come from clients, and some are searched at each token of a request, in the same step as all
other requests. So their sizes have limits, far above any useful size, which are checked first:
rejecting a list that is too large costs nothing. Because of the copy, the caller may change the
original afterwards.

Each check takes the name of the parameter and its value, and returns the copy or raises
`ValueError`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from nanoserve.utils.checks import check_list, is_int, is_number, is_text, require, shown

MOST_TOKEN_IDS = 2**19  # twice the size of the largest vocabularies
MOST_STOPS = 1024
MOST_STOP_CHARACTERS = 16_384  # of all of them together
MOST_LOGPROB_IDS = 128  # vLLM's limit
MOST_BAD_WORDS = 4096  # each is compared with the end of the output at each token
MOST_BAD_WORD_CHARACTERS = 65_536
LONGEST_BAD_WORD = 1024  # characters; tokenizers of SentencePiece's kind take quadratic time


def token_ids(
    most: int = MOST_TOKEN_IDS, may_be_empty: bool = True
) -> Callable[[str, Any], list[int]]:
    """Return a function that checks a list of at most `most` token ids."""

    def check(name: str, value: Any) -> list[int]:
        _check_size(name, value, most)
        if not isinstance(value, (list, tuple)) or {*map(type, value)} != {int}:
            check_list(name, value, is_int, "integers", may_be_empty)
        return [int(token_id) for token_id in value]

    return check


def check_stop(name: str, value: Any) -> str | list[str]:
    """Check stop strings: one string, which is returned as such, or a list of strings."""
    if not isinstance(value, str):
        return _check_texts(name, value, MOST_STOPS, MOST_STOP_CHARACTERS)
    require(
        value != "",
        f"{name}='' would end the output before it begins: omit it or pass a non-empty string",
    )
    return _check_texts(name, [value], MOST_STOPS, MOST_STOP_CHARACTERS)[0]


def check_bad_words(name: str, value: Any) -> list[str]:
    words = _check_texts(name, value, MOST_BAD_WORDS, MOST_BAD_WORD_CHARACTERS)
    longest = max(map(len, words), default=0)
    require(
        longest <= LONGEST_BAD_WORD,
        f"{name} has a string of {longest} characters; at most {LONGEST_BAD_WORD} are allowed",
    )
    return words


def check_bias(name: str, value: Any) -> dict[int, float]:
    """Check numbers by token id; the ids may be strings, like keys in JSON."""
    allowed = "must map token ids (integers) to numbers in [-100, 100]"
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={shown(value)} {allowed}")
    _check_size(name, value, MOST_TOKEN_IDS)
    found: dict[int, float] = {}
    for token_id, number in value.items():
        is_id = is_int(token_id) or _is_id_in_text(token_id)
        if not is_id or not is_number(number) or not -100 <= number <= 100:
            raise ValueError(f"{name}={{{shown(token_id)}: {shown(number)}}} {allowed}")
        if int(token_id) in found:
            raise ValueError(
                f"{name} has the token id {int(token_id)} twice, as a number and as a string"
            )
        found[int(token_id)] = float(number)
    return found


def check_callables(name: str, value: Any) -> list[Any]:
    check_list(name, value, callable, "callables")
    return list(value)


def check_named(name: str, value: Any) -> dict[str, Any]:
    """Check a dictionary whose keys are strings; its values may be anything."""
    is_named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    require(is_named, f"{name}={shown(value)} must be a dictionary whose keys are strings")
    return dict(value)


def _check_texts(name: str, value: Any, most: int, most_characters: int) -> list[str]:
    _check_size(name, value, most)
    check_list(name, value, is_text, "non-empty strings")
    texts = [str.__str__(text) for text in value]  # plain strings, also of subclasses of str
    num_characters = sum(map(len, texts))
    require(
        num_characters <= most_characters,
        f"{name} has {num_characters} characters; together at most {most_characters} are allowed",
    )
    return texts


def _is_id_in_text(token_id: Any) -> bool:
    """Return True if a token id is written as a string, like keys in JSON."""
    return isinstance(token_id, str) and token_id.isascii() and token_id.isdecimal()


def _check_size(name: str, value: Any, most: int) -> None:
    if isinstance(value, (list, tuple, Mapping)) and len(value) > most:
        raise ValueError(f"{name} has {len(value)} entries; at most {most} are allowed")
