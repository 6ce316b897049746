"""A solution of `exercise.py`."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol


class Rank(Protocol):
    def load(self, source: object) -> None: ...
    def use(self) -> None: ...
    def drop(self) -> None: ...


@dataclass
class Request:
    number: int  # of the weights in use when it was added
    num_tokens: int = 0
    samplers: list[tuple[int, int, str]] = field(default_factory=list)  # first token, number, label


class Weights:
    def __init__(self, ranks: list[Rank], label: str) -> None:
        self.ranks, self.number, self.label = ranks, 0, label
        self.requests: dict[str, Request] = {}
        self.unfinished: dict[str, None] = {}  # in the order in which they were added

    def add(self, name: str) -> None:
        self.requests[name] = Request(self.number)
        self.unfinished[name] = None

    def sampled(self, name: str) -> None:
        request = self.requests[name]
        if not request.samplers or request.samplers[-1][1] != self.number:
            request.samplers.append((request.num_tokens, self.number, self.label))
        request.num_tokens += 1

    def end(self, name: str) -> None:
        del self.unfinished[name]

    def update(self, source: object, label: str, mode: str | None = None) -> list[str]:
        if self.unfinished and mode not in ("abort", "keep"):
            raise ValueError(f"{len(self.unfinished)} requests are unfinished")
        loaded: list[Rank] = []
        try:
            for rank in self.ranks:
                rank.load(source)
                loaded.append(rank)
        except BaseException:
            for rank in loaded:
                rank.drop()
            raise
        aborted = list(self.unfinished) if mode == "abort" else []
        for name in aborted:
            self.end(name)
        for rank in self.ranks:
            rank.use()
        self.number += 1  # a label may be used again, a number is not
        self.label = label
        return aborted

    def root(self, name: str) -> Hashable:
        return self.requests[name].number

    def versions(self, name: str) -> list[tuple[int, str]]:
        return [(first, label) for first, _, label in self.requests[name].samplers]
