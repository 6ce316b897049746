"""Turns bad words into all token sequences that complete them, whatever precedes the words."""

from nanoserve.text.detokenizer import Tokenizer

# Characters that may precede a word in prose, code and Markdown; only the first is tried for words
# longer than _LONGEST_WORD.
_BEFORE_A_WORD = "\n\t([{<\"'`*_-/.:#“"
_LONGEST_WORD = 64  # characters
_MOST_KEPT = 2**14  # words in the cache


class BadWords:
    """A cache of the token sequences of words under one tokenizer; requests often repeat words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[tuple[int, ...]]] = {}

    def sequences(self, words: list[str]) -> list[list[int]]:
        """Return the token sequences that complete one of `words`; none of them ends with another.

        A tokenizer encodes a word differently at the beginning of a string, after a space and after
        a bracket; the first token may include the bracket.
        """
        found = {spelling: None for word in words for spelling in self._spellings(word)}
        return [
            list(spelling)
            for spelling in found
            if not any(spelling[i:] in found for i in range(1, len(spelling)))
        ]

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        if word not in self._known:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            self._known[word] = self._encode(word)
        return self._known[word]

    def _encode(self, word: str) -> list[tuple[int, ...]]:
        plain = (word, " " + word.lstrip())
        found = {tuple(self._tokenizer.encode(text, False)): None for text in plain}
        for before in _BEFORE_A_WORD if len(word) <= _LONGEST_WORD else _BEFORE_A_WORD[:1]:
            encoding = self._tokenizer.backend.encode(before + word, add_special_tokens=False)
            ends = [end for _, end in encoding.offsets]
            first = next((i for i, end in enumerate(ends) if end > len(before)), 0)
            found[tuple(encoding.ids[first:])] = None
        found.pop((), None)
        return list(found)
