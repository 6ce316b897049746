"""Chapter 5's numbers: the engine's own `BlockManager`, on cases small enough to follow by hand.

Only the equality of token ids matters here, not their values. A sequence that "runs" goes through
the three calls that the scheduler makes: lookup, allocate, cache.
"""

import math

from tables import table

from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

_MAX_MODEL_LEN = 4096
_OTHER = 100_000  # ids from here on are tokens of one sequence only


def chat_tokens(
    num_chats: int, system_len: int, own_len: int, block_size: int, cached: bool
) -> int:
    """Return the tokens computed for chats with one system prompt, with or without the cache."""
    return _chats(num_chats, system_len, own_len, block_size, cached)[0]


def chat_blocks(
    num_chats: int, system_len: int, own_len: int, block_size: int, cached: bool
) -> int:
    """Return the blocks that these chats hold while all of them run."""
    return _chats(num_chats, system_len, own_len, block_size, cached)[1]


def reference_counts(prefix_len: int, own_len: int, block_size: int) -> str:
    """Table: the uses of each block while A and B share a prefix, and as they end in turn."""
    manager = _manager(num_blocks=64, block_size=block_size)
    prefix = list(range(prefix_len))
    a = _run(manager, [*prefix, *range(_OTHER, _OTHER + own_len)])
    b = _run(manager, [*prefix, *range(2 * _OTHER, 2 * _OTHER + own_len)])
    blocks = sorted({*a.block_table, *b.block_table})
    holds = {block: "the prefix" for block in a.block_table if block in b.block_table}
    holds |= {block: "the rest of A" for block in a.block_table if block not in b.block_table}
    holds |= {block: "the rest of B" for block in b.block_table if block not in a.block_table}
    columns = [[manager._ref_counts[block] for block in blocks]]
    for seq in (a, b):
        manager.free(seq)
        columns.append([manager._ref_counts[block] for block in blocks])
    rows = [(block, holds[block], *counts) for block, *counts in zip(blocks, *columns, strict=True)]
    return table(("block", "holds", "A and B run", "A has ended", "B has ended"), rows)


def life_of_a_block(block_size: int) -> str:
    """Table: one block from its first owner to its eviction."""
    manager = _manager(num_blocks=2, block_size=block_size)
    prompt = range(block_size)
    a = _run(manager, prompt)
    (block,) = a.block_table
    rows = [_state("A takes it and fills it", manager, block)]
    manager.free(a)
    rows.append(_state("A ends", manager, block))
    b = _run(manager, [*prompt, 1])
    rows.append(_state("B begins with the same tokens", manager, block))
    manager.free(b)
    rows.append(_state("B ends", manager, block))
    _run(manager, range(_OTHER, _OTHER + 2 * block_size - 1))
    rows.append(_state("C needs the whole pool", manager, block))
    return table(("what happens", "reference count", "in the free queue", "found by lookup"), rows)


def blocks_left(prompt_blocks: int, taken: int, tail_first: bool) -> int:
    """Return the blocks of an ended prompt that are found after another one took `taken` blocks.

    `tail_first` is the order of `BlockManager.free`; otherwise the queue is reversed.
    """
    manager = _manager(num_blocks=prompt_blocks, block_size=2)
    prompt = range(2 * prompt_blocks)
    manager.free(_run(manager, prompt))
    if not tail_first:
        for block in reversed(list(manager._free)):
            manager._free.move_to_end(block)
    _run(manager, range(_OTHER, _OTHER + 2 * taken))
    return len(manager.lookup(_sequence([*prompt, 1])))


def free_queue(prompt_blocks: int) -> str:
    """Return the free queue, in order of reuse, when a prompt in blocks 1, 2, ... has ended."""
    manager = _manager(num_blocks=prompt_blocks, block_size=2)
    manager.free(_run(manager, range(2 * prompt_blocks)))
    return ", ".join(map(str, manager._free))


def reused_tokens(prompt_len: int, cached_len: int, block_size: int) -> int:
    """Return the tokens that a prompt reuses if `cached_len` of its tokens were computed before."""
    manager = _manager(num_blocks=256, block_size=block_size)
    manager.free(_run(manager, range(cached_len)))
    return len(manager.lookup(_sequence(range(prompt_len)))) * block_size


def shortage(num_blocks: int, cached_blocks: int, prompt_len: int, block_size: int) -> str:
    """Table: a prompt whose cached prefix is in the free queue needs more blocks than are free."""
    manager = _manager(num_blocks, block_size)
    manager.free(_run(manager, range(cached_blocks * block_size)))
    seq = _sequence(range(prompt_len))
    hits = manager.lookup(seq)
    new = manager.blocks_needed(prompt_len) - len(hits)
    free = manager.num_free_blocks
    rows = [
        ("blocks in the free queue", free),
        ("of these, hits that sharing removes", len(hits)),
        ("new blocks needed", new),
        ("new blocks alone would fit", "yes" if new <= free else "no"),
        ("`allocate` returns", manager.allocate(seq, prompt_len, hits)),
        ("blocks in the free queue after it", manager.num_free_blocks),
    ]
    return table(("", ""), rows)


def blocks_of_a_sequence(num_tokens: int, window: int | None, block_size: int) -> int:
    """Return the most KV blocks that a sequence holds while it grows token by token."""
    manager = BlockManager(1024, block_size, windows=(window,), max_step_tokens=num_tokens)
    seq, most = _sequence([0]), 0
    for length in range(1, num_tokens + 1):
        if not manager.allocate(seq, length):
            raise ValueError(f"{length} tokens do not fit")
        manager.cache(seq, length)
        seq.num_computed_tokens = length
        seq.token_ids.append(0)
        most = max(most, manager.num_blocks - manager.num_free_blocks)
    return most


def hits_of_two_groups(num_tokens: int, window: int, block_size: int) -> str:
    """Table: the length of a hit while blocks of two groups are evicted, one after the other."""
    manager = BlockManager(1024, block_size, windows=(None, window), prefix_cache_seed=0)
    seq = _run(manager, range(num_tokens))
    full, windowed = (list(blocks) for blocks in seq.block_tables)
    rows = [_hit("nothing yet", manager, seq)]
    for block, evicted in (
        (windowed[-1], "the last block of the window group"),
        (full[2], "the third block of the full group"),
        (windowed[0], "the first block of the window group"),
    ):
        manager.prefix_cache.remove(block)
        rows.append(_hit(evicted, manager, seq))
    header = (
        "evicted, in addition to those above",
        "hit in the full group",
        "hit in the window group",
        "tokens",
    )
    return table(header, rows)


def same_step_tokens(prompt_len: int, num_requests: int, block_size: int) -> str:
    """Return the tokens that each of several equal requests, admitted in one step, computes."""
    scheduler = _scheduler(block_size)
    for i in range(num_requests):
        scheduler.add(_sequence(range(prompt_len), arrival=i + 1))
    return " + ".join(str(row.n) for row in scheduler.schedule().rows)


def prompt_tokens_computed(n: int, prompt_len: int, block_size: int) -> int:
    """Return the prompt tokens that are computed for `n` completions of one prompt."""
    return _completions(n, prompt_len, block_size)[0]


def blocks_held(n: int, prompt_len: int, block_size: int) -> int:
    """Return the blocks in use when each of `n` completions of one prompt has its first token."""
    return _completions(n, prompt_len, block_size)[1]


def collision_probability(num_hashes: int, bits: int) -> float:
    """Return the probability that two random hashes are equal: 1 - exp(-n (n - 1) / 2^(bits + 1)).

    The birthday bound in its exponential form; `expm1` keeps the digits when it is tiny.
    """
    return -math.expm1(-num_hashes * (num_hashes - 1) / 2 ** (bits + 1))


def false_hits(lookups: float, published: int, bits: int) -> float:
    """Return the expected lookups that hit another text, with `published` hashes in the cache."""
    return lookups * published / 2**bits


def hashing_seconds(num_hashes: int, hashes_per_second: float) -> float:
    return num_hashes / hashes_per_second


def prefill_seconds(num_tokens: int, num_params: float, flops: float) -> float:
    """Return the least time of a prefill: two operations per parameter and token, no attention."""
    return 2 * num_params * num_tokens / flops


def _chats(
    num_chats: int, system_len: int, own_len: int, block_size: int, cached: bool
) -> tuple[int, int]:
    manager = BlockManager(4096, block_size, enable_prefix_caching=cached, prefix_cache_seed=0)
    system, computed = list(range(system_len)), 0
    for i in range(1, num_chats + 1):
        prompt = [*system, *range(i * _OTHER, i * _OTHER + own_len)]
        hits = len(manager.lookup(_sequence(prompt)))
        _run(manager, prompt)
        computed += len(prompt) - hits * block_size
    return computed, manager.num_blocks - manager.num_free_blocks


def _completions(n: int, prompt_len: int, block_size: int) -> tuple[int, int]:
    scheduler = _scheduler(block_size)
    params = SamplingParams(n=n, max_tokens=16)
    siblings = [
        Sequence("r", list(range(prompt_len)), params, _MAX_MODEL_LEN, index=i, arrival=i + 1)
        for i in range(n)
    ]
    siblings[0].siblings = siblings[1:]
    scheduler.add(siblings[0])
    computed = 0
    while any(seq.num_tokens == prompt_len for seq in siblings):
        plan = scheduler.schedule()
        for row in plan.rows:
            computed += max(0, min(row.start + row.n, prompt_len) - row.start)
        scheduler.commit(plan)
        scheduler.update(plan, [[_OTHER] for _ in plan.sampled])
    manager = scheduler.block_manager
    return computed, manager.num_blocks - manager.num_free_blocks


def _manager(num_blocks: int, block_size: int) -> BlockManager:
    return BlockManager(num_blocks, block_size, prefix_cache_seed=0)


def _scheduler(block_size: int) -> Scheduler:
    config = EngineConfig("none", block_size=block_size, prefix_cache_seed=0)
    return Scheduler(config.for_device("cpu"), num_kv_blocks=4096, max_model_len=_MAX_MODEL_LEN)


def _sequence(token_ids: range | list[int], arrival: int = 0) -> Sequence:
    return Sequence("r", list(token_ids), SamplingParams(), _MAX_MODEL_LEN, arrival=arrival)


def _run(manager: BlockManager, token_ids: range | list[int]) -> Sequence:
    """Compute a prompt, except for the prefix that is cached."""
    seq = _sequence(token_ids)
    hits = manager.lookup(seq)
    if not manager.allocate(seq, seq.num_tokens, hits):
        raise ValueError(f"{seq.num_tokens} tokens, and {manager.num_free_blocks} free blocks")
    manager.cache(seq, seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens
    return seq


def _hit(event: str, manager: BlockManager, seq: Sequence) -> tuple[str, str, str, int]:
    """Return a row of `hits_of_two_groups`: the hit of a prompt that begins with all of `seq`."""
    hits = manager.lookup(_sequence([*seq.token_ids, 0]))
    groups = [_places(blocks) for blocks in zip(*hits, strict=True)] or ["none", "none"]
    return event, *groups, len(hits) * manager.block_size


def _places(blocks: tuple[int, ...]) -> str:
    """Return which of the first, second, ... blocks of tokens are in a hit."""
    return ", ".join(str(place) for place, block in enumerate(blocks, 1) if block)


def _state(event: str, manager: BlockManager, block: int) -> tuple[str, int, str, str]:
    def yes(condition: bool) -> str:
        return "yes" if condition else "no"

    is_cached = yes(manager.prefix_cache.has(block))
    return event, manager._ref_counts[block], yes(block in manager._free), is_cached
