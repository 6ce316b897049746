"""Chapter 6's numbers: the engine's own `Scheduler`, step by step and without a model.

Requests are called A, B, C and so on, in the order of their arrival. All sampled tokens are the
same and none is a stop token: sequences end by their length.
"""

from string import ascii_uppercase

from tables import table

from nanoserve.config import EngineConfig
from nanoserve.engine.plan import Row
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

Span = tuple[int, int]

_MAX_MODEL_LEN = 4096


def spans(output_lens: list[int], max_num_seqs: int, static: bool) -> list[Span]:
    """Return for each request how many steps ended before its first and up to its last step.

    Prompts have one token, so that n output tokens take n steps. With `static`, no request may join
    a running batch: the next `max_num_seqs` requests start when the whole batch has ended.
    """
    scheduler = _scheduler(max_num_seqs=max_num_seqs)
    size = max_num_seqs if static else len(output_lens)
    found: dict[Sequence, Span] = {}
    step = 0
    for start in range(0, len(output_lens), size):
        for i, length in enumerate(output_lens[start : start + size], start):
            scheduler.add(_request(i, prompt_len=1, max_tokens=length))
        while scheduler.has_unfinished():
            for seq in _step(scheduler):
                first, _ = found.get(seq, (step, step))
                found[seq] = (first, step + 1)
            step += 1
    return [found[seq] for seq in sorted(found, key=lambda seq: seq.arrival)]


def num_steps(output_lens: list[int], max_num_seqs: int, static: bool) -> int:
    return max(done for _, done in spans(output_lens, max_num_seqs, static))


def slot_use(output_lens: list[int], max_num_seqs: int, static: bool) -> float:
    """Return the fraction of `max_num_seqs` x steps that yields a token."""
    return sum(output_lens) / (max_num_seqs * num_steps(output_lens, max_num_seqs, static))


def catching_up(prompt_len: int, max_tokens: int, budget: int) -> str:
    """Table: `num_computed_tokens` and `num_tokens` of one sequence, step by step."""
    scheduler = _scheduler(max_num_seqs=1, max_num_batched_tokens=budget)
    seq = _request(0, prompt_len, max_tokens)
    scheduler.add(seq)
    rows = []
    while scheduler.has_unfinished():
        computed, known = seq.num_computed_tokens, seq.num_tokens
        n = _step(scheduler)[seq]
        rows.append((len(rows) + 1, computed, known, n, seq.num_tokens - known))
    header = ("step", "`num_computed_tokens`", "`num_tokens`", "planned", "new tokens after it")
    return table(header, rows)


def budget_shares(prompt_lens: list[int], max_tokens: int, budget: int) -> str:
    """Table: how many tokens of every step's budget each request gets, in order of arrival."""
    scheduler = _scheduler(max_num_seqs=len(prompt_lens), max_num_batched_tokens=budget)
    requests = [_request(i, length, max_tokens) for i, length in enumerate(prompt_lens)]
    for seq in requests:
        scheduler.add(seq)
    rows = []
    while scheduler.has_unfinished():
        is_waiting = {seq: seq in scheduler.waiting for seq in requests}
        has_ended = {seq: seq.finish_reason is not None for seq in requests}
        plan = _step(scheduler)
        cells = [
            plan.get(seq) or ("ended" if has_ended[seq] else "waits" if is_waiting[seq] else 0)
            for seq in requests
        ]
        rows.append((len(rows) + 1, *cells, budget - sum(plan.values())))
    names = [seq.request_id for seq in requests]
    return table(("step", *names, "left of the budget"), rows)


def service_order(priorities: list[int], policy: str) -> str:
    """Return the order in which one slot serves requests of one output token."""
    scheduler = _scheduler(max_num_seqs=1, scheduling_policy=policy)
    for i, priority in enumerate(priorities):
        scheduler.add(_request(i, prompt_len=2, max_tokens=1, priority=priority))
    order = []
    while scheduler.has_unfinished():
        order += [seq.request_id for seq in _step(scheduler)]
    return ", ".join(order)


def first_steps(prompt_lens: list[int], max_tokens: int, num_kv_blocks: int) -> str:
    """Table: the step in which each request first runs, when the pool is the scarce resource."""
    scheduler = _scheduler(num_kv_blocks=num_kv_blocks)
    requests = [_request(i, length, max_tokens) for i, length in enumerate(prompt_lens)]
    for seq in requests:
        scheduler.add(seq)
    first: dict[Sequence, int] = {}
    step = 0
    while len(first) < len(requests):
        step += 1
        for seq in _step(scheduler):
            first.setdefault(seq, step)
    needed = scheduler.block_manager.blocks_needed
    rows = [(seq.request_id, needed(seq.num_prompt_tokens), first[seq]) for seq in requests]
    return table(("request", "blocks for its prompt", "first step"), rows)


def undone(decoding_len: int, new_len: int) -> str:
    """Table: A decodes and B arrives; the step that both share fails, and is planned again."""
    scheduler = _scheduler(enable_prefix_caching=True)
    a, b = _request(0, decoding_len, 16), _request(1, new_len, 16)
    scheduler.add(a)
    _step(scheduler)
    scheduler.add(b)
    states = [_state(scheduler, a, b, [])]
    plan = scheduler.schedule()
    states.append(_state(scheduler, a, b, plan.rows))
    scheduler.reset([a, b])
    states.append(_state(scheduler, a, b, []))
    states.append(_state(scheduler, a, b, scheduler.schedule().rows))
    cached = ("cached tokens of A", "cached tokens of B")
    names = ("running", "waiting", "blocks in use", *cached, "planned")
    header = ("", "before the step", "planned", "after `reset`", "planned again")
    return table(header, list(zip(names, *states, strict=True)))


def _state(
    scheduler: Scheduler, a: Sequence, b: Sequence, rows: list[Row]
) -> tuple[str | int, ...]:
    def names(sequences: list[Sequence]) -> str:
        return ", ".join(seq.request_id for seq in sequences) or "none"

    manager = scheduler.block_manager
    planned = ", ".join(f"{row.seq.request_id}: {row.n}" for row in rows)
    found = [len(manager.lookup(seq)) * manager.block_size for seq in (a, b)]
    used = manager.num_blocks - manager.num_free_blocks
    return names(scheduler.running), names(list(scheduler.waiting)), used, *found, planned or "none"


def _scheduler(num_kv_blocks: int = 4096, **options: int | str | bool) -> Scheduler:
    options = {"enable_prefix_caching": False, "prefix_cache_seed": 0, **options}
    config = EngineConfig("none", **options).for_device("cpu")
    return Scheduler(config, num_kv_blocks, _MAX_MODEL_LEN)


def _request(index: int, prompt_len: int, max_tokens: int, priority: int = 0) -> Sequence:
    return Sequence(
        ascii_uppercase[index],
        [index] * prompt_len,
        SamplingParams(max_tokens=max_tokens),
        _MAX_MODEL_LEN,
        arrival=index + 1,
        priority=priority,
    )


def _step(scheduler: Scheduler) -> dict[Sequence, int]:
    """Run one step; returns the number of planned tokens per sequence."""
    plan = scheduler.schedule()
    scheduler.commit(plan)
    scheduler.update(plan, [[7] for _ in plan.sampled])
    return {row.seq: row.n for row in plan.rows}
