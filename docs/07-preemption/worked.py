"""Chapter 7's numbers: chunks and preemption by the engine's own `Scheduler`, and some arithmetic.

Requests are called A, B, C and so on, in the order of their arrival. Times are lower bounds from a
data sheet's rates: weights are read once per step, attention and launches are left out.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from string import ascii_uppercase

from tables import table

from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.sampling_params import SamplingParams

_MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class GPU:
    """Rates per second: dense 16-bit operations, bytes from its memory, bytes to the host."""

    flops: float
    bandwidth: float
    pcie: float  # one direction; a practical rate, below that of the data sheet


@dataclass(frozen=True)
class Model:
    params: float
    kv_bytes_per_token: int  # in 16 bits

    @property
    def weight_bytes(self) -> float:
        return 2 * self.params


GPUS = {"A100": GPU(312e12, 2e12, 25e9), "H100": GPU(989e12, 3.35e12, 50e9)}
MODELS = {
    "LLaMA-2-7B": Model(7e9, 2 * 32 * 32 * 128 * 2),
    "Llama-3.1-8B": Model(8e9, 2 * 32 * 8 * 128 * 2),
    "LLaMA-2-70B": Model(70e9, 2 * 80 * 8 * 128 * 2),
}


def chunks(prompt_len: int, threshold: int, budget: int, decoding: int = 0) -> str:
    """Return the chunks in which a prompt is computed beside `decoding` other sequences."""
    scheduler = _scheduler(long_prefill_token_threshold=threshold, max_num_batched_tokens=budget)
    _add_decoding(scheduler, decoding)
    seq = _add(scheduler, prompt_len)
    found = []
    while seq.num_tokens == prompt_len:
        found.append(_counts(_step(scheduler))[seq])
    return " + ".join(map(str, found))


def mixed_steps(decoding: int, prompt_len: int, next_prompt_len: int, threshold: int) -> str:
    """Table: a long prompt in chunks beside decoding sequences, and a short one a step later."""
    scheduler = _scheduler(long_prefill_token_threshold=threshold)
    others = _add_decoding(scheduler, decoding)
    long = _add(scheduler, prompt_len)
    short = None
    rows = []
    while long.num_tokens == prompt_len:
        plan = _counts(_step(scheduler))
        cells = [sum(plan.get(seq, 0) for seq in others), plan[long], plan.get(short, 0)]
        rows.append((len(rows) + 1, *cells, sum(plan.values())))
        short = short or _add(scheduler, next_prompt_len)
    names = ", ".join(seq.request_id for seq in others)
    return table(("step", f"{names} decode", "long prompt", "short prompt", "tokens"), rows)


def step_seconds(num_tokens: int, model: str, gpu: str) -> float:
    """Return the longer of reading the weights and 2 operations per parameter and token."""
    m, g = MODELS[model], GPUS[gpu]
    return max(m.weight_bytes / g.bandwidth, 2 * m.params * num_tokens / g.flops)


def balanced_tokens(model: str, gpu: str) -> float:
    """Return the tokens per step at which computing takes as long as reading the weights."""
    m, g = MODELS[model], GPUS[gpu]
    return m.weight_bytes / g.bandwidth * g.flops / (2 * m.params)


def chunk_table(prompt_len: int, decoding: int, sizes: list[int], model: str, gpu: str) -> str:
    """Table: the effect of the chunk size on decoding requests and on the new request."""
    rows = []
    for size in sizes:
        lengths = [min(size, prompt_len - start) for start in range(0, prompt_len, size)]
        times = [1000 * step_seconds(n + decoding, model, gpu) for n in lengths]
        rows.append((f"{size:,}", len(lengths), f"{max(times):.1f} ms", f"{sum(times):.0f} ms"))
    header = ("chunk", "steps", "longest gap between two tokens", "first token of the new request")
    return table(header, rows)


def preemption_steps(requests: list[tuple[int, int]], num_kv_blocks: int) -> str:
    """Table: requests (prompt, output) in a pool too small for them, without a prefix cache."""
    scheduler = _scheduler(num_kv_blocks=num_kv_blocks)
    for prompt_len, max_tokens in requests:
        _add(scheduler, prompt_len, max_tokens)
    rows = []
    while scheduler.has_unfinished():
        plan = _step(scheduler)
        planned = ", ".join(f"{row.seq.request_id}: {row.n}" for row in plan.rows)
        free = scheduler.block_manager.num_free_blocks
        waiting = _names(scheduler.waiting)
        rows.append((len(rows) + 1, planned, _names(plan.preempted), waiting, free))
    header = ("step", "planned", "preempted", "waiting after it", "free blocks after it")
    return table(header, rows)


def head_of_the_queue(requests: list[tuple[int, int]], num_kv_blocks: int) -> str:
    """Table: free blocks and the needs of the head of the queue, until a sequence ends."""
    scheduler = _scheduler(num_kv_blocks=num_kv_blocks)
    sequences = [_add(scheduler, *request) for request in requests]
    needed = scheduler.block_manager.blocks_needed
    rows = []
    while not any(seq.finish_reason for seq in sequences):
        plan = _step(scheduler)
        head = scheduler.waiting[0] if scheduler.waiting else None
        ended = [seq for seq in sequences if seq.finish_reason]
        free = scheduler.block_manager.num_free_blocks
        wanted = (head.request_id, needed(head.num_tokens)) if head else ("none", "")
        rows.append((len(rows) + 1, _names(plan.preempted), _names(ended), free, *wanted))
    header = ("step", "preempted", "ended", "free blocks after it", "head of the queue", "it needs")
    return table(header, rows)


def tokens_computed_again(prompt_len: int, prefix_caching: bool) -> int:
    """Return how many tokens a preempted sequence computes when it is admitted again.

    Its prompt exactly fills all but three blocks of the pool. A short request before it grows by
    three blocks, of which the first is free and the others are the victim's, and then ends.
    """
    blocks = prompt_len // 16
    scheduler = _scheduler(num_kv_blocks=blocks + 3, enable_prefix_caching=prefix_caching)
    _add(scheduler, 32, max_tokens=40)
    victim = _add(scheduler, prompt_len, max_tokens=8)
    while not victim.metrics.num_preemptions:
        _step(scheduler)
    while True:
        counts = _counts(_step(scheduler))
        if victim in counts:
            return counts[victim]


def admission(on_first_chunk: bool, prompt_len: int, num_kv_blocks: int, budget: int) -> str:
    """Return table cells: tokens computed for a long prompt, its preemptions, and the steps.

    Beside it a sequence grows from 3 blocks to 5. The budget is the chunk size.
    """
    scheduler = _scheduler(num_kv_blocks=num_kv_blocks, max_num_batched_tokens=budget)
    if on_first_chunk:
        scheduler.block_manager = _FirstChunkOnly(num_kv_blocks, budget)
    _add(scheduler, 40, max_tokens=40)
    for _ in range(3):
        _step(scheduler)
    long = _add(scheduler, prompt_len, max_tokens=2)
    computed = steps = 0
    while scheduler.has_unfinished():
        computed += _counts(_step(scheduler)).get(long, 0)
        steps += 1
    return f"{computed:,} | {long.metrics.num_preemptions} | {steps}"


def concurrency(num_kv_blocks: int, prompt_len: int, reserved_output: int) -> int:
    """Return how many requests fit into a pool if blocks for their output are reserved."""
    needed = BlockManager(1, 16).blocks_needed(prompt_len + reserved_output)
    return num_kv_blocks // needed


def swap_seconds(num_tokens: int, model: str, gpu: str) -> float:
    """Return the time to copy K and V to the host's memory and back at the full PCIe rate."""
    return 2 * num_tokens * MODELS[model].kv_bytes_per_token / GPUS[gpu].pcie


def recompute_seconds(num_tokens: int, model: str, gpu: str) -> float:
    """Return the time of 2 operations per parameter and token at the full rate of the GPU."""
    return 2 * MODELS[model].params * num_tokens / GPUS[gpu].flops


def swap_table(num_tokens: int) -> str:
    rows = []
    for gpu in GPUS:
        for model, shape in MODELS.items():
            swap = f"{1000 * swap_seconds(num_tokens, model, gpu):.0f} ms"
            again = f"{1000 * recompute_seconds(num_tokens, model, gpu):.0f} ms"
            rows.append((model, gpu, f"{shape.kv_bytes_per_token / 1024:.0f} KiB", swap, again))
    header = ("model", "GPU", "KV per token", f"swap {num_tokens:,} tokens", "recompute them")
    return table(header, rows)


class _FirstChunkOnly(BlockManager):
    """Gives a new request blocks for its first chunk only, which the engine does *not* do."""

    def __init__(self, num_blocks: int, chunk: int) -> None:
        super().__init__(num_blocks, 16, enable_prefix_caching=False)
        self.chunk = chunk

    def allocate(self, seq: Sequence, num_tokens: int, cached_blocks: Collection[int] = ()) -> bool:
        if seq.status is SequenceStatus.WAITING:
            num_tokens = min(num_tokens, self.chunk)
        return super().allocate(seq, num_tokens, cached_blocks)


def _scheduler(num_kv_blocks: int = 4096, **options: int | bool) -> Scheduler:
    options = {"max_num_seqs": 16, "enable_prefix_caching": False, **options}
    config = EngineConfig("none", prefix_cache_seed=0, **options).for_device("cpu")
    return Scheduler(config, num_kv_blocks, _MAX_MODEL_LEN)


def _add(scheduler: Scheduler, prompt_len: int, max_tokens: int = 1000) -> Sequence:
    arrival = len(scheduler.running) + len(scheduler.waiting)
    seq = Sequence(
        ascii_uppercase[arrival],
        [arrival] * prompt_len,
        SamplingParams(max_tokens=max_tokens),
        _MAX_MODEL_LEN,
        arrival=arrival,
    )
    scheduler.add(seq)
    return seq


def _add_decoding(scheduler: Scheduler, count: int) -> list[Sequence]:
    sequences = [_add(scheduler, prompt_len=1) for _ in range(count)]
    if sequences:
        _step(scheduler)
    return sequences


def _step(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule()
    scheduler.commit(plan)
    scheduler.update(plan, [[ord("t")] for _ in plan.sampled])
    return plan


def _counts(plan: Plan) -> dict[Sequence, int]:
    return {row.seq: row.n for row in plan.rows}


def _names(sequences: Iterable[Sequence]) -> str:
    return ", ".join(seq.request_id for seq in sequences) or "none"
