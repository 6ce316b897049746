"""Searches a growing text for several strings at once, at a constant cost per character.

This is the automaton of Aho and Corasick (1975, "Efficient string matching: an aid to bibliographic
search", CACM 18(6)). Its state after a text is the longest suffix of the text that is a prefix of
one of the strings. The state answers both questions of a stream: is a string complete, and how much
of the end of the text may still become one.
"""

from collections import deque


class StopStrings:
    """An automaton for a list of strings, built in time proportional to their total length.

    State 0 is "no string has begun". Reading n characters takes at most 2 n moves, regardless of
    the number and the length of the strings: each move to a shorter state undoes one forward move.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self._next: list[dict[str, int]] = [{}]  # by state: the next state for a character
        self._shorter = [0]  # by state: the longest proper suffix that is also a state
        self._num_begun = [0]  # by state: characters at its end that may become a whole string
        self._ending: list[int | None] = [None]  # by state: the longest string that ends here
        for index, string in enumerate(strings):
            self._add(index, string)
        self._link()

    def advance(self, state: int, text: str) -> tuple[int, tuple[int, int] | None]:
        """Read `text` from `state`; returns the new state and the string that begins first.

        The latter is (its end in `text`, its index in `strings`), or None if none is complete. It
        may have begun before `text`. If two begin at the same position, the first in the list
        counts.
        """
        next_of, ending = self._next, self._ending
        first: tuple[int, int, int] | None = None  # (where it begins, index, where it ends)
        for end, character in enumerate(text, start=1):
            while state and character not in next_of[state]:
                state = self._shorter[state]
            state = next_of[state].get(character, 0)
            index = ending[state]
            if index is not None:
                found = (end - len(self.strings[index]), index, end)
                first = found if first is None else min(first, found)
        return state, None if first is None else (first[2], first[1])

    def num_begun(self, state: int) -> int:
        """Return how many characters at the end of the text may begin one of the strings."""
        return self._num_begun[state]

    def _add(self, index: int, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._ending.append(None)
            state = self._next[state][character]
        if self._ending[state] is None:  # otherwise the list has it twice: keep the first
            self._ending[state] = index

    def _link(self) -> None:
        """Compute the suffix links and what states inherit by them from shorter states."""
        self._shorter, self._num_begun = [0] * len(self._next), [0] * len(self._next)
        waiting = deque([(0, 0)])  # states and the length of their text
        while waiting:
            state, depth = waiting.popleft()
            shorter = self._shorter[state]
            self._num_begun[state] = depth if self._next[state] else self._num_begun[shorter]
            if self._ending[state] is None:
                self._ending[state] = self._ending[shorter]
            for character, longer in self._next[state].items():
                waiting.append((longer, depth + 1))
                back = shorter
                while back and character not in self._next[back]:
                    back = self._shorter[back]
                if depth:
                    self._shorter[longer] = self._next[back].get(character, 0)
