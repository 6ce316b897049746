"""Stage 12: evicted blocks in a host pool, against a memory of all that was ever computed."""

import random
from inspect import signature
from typing import Any

import pytest
import torch

from .compare import CHECKPOINT, CONFIG, by_engine, by_yours, workload
from .stages import stage, where_raised
from .your_engine import Config, Pool, Sequence, chain_hash
from .your_features import HOST, HostPool, OffloadEngine, OffloadManager


@stage(12)
def test_the_host_pool_drops_what_was_put_longest_ago() -> None:
    host = HostPool(2)
    for name in (b"a", b"b", b"a", b"c"):
        host.put(name, name.decode())
    found = [name for name in (b"a", b"b", b"c") if name in host]
    assert found == [b"a", b"c"], f"HostPool(2) after put of a, b, a, c has {found}"
    host.get(b"a")
    host.put(b"d", "d")
    found = [name for name in (b"a", b"b", b"c", b"d") if name in host]
    assert found == [b"c", b"d"], f"then get of a, which changes nothing, and put of d: {found}"
    assert host.get(b"d") == "d", f"get of d gave {host.get(b'd')!r}"


@stage(12)
def test_a_host_pool_of_no_blocks_keeps_nothing() -> None:
    host = HostPool(0)
    host.put(b"a", "a")
    assert b"a" not in host, "HostPool(0) after put of a"


class Memory:
    """What the blocks of a pool contain: for each, all tokens up to the block's end."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        self.contents: dict[int, Any] = {}
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.host = HostPool(host_blocks)
        self.manager = OffloadManager(num_blocks, block_size, self.host, self.read, self.write)

    def read(self, block: int) -> Any:
        self.reads.append(block)
        return self.contents.get(block)

    def write(self, block: int, content: Any) -> None:
        self.writes.append(block)
        self.contents[block] = content

    def start(self, seq: Sequence, case: str) -> list[int] | None:
        """Admit and compute a sequence; return its hits. Checks what these blocks contain."""
        size = self.manager.block_size
        hits = self.manager.lookup(seq)
        if not self.manager.allocate(seq, len(seq.token_ids), hits):
            return None
        prefixes = [tuple(seq.token_ids[: (i + 1) * size]) for i in range(len(seq.block_table))]
        for i, hit in enumerate(hits):
            found = self.contents.get(seq.block_table[i])
            where = f"block {i} of {seq.token_ids}, hits {hits}, table {seq.block_table}"
            assert found == prefixes[i], f"{where} has the content {found}; {case}"
            assert hit in (HOST, seq.block_table[i]), f"{where}; {case}"
        for block, prefix in list(zip(seq.block_table, prefixes, strict=True))[len(hits) :]:
            self.contents[block] = prefix
        self.manager.cache(seq, len(seq.token_ids))
        return hits

    def run(self, *prompts: list[int]) -> list[list[int] | None]:
        """Admit, compute and free one prompt after the other; return the hits of each."""
        found = []
        for prompt in prompts:
            seq = Sequence(list(prompt))
            found.append(self.start(seq, f"prompts {prompts}, one after the other"))
            self.manager.free(seq)
        return found


A, B = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]


@stage(12)
def test_an_evicted_block_comes_back() -> None:
    memory = Memory(num_blocks=3, block_size=2, host_blocks=10)
    found = memory.run(A, B, A)
    case = f"{A}, {B}, {A} one after the other in three blocks of 2, ten in the host pool"
    assert found == [[], [], [HOST, HOST]], f"hits {found}: {case}"
    assert len(memory.writes) == 2, f"written blocks {memory.writes}: {case}"


@stage(12)
def test_hits_in_the_pool_come_first() -> None:
    memory = Memory(num_blocks=5, block_size=2, host_blocks=10)
    memory.run([*A, 11, 12, 13], [20, 21, 22, 23])
    found = memory.run([*A, 11, 12, 13, 14])
    case = "[1, ..., 5, 11, 12, 13] again, after [20, ..., 23] took its fourth block of 2"
    assert found == [[1, 2, 3, HOST]], f"hits {found}: {case}"


@stage(12)
def test_a_block_that_came_back_is_cached() -> None:
    memory = Memory(num_blocks=6, block_size=2, host_blocks=10)
    memory.run(A, list(range(50, 62)))
    first, second = Sequence([*A]), Sequence([*A])
    memory.start(first, "")
    found = memory.manager.lookup(second)
    case = f"lookup of {A} while another {A} runs, whose blocks came from the host pool"
    assert found == first.block_table[:2], f"{found}: {case}, table {first.block_table}"
    assert first.num_cached == 2, f"num_cached of the first is {first.num_cached}: {case}"


@stage(12)
def test_the_last_token_is_never_a_hit() -> None:
    memory = Memory(num_blocks=3, block_size=2, host_blocks=10)
    memory.run([1, 2, 3, 4], B)
    found = memory.manager.lookup(Sequence([1, 2, 3, 4]))
    assert found == [HOST], f"lookup of [1, 2, 3, 4], computed and evicted: {found}"


@stage(12)
def test_the_first_gap_ends_the_hits() -> None:
    memory = Memory(num_blocks=3, block_size=2, host_blocks=10)
    first = chain_hash(b"", [1, 2])
    third = chain_hash(chain_hash(first, [3, 4]), [5, 6])
    for each in (first, third):
        memory.host.put(each, "content")
    found = memory.manager.lookup(Sequence([1, 2, 3, 4, 5, 6, 7]))
    case = "lookup of [1, ..., 7], blocks of 2; the host pool has the first and the third"
    assert found == [HOST], f"{found}: {case}"


@stage(12)
def test_a_content_is_read_once() -> None:
    memory = Memory(num_blocks=3, block_size=2, host_blocks=10)
    memory.run(A, B, A, B, A)
    case = f"{A} and {B} in turns, five times, in three blocks of 2: four full blocks in all"
    assert len(memory.reads) == 4, f"blocks read: {memory.reads}; {case}"


@stage(12)
def test_a_block_with_a_copy_is_not_offloaded() -> None:
    memory = Memory(num_blocks=5, block_size=2, host_blocks=10)
    a, b = Sequence([1, 2, 3, 4]), Sequence([1, 2, 3, 4])
    memory.start(a, "")
    memory.start(b, "")
    memory.manager.free(a)  # its second block is a copy
    memory.start(Sequence([20]), "")
    case = "[1, 2, 3, 4] twice, blocks of 2; the first is freed, and [20] takes its second block"
    assert memory.reads == [], f"blocks read: {memory.reads}; {case}"


@stage(12)
def test_what_came_back_is_evicted_as_if_new() -> None:
    """Otherwise a prefix that is often used is dropped as if it were old."""
    memory = Memory(num_blocks=2, block_size=2, host_blocks=3)
    a, b, c, d, e = ([i, i, i] for i in range(1, 6))
    memory.run(a, b, c)
    found = memory.run(a, d, e, a)
    case = "[1, 1, 1] to [5, 5, 5] in the order 1, 2, 3, 1, 4, 5, 1; two blocks, three in the host"
    assert found == [[HOST], [], [], [HOST]], f"hits from the fourth on: {found}; {case}"


@stage(12)
def test_a_hit_may_be_displaced_by_what_it_evicts() -> None:
    memory = Memory(num_blocks=3, block_size=2, host_blocks=2)
    case = f"{A}, {B}, {A} in three blocks of 2, two in the host pool: B's push out A's"
    try:
        found = memory.run(A, B, A)
    except KeyError as error:
        message = f"a hit is no longer in the host pool: {case}; {where_raised(error)}"
        raise AssertionError(message) from error
    assert found[2] == [HOST, HOST], f"hits {found}: {case}"


@stage(12)
def test_what_does_not_fit_changes_nothing() -> None:
    memory = Memory(num_blocks=4, block_size=2, host_blocks=3)
    memory.run(A, [20, 21, 22, 23, 24, 25, 26, 27])
    memory.start(Sequence([30, 31, 32, 33]), "")
    seq = Sequence([*A, 6])
    hits = memory.manager.lookup(seq)
    before = list(memory.reads), list(memory.writes)
    fits = memory.manager.allocate(seq, 6, hits)
    case = f"allocate {seq.token_ids} with hits {hits}: three blocks out of two"
    assert not fits, f"{case} gave {fits}"
    after = memory.reads, memory.writes
    assert after == before, f"reads and writes were {before} and are {after}: {case}"
    assert (seq.block_table, seq.num_cached) == ([], 0), f"{case}: table {seq.block_table}"
    # Nor has its prefix become the last to be dropped.
    memory.host.put(b"x", "x")
    memory.host.put(b"y", "y")
    kept = chain_hash(b"", [1, 2]) in memory.host
    assert not kept, f"{case}; then two others were put into a host pool of 3"


@pytest.mark.parametrize("seed", range(40))
@stage(12)
def test_nothing_is_computed_twice_if_the_host_pool_is_large(seed: int) -> None:
    """Random prompts in a small pool: each hits all that was ever computed of its beginning.

    With a small host pool the hits are fewer, but what they contain is right.
    """
    rng = random.Random(seed)
    block_size, num_blocks = rng.randint(1, 3), rng.randint(6, 12)
    host_blocks = 10_000 if seed % 2 == 0 else rng.randint(0, 6)
    memory = Memory(num_blocks, block_size, host_blocks)
    computed: set[tuple[int, ...]] = set()
    running: list[Sequence] = []
    prompts: list[list[int]] = []
    for _ in range(60):
        if running and rng.random() < 0.4:
            memory.manager.free(running.pop(rng.randrange(len(running))))
        prompts.append([rng.randrange(2) for _ in range(rng.randint(1, 12))])
        case = f"prompts {prompts}, {num_blocks} blocks of {block_size}, seed {seed}"
        seq = Sequence(list(prompts[-1]))
        hits = memory.start(seq, case)
        if hits is None:
            continue
        running.append(seq)
        ends = range(block_size, len(seq.token_ids) + 1, block_size)
        right = sum(
            tuple(seq.token_ids[:end]) in computed for end in ends if end < len(prompts[-1])
        )
        if host_blocks == 10_000:
            assert len(hits) == right, f"hits {hits}, right are {right} of them; {case}"
        computed |= {tuple(seq.token_ids[:end]) for end in ends}


@stage(12)
def test_the_engine_reads_a_copy_and_writes_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[type, dict[str, Any]] = {}

    def note(kind: type) -> None:
        """Note with which arguments an object of this class is created."""
        create: Any = kind.__init__

        def noted(*args: Any, **options: Any) -> None:
            made[kind] = signature(create).bind(*args, **options).arguments
            create(*args, **options)

        monkeypatch.setattr(kind, "__init__", noted)

    note(Pool)
    note(OffloadManager)
    OffloadEngine(CHECKPOINT, Config(num_blocks=8, block_size=4), host_blocks=8)
    created = sorted(kind.__name__ for kind in made)
    assert created == ["OffloadManager", "Pool"], f"OffloadEngine has created {created}"
    pool, config = made[Pool]["self"], made[Pool]["model"].config
    layers = range(config["num_hidden_layers"])

    def fill(block: int, kv: torch.Tensor) -> None:
        for layer in layers:
            pool.store(layer, pool.slots([block], torch.arange(4)), *kv[layer])

    old = torch.rand(len(layers), 2, 4, config["num_key_value_heads"], config["head_dim"])
    new = old + 1
    fill(3, old)
    content = made[OffloadManager]["read"](3)
    fill(3, new)
    made[OffloadManager]["write"](5, content)
    found = torch.stack([torch.stack(pool.gather(layer, [5], 4)) for layer in layers])
    case = "read(3), then other K and V in block 3, then write(5, ...) of what read returned"
    assert not found.equal(new), f"read returned a view of the pool, clone it: {case}"
    wrong = [(i, "KV"[j]) for i in layers for j in (0, 1) if not found[i, j].equal(old[i, j])]
    assert not wrong, f"block 5 has other content than block 3 had, in {wrong}: {case}"


@pytest.mark.parametrize("host_blocks", [0, 20, 500])
@stage(12)
def test_offload_changes_no_token(host_blocks: int) -> None:
    from . import your_engine

    requests = workload(40, seed=3)
    found = by_engine(OffloadEngine(CHECKPOINT, Config(**CONFIG), host_blocks), requests)
    right = by_yours(your_engine, requests)
    case = f"workload(40, seed=3), {host_blocks} blocks in the host pool"
    for i, request in enumerate(requests):
        assert found.tokens[i] == right.tokens[i], f"the tokens of {request}: {case}"
    computed = [
        sum(n for step in run.steps for _, n in step.rows.values()) for run in (found, right)
    ]
    if host_blocks == 0:
        assert computed[0] == computed[1], f"computed tokens, with and without: {computed}; {case}"
    if host_blocks == 500:
        assert computed[0] < computed[1], f"computed tokens, with and without: {computed}; {case}"


@stage(12)
def test_conversations_that_take_turns_keep_their_prefixes() -> None:
    """Three prompts of 40 tokens in a pool for 100, each asked three times."""
    config = Config(num_blocks=25, block_size=4, max_num_seqs=1, budget=64)
    engine = OffloadEngine(CHECKPOINT, config, host_blocks=100)
    prompts = [[*range(first, first + 40)] for first in (300, 400, 500)]
    starts, outputs = [], []
    for _ in range(3):
        for prompt in prompts:
            seq = engine.add([*prompt, 67], max_tokens=2)
            plans = []
            schedule = engine.scheduler.schedule
            engine.scheduler.schedule = lambda s=schedule, p=plans: p.append(s()) or p[-1]
            while not seq.finish_reason:
                engine.step()
            engine.scheduler.schedule = schedule
            starts.append(plans[0].rows[0].start)
            outputs.append((prompt[0], seq.token_ids[41:]))
    case = "prompts of 41 tokens in turns, three times; a pool of 25 blocks of 4, 100 in the host"
    assert starts == [0] * 3 + [40] * 6, f"tokens of each that were hits: {starts}; {case}"
    for first, tokens in outputs:
        assert tokens == dict(outputs[:3])[first], f"tokens after [{first}, ...]: {outputs}; {case}"
