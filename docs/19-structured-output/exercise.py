"""Exercise: from an automaton over characters to masks over tokens.

Given is a finite automaton that reads characters, and a vocabulary: token `i` is the text
`vocabulary[i]`. Write what the engine asks of a grammar
(`nanoserve/features/structured/grammar.py`).

1. `behind` says for each state which tokens may come, and which state each of them leads to. Walk
   all characters of the token. It may come if none of them fails, and if from where they lead to an
   accepting state can still be reached: an output must never enter a dead end.
2. An empty token, as special tokens are here, may never come. It would change nothing, for ever.
3. `fill` writes the mask of the current state: bit `t % 32` of word `t // 32` for each token `t`
   that may come, all other bits clear. Mind that a word is an int32, whose highest bit is a sign.
4. `advance` takes a token if it may come, and says whether it did. `accept` takes several, and
   raises `ValueError` at the first that may not come. `rollback` takes back the last tokens.
5. `may_end` is true in an accepting state. `is_terminated` is true where no token may come.
6. `forced` returns up to `most` tokens that must come one after the other: as long as exactly one
   token may come, and the output may not end instead. It leaves the state as it was.

Test it with `pytest -x docs/19-structured-output/test_exercise.py`.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Automaton:
    """It begins in state 0. What is not in `arrows[state]` cannot come in that state."""

    arrows: list[dict[str, int]]  # by state: the character, and where it leads to
    accepting: frozenset[int]


class TokenAutomaton:
    """An automaton that reads tokens, and one output that follows it."""

    def __init__(self, automaton: Automaton, vocabulary: list[str]) -> None:
        self.behind: list[dict[int, int]]  # by state: token ids, and the state that each leads to
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
