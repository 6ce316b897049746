"""Finding any of several strings in a text that grows, at the same small cost for each character.

The automaton of Aho and Corasick (1975, "Efficient string matching: an aid to bibliographic
search", CACM 18(6)). Its state after some text is the longest end of that text with which one of
the strings begins. That answers both questions of a stream: is a string complete, and how much of
the end may yet become one.
"""

from collections import deque


class StopStrings:
    """Built once for a list of strings, in a time that grows with all their characters together.

    State 0 is "no string has begun". Reading n characters takes at most 2 n moves, however long and
    however many the strings are: each move back was paid for by one forward.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self._next: list[dict[str, int]] = [{}]  # by state: where a character leads
        self._shorter = [0]  # by state: the longest proper end of its text that is a state, too
        self._num_begun = [0]  # by state: characters at its end that may become a whole string
        self._ending: list[int | None] = [None]  # by state: the longest string that ends here
        for index, string in enumerate(strings):
            self._add(index, string)
        self._link()

    def advance(self, state: int, text: str) -> tuple[int, tuple[int, int] | None]:
        """Read `text` from `state`: the state after it, and the string that begins first in it.

        That is (its end in `text`, its index in `strings`), None if none is complete. It may have
        begun before `text`. Of two that begin at the same place, the first in the list counts.
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
        """Characters at the end of the text that may be the beginning of one of the strings."""
        return self._num_begun[state]

    def _add(self, index: int, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._ending.append(None)
            state = self._next[state][character]
        if self._ending[state] is None:  # else the list has it twice
            self._ending[state] = index

    def _link(self) -> None:
        """Fill in what a state has from shorter ones, which come before it."""
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
