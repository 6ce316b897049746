"""Exercise: from an automaton over characters to masks over tokens.

Given are a finite automaton that reads characters, and a vocabulary: token `i` is the text
`vocabulary[i]`. Write the interface that the engine needs of a grammar
(`nanoserve/features/structured/grammar.py`).

1. `transitions` has for each state the allowed tokens, with the state that each of them leads to.
   Read all characters of the token. It is allowed if each of them has a transition, and if an
   accepting state can be reached from the last state: an output must never enter a dead end.
2. An empty token, as special tokens are here, is never allowed. It would not change the state.
3. `fill` writes the mask of the current state: bit `t % 32` of word `t // 32` for each allowed
   token `t`, all other bits clear. Note that a word is an int32, whose highest bit is the sign.
4. `advance` accepts a token if it is allowed, and returns whether it is. `accept` accepts several,
   and raises `ValueError` at the first that is not allowed. `rollback` undoes the last tokens.
5. `may_end` is true in an accepting state. `is_terminated` is true where no token is allowed.
6. `forced` returns up to `most` jump-forward tokens: it adds tokens as long as exactly one token is
   allowed and the output may not end instead. It leaves the state unchanged.

Test it with `pytest -x docs/19-structured-output/test_exercise.py`.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Automaton:
    """Finite automaton with start state 0. `arrows[state]` has all characters allowed there."""

    arrows: list[dict[str, int]]  # by state: character, next state
    accepting: frozenset[int]


class TokenAutomaton:
    """Automaton that reads tokens, with the state of one output."""

    def __init__(self, automaton: Automaton, vocabulary: list[str]) -> None:
        self.transitions: list[dict[int, int]]  # by state: token id, next state
        raise NotImplementedError

    def fill(self, mask: np.ndarray) -> None:
        raise NotImplementedError

    def advance(self, token_id: int) -> bool:
        raise NotImplementedError

    def accept(self, token_ids: list[int]) -> None:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def forced(self, most: int) -> list[int]:
        raise NotImplementedError

    @property
    def may_end(self) -> bool:
        raise NotImplementedError

    @property
    def is_terminated(self) -> bool:
        raise NotImplementedError
