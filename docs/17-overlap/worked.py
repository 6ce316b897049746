"""Numbers of chapter 17: nanoserve's own loop, on a device with given step times.

The clock is simulated: the work of host and device advances it. Requests are called A, B, C etc.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np
from tables import table

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.executor import ForwardInputs, SampleInputs, StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence as Seq
from nanoserve.sampling_params import SamplingParams

_EOS = 9


class Costs(NamedTuple):
    """Milliseconds of a step: host before the launch, device, host after collecting."""

    plan: float
    forward: float
    sample: float
    update: float


def step_ms(plan: float, forward: float, sample: float, update: float, ahead: bool) -> float:
    """Time from one step to the next in the steady state.

    Without async scheduling it is the sum. With it, the host needs `update` and `plan` for each
    step; the device needs the model and the sampler, which also waits for `update`, since penalties
    depend on the tokens of the previous step.
    """
    if not ahead:
        return plan + forward + sample + update
    return max(update + plan, max(forward, update) + sample)


def steps_table(rows: Sequence[tuple[float, float, float, float]]) -> str:
    """Step times without and with async scheduling, for several costs."""
    lines = []
    for costs in rows:
        plan, forward, sample, update = costs
        turn, ahead = step_ms(*costs, ahead=False), step_ms(*costs, ahead=True)
        device = forward + sample
        cells = (f"{plan + update:g}", f"{device:g}", f"{turn:g}", f"{ahead:g}")
        lines.append((*cells, f"{turn / ahead:.2f}", f"{100 * device / ahead:.0f} %"))
    header = ("host", "device", "synchronous", "asynchronous", "gain", "device busy, asynchronous")
    return table(header, lines)


def timeline(costs: Sequence[float], ahead: bool, num_steps: int = 3) -> str:
    """When the host and the device work on each step of one request, in milliseconds."""
    device = _run([num_steps], [False], Costs(*costs), ahead)
    rows = [
        (number, *(f"{start:g} - {end:g}" for start, end in spans))
        for number, spans in enumerate(device.spans, 1)
    ]
    return table(("step", "host plans", "device", "host updates"), rows)


def rows_table(output_len: int) -> str:
    """Rows that a request takes, by the way it ends, without and with async scheduling."""
    rows = []
    for name, by_eos in (("by its length", False), ("by EOS", True)):
        turn, ahead = (
            sum(map(len, _run([output_len], [by_eos], Costs(1, 4, 0, 1), value).rows))
            for value in (False, True)
        )
        rows.append((name, output_len, turn, ahead, ahead - turn))
    return table(("ends", "tokens", "rows, synchronous", "rows, asynchronous", "discarded"), rows)


def late_share(mean_len: int) -> float:
    """Per cent of all rows that are discarded, if answers of so many tokens end by EOS."""
    return 100 / (mean_len + 2)


def plans_table(output_lens: Sequence[int], by_eos: Sequence[bool]) -> str:
    """Rows of each step with async scheduling, and what becomes of their tokens."""
    device = _run(output_lens, by_eos, Costs(1, 4, 0, 1), ahead=True)
    rows = []
    for number, names in enumerate(device.rows, 1):
        results = [
            f"{name}: {device.outcome.get((number, name), 'cancelled')}" for name in sorted(names)
        ]
        rows.append((number, ", ".join(sorted(names)), ", ".join(results)))
    return table(("step", "rows", "results"), rows)


def caching_table() -> str:
    """When the engine's scheduler caches a block of four whose last token is pending."""
    config = EngineConfig("none", block_size=4, async_scheduling=True).for_device("cpu")
    scheduler = Scheduler(config, num_kv_blocks=4, max_model_len=16)
    seq = Seq("one", [1, 2, 3], SamplingParams(max_tokens=None), 16)
    scheduler.add(seq)
    rows: list[tuple[object, ...]] = []

    def note(moment: str) -> None:
        numbers = (len(seq.token_ids), seq.num_pending, seq.num_computed_tokens)
        rows.append((moment, *numbers, seq.num_cached_blocks))

    first = scheduler.schedule()
    scheduler.commit(first)
    note("step 1 is launched: it computes the prompt")
    second = scheduler.schedule()
    note("step 2 is planned, for the pending token")
    scheduler.update(first, [[4]])
    note("the token of step 1 is known")
    scheduler.commit(second)
    note("step 2 is committed")
    header = ("moment", "known tokens", "pending", "`num_computed_tokens`", "cached blocks")
    return table(header, rows)


def ratio(before: float, after: float) -> float:
    return before / after


def busy_us(wall: float, percent: float) -> float:
    """The time of a measured step in which some kernel ran."""
    return wall * percent / 100


@dataclass
class Launched:
    """Step in flight: when the device starts and finishes it, and its tokens."""

    number: int
    start: float
    new_ids: list[int]
    end: float = 0.0


class TimedDevice:
    """Executor with a simulated clock: launched work runs in order, each as soon as possible.

    A request's seed is the number of its tokens before EOS; its prompt has one token.
    """

    num_kv_blocks, max_model_len = 64, 256

    def __init__(self, config: EngineConfig, costs: Costs) -> None:
        self.costs, self.now, self.free = costs, 0.0, 0.0
        layout = BatchLayout(config.max_num_batched_tokens, config.max_num_seqs, 16)
        self._batches = [Batch(layout, np.zeros(layout.num_bytes, np.uint8)) for _ in "ab"]
        self._lengths: dict[int, int] = {}  # by slot
        self._names: dict[int, str] = {}
        # Of each step: when host, device and host again work on it, and the requests of its rows.
        self.spans: list[list[tuple[float, float]]] = []
        self.rows: list[list[str]] = []
        self.outcome: dict[tuple[int, str], str] = {}  # of a row of a step

    def next_batch(self) -> Batch:
        self.spans.append([(self.now, self.now + self.costs.plan)])
        self.now += self.costs.plan
        return self._batches[len(self.spans) % 2]

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Launched:
        for update in inputs.slot_updates:
            self._lengths[update.slot] = update.seed
            self._names[update.slot] = ascii_uppercase[len(self._names)]
        header = batch.header
        self.rows.append([self._names[slot] for slot in batch.row_slots[: header.num_rows]])
        slots = batch.output_slots[: header.num_sampled].tolist()
        places = batch.positions[batch.output_rows[: header.num_sampled]].tolist()
        pairs = zip(slots, places, strict=True)
        new_ids = [_EOS if place >= self._lengths[slot] else 7 for slot, place in pairs]
        start = max(self.now, self.free)
        self.free = start + self.costs.forward
        return Launched(len(self.spans) - 1, start, new_ids)

    def sample(self, step: Launched, inputs: SampleInputs) -> None:
        self.free = step.end = max(self.now, self.free) + self.costs.sample
        self.spans[step.number].append((step.start, step.end))

    def collect(self, step: Launched) -> StepResult:
        self.now = max(self.now, step.end)
        self.spans[step.number].append((self.now, self.now + self.costs.update))
        self.now += self.costs.update
        return StepResult([[token] for token in step.new_ids])

    def cancel(self, steps: list[Launched]) -> None:
        pass

    def close(self) -> None:
        pass


def _run(
    output_lens: Sequence[int], by_eos: Sequence[bool], costs: Costs, ahead: bool
) -> TimedDevice:
    config = EngineConfig("none", max_num_seqs=8, async_scheduling=ahead).for_device("cpu")
    device = TimedDevice(config, costs)
    engine = GuardedEngine(config, _MODEL, device, None, clock=lambda: device.now)
    for name, length, ends_by_eos in zip(ascii_uppercase, output_lens, by_eos, strict=False):
        params = SamplingParams(
            max_tokens=None if ends_by_eos else length,
            seed=length if ends_by_eos else 1000,
            stop_token_ids=[_EOS],
        )
        engine.add_request(name, [1], params)
    update, num_updates = engine.scheduler.update, 0

    def updated(plan: object, token_ids: list[list[int]]) -> list[int]:
        nonlocal num_updates
        num_updates += 1
        joined = update(plan, token_ids)
        for row, count in zip(plan.sampled, joined, strict=True):
            words = {-1: "discarded", 0: "EOS"}
            device.outcome[num_updates, row.seq.request_id] = words.get(count, "a token")
        return joined

    engine.scheduler.update = updated
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    return device


_MODEL = ModelConfig(
    architecture="none",
    vocab_size=10,
    hidden_size=1,
    intermediate_size=1,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=1,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    tie_word_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    attention_scale=1.0,
    sliding_windows=(None,),
    dtype="float32",
    eos_token_ids=frozenset(),
)
