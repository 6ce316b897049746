"""Grammars, their compiler and draft tokens without a library: for the counting executor.

A grammar is given as a regular expression, but it is a number and a pattern such as "3:ab(01)c":
one character, or one of several, after the other. `FakeCompiler.tick` has to be called 3 times
before it is compiled. An empty pattern cannot be compiled.
"""

import re
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.proposer import TextProposer
from nanoserve.features.structured.grammar import Source
from nanoserve.features.structured.params import StructuredOutputsParams


def guided_by(pattern: str, delay: int = 0) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=f"{delay}:{pattern}")


class FakeGrammar:
    """Follows one output. It has ended behind the last character of its pattern."""

    def __init__(self, pattern: str) -> None:
        parts = re.findall(r"\((.+?)\)|(.)", pattern)
        self._allowed = [{*(several or one).encode()} for several, one in parts]
        self._num_taken = 0

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        for token_id in self._next():
            mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)

    def advance(self, token_id: int) -> bool:
        if token_id not in self._next():
            return False
        self._num_taken += 1
        return True

    def accept(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if not self.advance(token_id):
                raise ValueError(f"{token_id} after {self._num_taken} tokens")

    def rollback(self, num_tokens: int) -> None:
        self._num_taken -= num_tokens

    def forced(self, most: int) -> list[int]:
        token_ids: list[int] = []
        for allowed in self._allowed[self._num_taken :][:most]:
            if len(allowed) > 1:
                break
            token_ids += allowed
        return token_ids

    @property
    def may_end(self) -> bool:
        return self.is_terminated

    @property
    def is_terminated(self) -> bool:
        return self._num_taken == len(self._allowed)

    def _next(self) -> set[int]:
        return set() if self.is_terminated else self._allowed[self._num_taken]


@dataclass(frozen=True)
class FakeCompiled:
    pattern: str
    num_bytes: int = 1

    def start(self) -> FakeGrammar:
        return FakeGrammar(self.pattern)


class FakeCompiler:
    """Compiles when `tick` says so. It keeps what it has compiled."""

    def __init__(self, *settings: Any) -> None:
        self._futures: dict[Source, Future[FakeCompiled]] = {}
        self._num_ticks = 0
        self.is_closed = False

    def compile(self, source: Source) -> "Future[FakeCompiled]":
        future = self._futures.setdefault(source, Future())
        self._end_those_due()
        return future

    def tick(self) -> None:
        self._num_ticks += 1
        self._end_those_due()

    def close(self) -> None:
        self.is_closed = True

    def _end_those_due(self) -> None:
        for source, future in self._futures.items():
            delay, _, pattern = source.text.partition(":")
            if not future.done() and self._num_ticks >= int(delay):
                if pattern:
                    future.set_result(FakeCompiled(pattern))
                else:
                    future.set_exception(ValueError("the pattern is empty"))


class HalfRight(TextProposer):
    """A proposer of what the counting executor will sample, with a wrong token somewhere."""

    def draft(self, seq: Sequence, most: int) -> list[int]:
        drafts = [(seq.token_ids[-1] + 1 + index) % 256 for index in range(most)]
        wrong = len(seq.token_ids) % 4
        if wrong < most:
            drafts[wrong] = 0
        return drafts
