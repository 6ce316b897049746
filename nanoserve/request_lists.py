"""The lists and dictionaries of a request: bounded, checked and copied.

They come from whoever sends requests, and some are looked through at each of his tokens, in the
step of all others. So their sizes have limits, far above what is of use, and these are checked
first: what is too large costs nothing. The copies are the request's own; the caller may go on
changing his.
"""

from collections.abc import Mapping
from typing import Any

from nanoserve.checks import check_list, is_int, is_number, is_text, require, shown

MOST_TOKEN_IDS = 2**19  # twice as many as the largest vocabularies have
# How many texts, and how many characters all of them together.
MOST_STOPS = (1024, 16_384)
MOST_LOGPROB_IDS = 128  # vLLM's limit
MOST_BAD_WORDS = (4096, 65_536)  # each is compared with the end of the output at each token
LONGEST_BAD_WORD = 1024  # characters; tokenizers of SentencePiece's kind take quadratic time


def checked_lists(given: dict[str, Any]) -> dict[str, Any]:
    """Copies of parameters of a request, by their names in `SamplingParams`; or `ValueError`."""
    return {name: _checked(name, value) for name, value in given.items()}


def _checked(name: str, value: Any) -> Any:
    if name == "stop":
        return _checked_texts(name, value, MOST_STOPS)
    if name == "bad_words":
        words = _checked_texts(name, value, MOST_BAD_WORDS)
        longest = max(map(len, words), default=0)
        told = (
            f"bad_words has a text of {longest} characters; at most {LONGEST_BAD_WORD} are allowed"
        )
        require(longest <= LONGEST_BAD_WORD, told)
        return words
    if name == "logit_bias":
        return _checked_bias(value)
    if name == "extra_args":
        is_named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        require(is_named, f"extra_args={shown(value)} must be a dictionary of names")
        return dict(value)
    if name == "logprob_token_ids":
        _check_size(name, value, MOST_LOGPROB_IDS)
    if name == "logits_processors":
        check_list(name, value, callable, "callables")
        return list(value)
    return _checked_ids(name, value)


def _checked_ids(name: str, value: Any) -> list[int]:
    _check_size(name, value, MOST_TOKEN_IDS)
    if not isinstance(value, (list, tuple)) or {*map(type, value)} != {int}:
        check_list(name, value, is_int, "integers", may_be_empty=name != "allowed_token_ids")
    return list(map(int, value))


def _checked_texts(name: str, value: Any, most: tuple[int, int]) -> str | list[str]:
    """`stop` may be a single text, and stays one."""
    require(
        name != "stop" or not isinstance(value, str) or value != "",
        "stop='' would end an answer before it begins: leave it out, or give a text",
    )
    texts = [value] if name == "stop" and is_text(value) else value
    _check_size(name, texts, most[0])
    if texts is value:
        check_list(name, value, is_text, "texts that are not empty")
    texts = [str.__str__(text) for text in texts]  # of a subclass, what it says and nothing more
    num_characters = sum(map(len, texts))
    if num_characters > most[1]:
        raise ValueError(
            f"{name} has {num_characters} characters; together at most {most[1]} are allowed"
        )
    return texts[0] if isinstance(value, str) else texts


def _checked_bias(value: Any) -> dict[int, float]:
    allowed = "must map token ids, integers, to numbers in [-100, 100]"
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias={shown(value)} {allowed}")
    _check_size("logit_bias", value, MOST_TOKEN_IDS)
    found: dict[int, float] = {}
    for token_id, number in value.items():
        is_id = is_int(token_id) or _is_id_in_text(token_id)
        if not is_id or not is_number(number) or not -100 <= number <= 100:
            raise ValueError(f"logit_bias={{{shown(token_id)}: {shown(number)}}} {allowed}")
        if int(token_id) in found:
            raise ValueError(f"logit_bias has the token id {int(token_id)} as a number and a text")
        found[int(token_id)] = float(number)
    return found


def _is_id_in_text(token_id: Any) -> bool:
    """Tell whether a token id is written as text, as keys of JSON are."""
    return isinstance(token_id, str) and token_id.isascii() and token_id.isdecimal()


def _check_size(name: str, value: Any, most: int) -> None:
    if isinstance(value, (list, tuple, Mapping)) and len(value) > most:
        raise ValueError(f"{name} has {len(value)} entries; at most {most} are allowed")
