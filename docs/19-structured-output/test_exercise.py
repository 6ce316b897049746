"""The exercise of chapter 19 against `re`, by enumeration, and in the engine's own hands."""

import random
import re
from itertools import product

import numpy as np
import pytest

from nanoserve import SamplingParams
from nanoserve.engine.sequence import Sequence
from nanoserve.features.structured.constrained_sequence import Guided
from nanoserve.features.structured.grammar import count_legal

from .exercise import Automaton, TokenAutomaton

# Regular expressions over "a", "b", "c" and automata for them, with the longest of the shortest
# ways from any state to an end.
EXAMPLES = {
    "abc": Automaton([{"a": 1}, {"b": 2}, {"c": 3}, {}], frozenset({3})),
    "(ab)*c": Automaton([{"a": 1, "c": 2}, {"b": 0}, {}], frozenset({2})),
    "a[ab]?c?": Automaton([{"a": 1}, {"a": 2, "b": 2, "c": 3}, {"c": 3}, {}], frozenset({1, 2, 3})),
    "a(bc)?": Automaton([{"a": 1}, {"b": 2}, {"c": 3}, {}], frozenset({1, 3})),
    "a*b+": Automaton([{"a": 0, "b": 1}, {"b": 1}], frozenset({1})),
    "(aa|bb)c": Automaton([{"a": 1, "b": 2}, {"a": 3}, {"b": 3}, {"c": 4}, {}], frozenset({4})),
    # With a way into state 3, from which nothing leads to an end.
    "a(b|cc)": Automaton(
        [{"a": 1, "b": 3}, {"b": 2, "c": 4}, {"a": 3}, {"b": 3}, {"c": 2}], frozenset({2})
    ),
}
VOCABULARY = ["a", "b", "c", "", "ab", "bc", "abc", "aa", "bb", "cc", "ba", "abab", "ac", "x"]
LONGEST = 10  # characters that are enumerated


def allowed(grammar: TokenAutomaton, size: int) -> list[int]:
    """What the mask says. Its words begin full, so that what is not cleared shows."""
    mask = np.full(-(-size // 32), -1, dtype=np.int32)
    grammar.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def texts_of(pattern: str) -> set[str]:
    """All texts of up to so many characters that match."""
    every = ("".join(t) for n in range(LONGEST + 1) for t in product("abc", repeat=n))
    return {text for text in every if re.fullmatch(pattern, text)}


def test_a_token_is_walked_from_its_first_to_its_last_character() -> None:
    grammar = TokenAutomaton(EXAMPLES["abc"], VOCABULARY)
    told = "pattern abc, nothing yet"
    assert allowed(grammar, len(VOCABULARY)) == [0, 4, 6], told  # a, ab, abc
    assert grammar.behind[0] == {0: 1, 4: 2, 6: 3}, told
    assert grammar.advance(0) and not grammar.advance(0), "pattern abc: a second 'a'"
    assert allowed(grammar, len(VOCABULARY)) == [1, 5], "pattern abc, behind 'a'"  # b, bc


def test_no_token_leads_into_a_dead_end() -> None:
    grammar = TokenAutomaton(EXAMPLES["a(b|cc)"], VOCABULARY)
    assert allowed(grammar, len(VOCABULARY)) == [0, 4, 12], "pattern a(b|cc): a, ab, ac; never b"
    grammar.accept([4])
    assert grammar.is_terminated and grammar.may_end, "pattern a(b|cc), behind 'ab'"


def test_the_highest_bit_of_a_word_is_a_token_like_others() -> None:
    vocabulary = ["x"] * 31 + ["a", "b", "a"] + ["x"] * 40
    grammar = TokenAutomaton(EXAMPLES["abc"], vocabulary)
    assert allowed(grammar, len(vocabulary)) == [31, 33], "token 31 is 'a', token 33 too"
    mask = np.zeros(3, dtype=np.int32)
    grammar.fill(mask)
    assert mask.tolist() == [-(2**31), 2, 0], "the words themselves"


def test_what_may_end_is_not_forced() -> None:
    letters = ["a", "b", "c"]
    for pattern, run in (("abc", [0, 1, 2]), ("(ab)*c", []), ("a(bc)?", [0]), ("a*b+", [])):
        grammar = TokenAutomaton(EXAMPLES[pattern], letters)
        assert grammar.forced(9) == run, f"pattern {pattern}, tokens a, b, c"
        assert grammar.forced(9) == run, f"pattern {pattern}: asked twice"
    grammar = TokenAutomaton(EXAMPLES["abc"], letters)
    assert grammar.forced(2) == [0, 1], "at most two"
    looping = Automaton([{"a": 1}, {"b": 0, "c": 2}, {}], frozenset({2}))
    grammar = TokenAutomaton(looping, ["a", "b"])  # nothing writes the "c" that would end it
    assert grammar.forced(5) == [0, 1, 0, 1, 0], "(ab)*ac, without a token for c: at most five"


def test_what_may_not_come_is_an_error_of_accept() -> None:
    grammar = TokenAutomaton(EXAMPLES["abc"], VOCABULARY)
    with pytest.raises(ValueError):
        grammar.accept([4, 0])


@pytest.mark.parametrize("pattern", EXAMPLES)
def test_masks_are_those_that_re_leaves(pattern: str) -> None:
    """Behind each sequence of tokens a token may come if a matching text begins like that."""
    matching = texts_of(pattern)
    beginnings = {text[:n] for text in matching for n in range(len(text) + 1)}
    waiting: list[list[int]] = [[]]
    while waiting:
        token_ids = waiting.pop()
        text = "".join(VOCABULARY[i] for i in token_ids)
        told = f"pattern {pattern}, tokens {token_ids}, which are {text!r}"
        grammar = TokenAutomaton(EXAMPLES[pattern], VOCABULARY)
        grammar.accept(token_ids)
        assert grammar.may_end == (text in matching), told
        fitting = [i for i, token in enumerate(VOCABULARY) if token and text + token in beginnings]
        if len(text) <= 4:  # with the longest token and the shortest way to an end it is up to 10
            assert allowed(grammar, len(VOCABULARY)) == fitting, told
            assert grammar.is_terminated == (not fitting), told
            waiting += [[*token_ids, i] for i in fitting]


@pytest.mark.parametrize("seed", range(40))
def test_there_and_back_is_as_if_it_had_not_been(seed: int) -> None:
    """Random ways through random examples; whoever has been everywhere is as one that begins."""
    rng = random.Random(seed)
    pattern = rng.choice(list(EXAMPLES))
    travelled = TokenAutomaton(EXAMPLES[pattern], VOCABULARY)
    path: list[int] = []
    for _ in range(20):
        choices = allowed(travelled, len(VOCABULARY))
        if choices and rng.random() < 0.6:
            path.append(rng.choice(choices))
            assert travelled.advance(path[-1]), (pattern, path)
        elif path:
            count = rng.randint(0, len(path))
            travelled.rollback(count)
            del path[len(path) - count :]
        fresh = TokenAutomaton(EXAMPLES[pattern], VOCABULARY)
        fresh.accept(path)
        told = f"pattern {pattern}, tokens {path}"
        assert allowed(travelled, len(VOCABULARY)) == allowed(fresh, len(VOCABULARY)), told
        assert travelled.forced(8) == fresh.forced(8), told
        assert travelled.may_end == fresh.may_end, told
        asked = [rng.randrange(len(VOCABULARY)) for _ in range(3)]
        legal = count_legal(travelled, asked)  # the engine's: it advances, and rolls back
        assert legal == count_legal(fresh, asked), f"{told}, then {asked}"


@pytest.mark.parametrize("seed", range(20))
def test_the_engine_follows_a_sequence_with_it(seed: int) -> None:
    """`Guided` stands between a sequence and its grammar: draft tokens, samples, and all."""
    rng = random.Random(seed)
    pattern = rng.choice(list(EXAMPLES))
    seq = Sequence("r", [1], SamplingParams(max_tokens=30), 100)
    guided = Guided(seq, TokenAutomaton(EXAMPLES[pattern], VOCABULARY))
    while not guided.is_terminated() and seq.num_output_tokens < 12:
        forced = guided.forced(4)
        mask = np.zeros(1, dtype=np.int32)
        guided.fill(forced, mask)  # what may come behind the forced run
        choices = [i for i in range(len(VOCABULARY)) if mask[0] >> i & 1]
        chosen = rng.choice(choices) if choices else 13  # "x", where the output is at its end
        told = f"pattern {pattern}, tokens {seq.output_token_ids}, forced {forced}, then {chosen}"
        illegal = guided.first_illegal(forced, [*forced, chosen])
        assert illegal == (None if choices else len(forced)), told
        seq.token_ids += [*forced, chosen] if choices else forced
        text = "".join(VOCABULARY[i] for i in seq.output_token_ids)
        assert guided.grammar.may_end == bool(re.fullmatch(pattern, text)), told
