"""Tests of the exercise of chapter 19, by enumeration and with the engine's own class."""

import random
import re
from itertools import product

import numpy as np
import pytest

from nanoserve import SamplingParams
from nanoserve.engine.sequence import Sequence
from nanoserve.features.structured.constrained_sequence import ConstrainedSequence
from nanoserve.features.structured.grammar import count_legal

from .exercise import Automaton, TokenAutomaton

# Regular expressions over "a", "b", "c" and automata for them.
EXAMPLES = {
    "abc": Automaton([{"a": 1}, {"b": 2}, {"c": 3}, {}], frozenset({3})),
    "(ab)*c": Automaton([{"a": 1, "c": 2}, {"b": 0}, {}], frozenset({2})),
    "a[ab]?c?": Automaton([{"a": 1}, {"a": 2, "b": 2, "c": 3}, {"c": 3}, {}], frozenset({1, 2, 3})),
    "a(bc)?": Automaton([{"a": 1}, {"b": 2}, {"c": 3}, {}], frozenset({1, 3})),
    "a*b+": Automaton([{"a": 0, "b": 1}, {"b": 1}], frozenset({1})),
    "(aa|bb)c": Automaton([{"a": 1, "b": 2}, {"a": 3}, {"b": 3}, {"c": 4}, {}], frozenset({4})),
    # With a transition into state 3, from which no accepting state can be reached.
    "a(b|cc)": Automaton(
        [{"a": 1, "b": 3}, {"b": 2, "c": 4}, {"a": 3}, {"b": 3}, {"c": 2}], frozenset({2})
    ),
}
VOCABULARY = ["a", "b", "c", "", "ab", "bc", "abc", "aa", "bb", "cc", "ba", "abab", "ac", "x"]
LONGEST = 10  # characters that are enumerated


def allowed(grammar: TokenAutomaton, size: int) -> list[int]:
    """Tokens in the mask. All its bits are set first, to detect those that are not cleared."""
    mask = np.full(-(-size // 32), -1, dtype=np.int32)
    grammar.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def texts_of(pattern: str) -> set[str]:
    """All matching texts of up to `LONGEST` characters."""
    every = ("".join(t) for n in range(LONGEST + 1) for t in product("abc", repeat=n))
    return {text for text in every if re.fullmatch(pattern, text)}


def test_a_token_is_read_from_its_first_to_its_last_character() -> None:
    grammar = TokenAutomaton(EXAMPLES["abc"], VOCABULARY)
    case = "pattern abc, no tokens yet"
    assert allowed(grammar, len(VOCABULARY)) == [0, 4, 6], case  # a, ab, abc
    assert grammar.transitions[0] == {0: 1, 4: 2, 6: 3}, case
    assert grammar.advance(0) and not grammar.advance(0), "pattern abc: a second 'a'"
    assert allowed(grammar, len(VOCABULARY)) == [1, 5], "pattern abc, after 'a'"  # b, bc


def test_no_token_leads_into_a_dead_end() -> None:
    grammar = TokenAutomaton(EXAMPLES["a(b|cc)"], VOCABULARY)
    assert allowed(grammar, len(VOCABULARY)) == [0, 4, 12], "pattern a(b|cc): a, ab, ac; never b"
    grammar.accept([4])
    assert grammar.is_terminated and grammar.may_end, "pattern a(b|cc), after 'ab'"


def test_the_highest_bit_of_a_word_is_a_token_like_any_other() -> None:
    vocabulary = ["x"] * 31 + ["a", "b", "a"] + ["x"] * 40
    grammar = TokenAutomaton(EXAMPLES["abc"], vocabulary)
    assert allowed(grammar, len(vocabulary)) == [31, 33], "token 31 is 'a', token 33 too"
    mask = np.zeros(3, dtype=np.int32)
    grammar.fill(mask)
    assert mask.tolist() == [-(2**31), 2, 0], "the words themselves"


def test_no_token_is_forced_where_the_output_may_end() -> None:
    letters = ["a", "b", "c"]
    for pattern, run in (("abc", [0, 1, 2]), ("(ab)*c", []), ("a(bc)?", [0]), ("a*b+", [])):
        grammar = TokenAutomaton(EXAMPLES[pattern], letters)
        assert grammar.forced(9) == run, f"pattern {pattern}, tokens a, b, c"
        assert grammar.forced(9) == run, f"pattern {pattern}: called twice"
    grammar = TokenAutomaton(EXAMPLES["abc"], letters)
    assert grammar.forced(2) == [0, 1], "at most two"
    looping = Automaton([{"a": 1}, {"b": 0, "c": 2}, {}], frozenset({2}))
    grammar = TokenAutomaton(looping, ["a", "b"])  # no token contains the "c" that would end it
    assert grammar.forced(5) == [0, 1, 0, 1, 0], "(ab)*ac, without a token for c: at most five"


def test_accept_raises_for_a_token_that_is_not_allowed() -> None:
    grammar = TokenAutomaton(EXAMPLES["abc"], VOCABULARY)
    with pytest.raises(ValueError):
        grammar.accept([4, 0])


@pytest.mark.parametrize("pattern", EXAMPLES)
def test_masks_agree_with_re(pattern: str) -> None:
    """After each sequence of tokens a token is allowed if a matching text begins with them."""
    matching = texts_of(pattern)
    beginnings = {text[:n] for text in matching for n in range(len(text) + 1)}
    waiting: list[list[int]] = [[]]
    while waiting:
        token_ids = waiting.pop()
        text = "".join(VOCABULARY[i] for i in token_ids)
        case = f"pattern {pattern}, tokens {token_ids}, which are {text!r}"
        grammar = TokenAutomaton(EXAMPLES[pattern], VOCABULARY)
        grammar.accept(token_ids)
        assert grammar.may_end == (text in matching), case
        fitting = [i for i, token in enumerate(VOCABULARY) if token and text + token in beginnings]
        if (
            len(text) <= 4
        ):  # with the longest token and the shortest way to an accepting state: up to 10
            assert allowed(grammar, len(VOCABULARY)) == fitting, case
            assert grammar.is_terminated == (not fitting), case
            waiting += [[*token_ids, i] for i in fitting]


@pytest.mark.parametrize("seed", range(40))
def test_after_rollbacks_the_grammar_equals_a_fresh_one(seed: int) -> None:
    """Random paths with rollbacks through random examples, compared with a new grammar."""
    rng = random.Random(seed)
    pattern = rng.choice(list(EXAMPLES))
    grammar = TokenAutomaton(EXAMPLES[pattern], VOCABULARY)
    path: list[int] = []
    for _ in range(20):
        choices = allowed(grammar, len(VOCABULARY))
        if choices and rng.random() < 0.6:
            path.append(rng.choice(choices))
            assert grammar.advance(path[-1]), (pattern, path)
        elif path:
            count = rng.randint(0, len(path))
            grammar.rollback(count)
            del path[len(path) - count :]
        fresh = TokenAutomaton(EXAMPLES[pattern], VOCABULARY)
        fresh.accept(path)
        case = f"pattern {pattern}, tokens {path}"
        assert allowed(grammar, len(VOCABULARY)) == allowed(fresh, len(VOCABULARY)), case
        assert grammar.forced(8) == fresh.forced(8), case
        assert grammar.may_end == fresh.may_end, case
        asked = [rng.randrange(len(VOCABULARY)) for _ in range(3)]
        legal = count_legal(grammar, asked)  # the engine's function: it advances, and rolls back
        assert legal == count_legal(fresh, asked), f"{case}, then {asked}"


@pytest.mark.parametrize("seed", range(20))
def test_the_engine_follows_a_sequence_with_it(seed: int) -> None:
    """Draft tokens and samples, with the engine's class for the grammar of one sequence."""
    rng = random.Random(seed)
    pattern = rng.choice(list(EXAMPLES))
    seq = Sequence("r", [1], SamplingParams(max_tokens=30), 100)
    guided = ConstrainedSequence(seq, TokenAutomaton(EXAMPLES[pattern], VOCABULARY))
    while not guided.is_terminated() and seq.num_output_tokens < 12:
        forced = guided.forced(4)
        mask = np.zeros(1, dtype=np.int32)
        guided.fill(forced, mask)  # the tokens allowed after the jump-forward tokens
        choices = [i for i in range(len(VOCABULARY)) if mask[0] >> i & 1]
        chosen = (
            rng.choice(choices) if choices else 13
        )  # "x", which is not allowed, at the end of the output
        case = f"pattern {pattern}, tokens {seq.output_token_ids}, forced {forced}, then {chosen}"
        illegal = guided.first_illegal(forced, [*forced, chosen])
        assert illegal == (None if choices else len(forced)), case
        seq.token_ids += [*forced, chosen] if choices else forced
        text = "".join(VOCABULARY[i] for i in seq.output_token_ids)
        assert guided.grammar.may_end == bool(re.fullmatch(pattern, text)), case
