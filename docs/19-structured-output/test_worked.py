"""Numbers of chapter 19, against Python's `re`, by enumeration, and against a count by hand."""

import re
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

from nanoserve import SamplingParams
from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling.sampler import Sampler

from . import worked

ALPHABET = '{"n: 07}x'


def matching_texts() -> list[str]:
    """All texts of the vocabulary's characters that the whole pattern matches, according to `re`.

    The middle is every text of up to three characters; `edits` covers the characters around it.
    """
    middles = ("".join(m) for n in range(4) for m in product(ALPHABET, repeat=n))
    texts = (f'{{"n": {middle}}}' for middle in middles)
    return [text for text in texts if re.fullmatch(worked.PATTERN, text)]


def edits(text: str) -> Iterator[str]:
    """All texts with one character more, one less, or another one."""
    for i in range(len(text) + 1):
        yield text[:i] + text[i + 1 :]
        for character in ALPHABET:
            yield text[:i] + character + text[i:]
            yield text[:i] + character + text[i + 1 :]


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split(" | ")] for line in table.splitlines()[2:]]


def test_the_states_accept_what_re_matches() -> None:
    texts = matching_texts()
    assert len(texts) == 2 + 4  # one digit or two, of 0 and 7
    for text in {"", *texts}.union(*map(edits, texts)):
        accepts = worked._may_end(worked._walk(worked._rule(), text))
        assert accepts == bool(re.fullmatch(worked.PATTERN, text)), text


def test_a_token_is_allowed_if_and_only_if_a_matching_text_continues_with_it() -> None:
    texts = matching_texts()
    for before in {text[:n] for text in texts for n in range(len(text) + 1)}:
        allowed = worked._allowed(worked._walk(worked._rule(), before))
        expected = [
            i
            for i, token in enumerate(worked.VOCABULARY)
            if any(text.startswith(before + token) for text in texts)
        ]
        assert allowed == expected, before


def test_the_table_of_masks() -> None:
    """By hand: 0 and 8 are the bits 2^0 + 2^8, and so on."""
    rows = cells(worked.mask_table())
    assert worked.num_states() == len(rows) == 10
    words = [257, 2, 4, 514, 8, 1040, 2240, 2272, 32, 0]
    assert [int(row[4]) for row in rows] == words
    assert [int(row[3].strip("`"), 2) for row in rows] == words
    assert [row[5].rstrip(" |") for row in rows] == [""] * 9 + ["yes"]
    assert worked.vocabulary().startswith('0 `{`, 1 `"`') and "10 `␣7`" in worked.vocabulary()


def test_a_text_has_several_tokenizations() -> None:
    # {" or { ", then ": or " :, then " 7" or a space and a 7; and after one digit, 7} or 7 }.
    assert worked.num_tokenizations('{"n": 70}') == 2 * 2 * 2
    assert worked.num_tokenizations('{"n": 00}') == 2 * 2
    assert worked.num_tokenizations('{"n": 7}') == 2 * 2 * 3
    assert worked.num_tokenizations('{"n": 700}') == 0


def test_steps_with_jump_forward_tokens() -> None:
    assert worked._steps("70") == [([], 8), ([2, 9], 10), ([], 6), ([5], None)]
    # After " 7" a second digit may come, so the end is not without a choice.
    assert worked._steps("7") == [([], 8), ([2, 9], 10), ([], 5)]
    # Instead of the space, " 7" may come, so the space is not without a choice.
    assert worked._steps("0") == [([], 8), ([2, 9], 4), ([], 6), ([], 5)]
    assert [worked.num_tokens(number) for number in ("70", "7", "0")] == [6, 5, 6]
    assert [worked.num_steps("70", jump_forward=jump) for jump in (True, False)] == [4, 6]
    assert [worked.num_forced(number) for number in ("70", "7", "0")] == [4, 3, 3]
    assert len(worked.run_table("70").splitlines()) == 2 + 4


def test_probabilities_and_sizes() -> None:
    assert worked.is_right(2, 0.9) == pytest.approx(0.81)
    assert worked.tries(2, 0.5) == 4
    assert worked.mask_bytes(33) == 8 and worked.logits_bytes(33) == 132
    assert worked.table_bytes(10, 33) == 80
    assert worked.rows_with_masks(64, 0.75) == 16


@pytest.mark.parametrize("num_letters", range(6))
def test_states_of_an_automaton_that_looks_back(num_letters: int) -> None:
    """By subset construction. All sets have different continuations, so all are needed."""
    start = frozenset({0})
    found, waiting = {start}, [start]
    while waiting:
        places = waiting.pop()
        for letter in "ab":
            # i > 0: a candidate for the required "a" was read i - 1 letters ago.
            moved = {0} | {i + 1 for i in places if 0 < i <= num_letters}
            after = frozenset(moved | ({1} if letter == "a" else set()))
            waiting += [after] if after not in found else []
            found.add(after)
    assert worked.lookback_states(num_letters) == len(found)


def test_effect_of_masks_on_two_answers() -> None:
    rows = cells(worked.two_answers(0.6, (0.1, 0.9)))
    # 0.06 and 0.36 of all answers are valid: a seventh of these begins with A.
    assert [row[3:] for row in rows] == [["60%", "14% |"], ["40%", "86% |"]]


class Legal:
    """`TokenMask` that allows some tokens, and counts how often the mask is filled."""

    def __init__(self, token_ids: np.ndarray) -> None:
        self.token_ids, self.num_fills = set(token_ids.tolist()), 0

    def first_illegal(self, token_ids: list[int]) -> int | None:
        return None if token_ids[0] in self.token_ids else 0

    def fill(self, index: int, mask: np.ndarray) -> None:
        self.num_fills += 1
        bits = np.isin(np.arange(32 * len(mask)), list(self.token_ids))
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)


def test_sampling_first_and_masking_first_choose_the_same_token() -> None:
    """With the engine's own sampler and noise. Of 32 equally likely tokens 24 are allowed, so a
    mask is needed in a quarter of the rows."""
    num_rows, size = 400, 32
    rng, sampler = np.random.default_rng(1), Sampler(num_rows, size, torch.device("cpu"))
    for slot in range(num_rows):
        params = SamplingParams(temperature=float(rng.choice([0.5, 1.0, 1.5])))
        sampler.set_slot(SlotUpdate(slot, params, seed=slot))
    logits, slots = torch.zeros(num_rows, size), np.arange(num_rows)
    logits += torch.from_numpy(rng.normal(0, 0.01, (num_rows, size))).float()
    masks = {slot: Legal(rng.choice(size, 24, replace=False)) for slot in range(num_rows)}
    masked = logits.clone()
    for slot, mask in masks.items():
        masked[slot, [i for i in range(size) if i not in mask.token_ids]] = -torch.inf
    expected = sampler.sample(masked, slots, slots).token_ids
    found = sampler.sample(logits, slots, slots, token_masks=masks).token_ids
    assert found.tolist() == expected.tolist()
    num_masks = sum(mask.num_fills for mask in masks.values())
    assert num_masks == pytest.approx(worked.rows_with_masks(num_rows, 24 / 32), rel=0.3)
