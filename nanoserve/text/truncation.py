"""Cuts a text to a number of tokens, and keeps the special tokens that its tokenizer adds."""

from typing import Any

from nanoserve.utils.checks import require

_SAMPLE = 64  # characters; the same tokens are added to any text


def encoded_within(
    tokenizer: Any, text: str, most: int, name: str, from_left: bool = False
) -> list[int]:
    """Return at most `most` token ids of a text, with the special tokens around them.

    name: of the option that sets `most`, for errors. from_left: cut off the beginning of the text
    instead of its end. Raises `ValueError` if no token of the text would be left.
    """
    whole = tokenizer.encode(text)
    if len(whole) <= most:
        return list(whole)
    before, after = _num_added(tokenizer, text[:_SAMPLE])
    kept, end = most - before - after, len(whole) - after
    require(
        kept > 0,
        f"{name}={most} leaves no token of the text: the tokenizer adds {before + after} itself",
    )
    middle = whole[end - kept : end] if from_left else whole[before : before + kept]
    return [*whole[:before], *middle, *whole[end:]]


def _num_added(tokenizer: Any, text: str) -> tuple[int, int]:
    """Return how many tokens the tokenizer adds before a text, and after it."""
    whole, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    num_added = len(whole) - len(plain)
    before = next((i for i in range(num_added) if whole[i : i + len(plain)] == plain), num_added)
    return before, num_added - before
