"""Exercise: other weights on all ranks or on none, and no cached block of other weights.

A trainer gives an engine new weights, again and again. The engine has several ranks, requests that
may be in the middle of an answer, and a prefix cache. Complete `Weights`, which keeps them
consistent. It moves no tensors: each rank has three methods, which never wait.

- `load(source)` puts other weights beside those in use. It may raise any error; then that rank has
  loaded nothing.
- `use()` computes with the loaded weights from now on. It never fails.
- `drop()` forgets the loaded weights.

The rules:

1. `update` replaces the weights: all ranks load, in order, before one uses them. If one raises,
   those that have loaded drop, and the error goes to the caller. Then everything is as before.
2. Unfinished requests: with `mode=None` they are a `ValueError`, before any rank is called. With
   "abort" all of them end, and `update` returns their names in the order in which they were added;
   with "keep" they continue, and it returns an empty list. An update that fails ends none.
3. `root(name)` is what the keys of a request's cached blocks begin with; its form is up to you. Two
   requests have equal roots if and only if they were added under the same weights. After an update
   they are other weights, even if `source` or `label` are those of an earlier one. A request keeps
   its root to its end, whatever happens to the weights: its older K and V are not computed again.
4. `versions(name)` says which weights have sampled a request's tokens: for each of them, in order,
   the index of the first token and the label. Weights that have sampled none of its tokens are not
   in the list. It may also be called after the request's end, as may `root`.

Test it with `pytest -x docs/26-reinforcement-learning/test_exercise.py`.
"""

from collections.abc import Hashable
from typing import Protocol


class Rank(Protocol):
    def load(self, source: object) -> None: ...
    def use(self) -> None: ...
    def drop(self) -> None: ...


class Weights:
    def __init__(self, ranks: list[Rank], label: str) -> None:
        """`label`: that of the first weights, which the ranks have and use already."""
        raise NotImplementedError

    def add(self, name: str) -> None:
        """Add a request; names are not used twice."""
        raise NotImplementedError

    def sampled(self, name: str) -> None:
        """Note that one more token of this request has been sampled."""
        raise NotImplementedError

    def end(self, name: str) -> None:
        """Note that this request has ended."""
        raise NotImplementedError

    def update(self, source: object, label: str, mode: str | None = None) -> list[str]:
        raise NotImplementedError

    def root(self, name: str) -> Hashable:
        raise NotImplementedError

    def versions(self, name: str) -> list[tuple[int, str]]:
        raise NotImplementedError
