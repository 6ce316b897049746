"""A grammar backend of one's own, whose grammars allow the letters of a text, one by one."""

from types import SimpleNamespace

import numpy as np

from nanoserve.features.structured.grammar import Source


class Spelling:
    check_seconds = 1

    def __init__(self, tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer

    @staticmethod
    def check(source: Source) -> None:
        if " " in source.text:
            raise ValueError("a space cannot be spelled")

    def compile(self, source: Source) -> SimpleNamespace:
        letters = [self._tokenizer.token_to_id(letter) for letter in source.text]
        return SimpleNamespace(num_bytes=0, start=lambda: Spelled(letters))


class Spelled:
    def __init__(self, letters: list[int]) -> None:
        self._letters, self._num = letters, 0

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        for token_id in self.forced(1):
            mask.view(np.uint32)[token_id // 32] = 1 << token_id % 32

    def advance(self, token_id: int) -> bool:
        is_next = self.forced(1) == [token_id]
        self._num += is_next
        return is_next

    def accept(self, token_ids: list[int]) -> None:
        self._num += len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        self._num -= num_tokens

    def forced(self, most: int) -> list[int]:
        return self._letters[self._num : self._num + most]

    @property
    def is_terminated(self) -> bool:
        return self._num == len(self._letters)

    may_end = is_terminated
