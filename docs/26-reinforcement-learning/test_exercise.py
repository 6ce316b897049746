"""The exercise of chapter 26, against a pool that remembers which weights have computed it."""

import random

import pytest

from .exercise import Weights


class Rank:
    """A rank that notes its calls in `calls`, which all ranks share, and fails on request."""

    def __init__(self, number: int, calls: list[str]) -> None:
        self.number, self.calls = number, calls
        self.used: object = "first"
        self.loaded: object = None
        self.error: BaseException | None = None

    def load(self, source: object) -> None:
        self.calls.append(f"load {self.number}")
        if self.error is not None:
            raise self.error
        self.loaded = source

    def use(self) -> None:
        self.calls.append(f"use {self.number}")
        assert self.loaded is not None, f"rank {self.number} has nothing to use: {self.calls}"
        self.used, self.loaded = self.loaded, None

    def drop(self) -> None:
        self.calls.append(f"drop {self.number}")
        assert self.loaded is not None, f"rank {self.number} has nothing to drop: {self.calls}"
        self.loaded = None


def make(num_ranks: int = 2) -> tuple[Weights, list[Rank], list[str]]:
    calls: list[str] = []
    ranks = [Rank(number, calls) for number in range(num_ranks)]
    return Weights(ranks, "first"), ranks, calls


def test_all_ranks_load_before_one_uses() -> None:
    weights, ranks, calls = make(3)
    assert weights.update("trained", "step 1") == []
    assert calls[:3] == ["load 0", "load 1", "load 2"], f"{calls}"
    assert sorted(calls[3:]) == ["use 0", "use 1", "use 2"], f"{calls}"
    assert [rank.used for rank in ranks] == ["trained"] * 3


@pytest.mark.parametrize("error", [ValueError("a tensor is missing"), KeyboardInterrupt()])
def test_an_update_that_fails_changes_nothing(error: BaseException) -> None:
    weights, ranks, calls = make(3)
    weights.add("before")
    ranks[1].error = error
    with pytest.raises(type(error)):
        weights.update("broken", "step 1", mode="abort")
    assert calls == ["load 0", "load 1", "drop 0"], f"rank 1 raised: {calls}"
    weights.add("after")
    assert weights.root("before") == weights.root("after"), "the weights are the same as before"
    for name in ("before", "after"):
        weights.sampled(name)
        assert weights.versions(name) == [(0, "first")], f"{name!r} goes on with the old weights"
    ranks[1].error = None
    assert weights.update("trained", "step 1", mode="abort") == ["before", "after"], (
        "an update that fails ends no request"
    )


def test_unfinished_requests_need_a_mode() -> None:
    weights, _, calls = make()
    for name in "ab":
        weights.add(name)
    weights.end("a")
    with pytest.raises(ValueError):
        weights.update("trained", "step 1")
    assert calls == [], f"b is unfinished, so no rank should be called: {calls}"
    assert weights.update("trained", "step 1", mode="keep") == []
    assert weights.update("trained", "step 2", mode="abort") == ["b"]
    assert weights.update("trained", "step 3") == [], "all requests have ended"


def test_equal_labels_are_not_equal_weights() -> None:
    weights, _, _ = make()
    weights.add("a")
    weights.update("trained", "best", mode="keep")
    weights.add("b")
    weights.update("trained", "best", mode="keep")
    weights.add("c")
    roots = [weights.root(name) for name in "abc"]
    assert len(set(roots)) == 3, f"three sets of weights, and roots {roots}"


def test_versions_are_those_that_have_sampled_tokens() -> None:
    weights, _, _ = make()
    weights.add("a")
    weights.update("w1", "step 1", mode="keep")  # no token yet
    for label in ("step 2", "step 3", "step 4"):
        for _ in range(2 if label != "step 3" else 0):
            weights.sampled("a")
        weights.update(label, label, mode="keep")
    assert weights.versions("a") == [(0, "step 1"), (2, "step 3")], (
        "two tokens with step 1's weights, none with step 2's, two with step 3's"
    )
    weights.sampled("a")
    assert weights.versions("a")[-1] == (4, "step 4")
    weights.end("a")
    assert len(weights.versions("a")) == 3, "also after its end"


class Pool:
    """An engine's cache: for each block, by its key, the weights that have computed its tokens."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.blocks: dict[tuple[object, tuple[int, ...]], list[int]] = {}
        self.computed: dict[str, list[int]] = {}  # by request, the weights of each token's K and V

    def start(self, name: str, root: object, tokens: list[int]) -> list[int]:
        """Begin a request with the longest cached prefix; return the weights that made it."""
        self.computed[name] = []
        for end in range(self.size, len(tokens), self.size):
            block = self.blocks.get((root, tuple(tokens[:end])))
            if block is None:
                break
            self.computed[name] += block
        return list(self.computed[name])

    def compute(self, name: str, root: object, tokens: list[int], current: int) -> None:
        """Compute all tokens but the last with the current weights, and cache full blocks."""
        made = self.computed[name]
        made += [current] * (len(tokens) - 1 - len(made))
        for end in range(self.size, len(made) + 1, self.size):
            self.blocks.setdefault((root, tuple(tokens[:end])), made[end - self.size : end])


@pytest.mark.parametrize("seed", range(40))
def test_no_request_finds_blocks_of_other_weights(seed: int) -> None:
    rng = random.Random(seed)
    weights, ranks, _ = make(rng.randint(1, 3))
    pool, current = Pool(block_size=2), 0
    label_of = {0: "first"}
    tokens: dict[str, list[int]] = {}  # of the unfinished requests
    added: dict[str, int] = {}
    samplers: dict[str, list[int]] = {}
    script: list[str] = []
    for number in range(60):
        action = rng.choice(["add", "add", "step", "step", "step", "end", "update"])
        if action == "add":
            name = f"r{number}"
            tokens[name] = rng.choice([[1, 2, 3, 4, 5], [1, 2, 3, 4, 9], [1, 2, 6]])
            tokens[name] = list(tokens[name])
            weights.add(name)
            added[name], samplers[name] = current, []
            script.append(f"add({name!r})")
            found = pool.start(name, weights.root(name), tokens[name])
            assert set(found) <= {current}, (
                f"{name} reads K and V of weights {sorted(set(found))}, current are {current}, "
                f"after {script}"
            )
            pool.compute(name, weights.root(name), tokens[name], current)
        elif action == "step":
            for name, own in tokens.items():
                own.append(7)
                weights.sampled(name)
                samplers[name].append(current)
                pool.compute(name, weights.root(name), own, current)
            script.append("a token of each request")
        elif action == "end" and tokens:
            name = rng.choice(sorted(tokens))
            del tokens[name]
            weights.end(name)
            script.append(f"end({name!r})")
        elif action == "update":
            failing = rng.choice([None, None, *ranks])
            mode, label = rng.choice(["abort", "keep"]), rng.choice(["best", "last"])
            script.append(f"update(mode={mode!r}, label={label!r}){' fails' if failing else ''}")
            for rank in ranks:
                rank.error = ValueError("broken") if rank is failing else None
            before = [rank.used for rank in ranks]
            if failing:
                with pytest.raises(ValueError):
                    weights.update(number, label, mode)
                assert [rank.used for rank in ranks] == before, f"{script}"
            else:
                expected = list(tokens) if mode == "abort" else []
                assert weights.update(number, label, mode) == expected, f"{script}"
                assert [rank.used for rank in ranks] == [number] * len(ranks), f"{script}"
                current += 1
                label_of[current] = label
                tokens = {} if mode == "abort" else tokens
            assert all(rank.loaded is None for rank in ranks), f"{script}"
    for a in added:
        made = samplers[a]
        starts = [i for i, each in enumerate(made) if not i or each != made[i - 1]]
        expected_versions = [(i, label_of[made[i]]) for i in starts]
        assert weights.versions(a) == expected_versions, f"of {a} after {script}"
        for b in added:
            same = added[a] == added[b]
            equal = weights.root(a) == weights.root(b)
            assert equal == same, f"{a} and {b}, added under {added[a]}, {added[b]}: {script}"
