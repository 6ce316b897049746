"""A solution of `exercise.py`: an automaton over tokens, and the path of an output through it."""

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
        alive = _alive(automaton)
        self._accepting, self._path = automaton.accepting, [0]
        self.transitions: list[dict[int, int]] = []  # by state: token id, next state
        for state in range(len(automaton.arrows)):
            ends = {i: _read(automaton, state, text) for i, text in enumerate(vocabulary) if text}
            self.transitions.append({i: end for i, end in ends.items() if end in alive})

    @property
    def _next(self) -> dict[int, int]:
        return self.transitions[self._path[-1]]

    def fill(self, mask: np.ndarray) -> None:
        words = mask.view(np.uint32)  # the same memory, unsigned
        words[:] = 0
        for token_id in self._next:
            words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def advance(self, token_id: int) -> bool:
        if token_id not in self._next:
            return False
        self._path.append(self._next[token_id])
        return True

    def accept(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if not self.advance(token_id):
                raise ValueError(f"token {token_id} is not allowed in state {self._path[-1]}")

    def rollback(self, num_tokens: int) -> None:
        del self._path[len(self._path) - num_tokens :]

    def forced(self, most: int) -> list[int]:
        run: list[int] = []
        while len(run) < most and len(self._next) == 1 and not self.may_end:
            run += self._next
            self.advance(run[-1])
        self.rollback(len(run))
        return run

    @property
    def may_end(self) -> bool:
        return self._path[-1] in self._accepting

    @property
    def is_terminated(self) -> bool:
        return not self._next


def _read(automaton: Automaton, state: int | None, text: str) -> int | None:
    for character in text:
        if state is None:
            return None
        state = automaton.arrows[state].get(character)
    return state


def _alive(automaton: Automaton) -> set[int]:
    """States from which an accepting one can be reached, searched backwards."""
    alive, before = set(automaton.accepting), set()
    while alive != before:
        before = set(alive)
        for state, arrows in enumerate(automaton.arrows):
            if alive & set(arrows.values()):
                alive.add(state)
    return alive
