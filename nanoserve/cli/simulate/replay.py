"""Compute a recorded trace again, without a model, and compare both runs step by step.

Requests enter before the step in which they were first seen, aborts happen between the steps where
they happened, each sequence gets the tokens that it got, and each step takes the time that it took.
Then the scheduler must make the same plans: the same rows, prefix-cache hits, block tables,
preemptions and evictions. The simulated run is recorded by the same recorder, so that all of this
is compared; only times and texts are left out. A difference means that the scheduler has changed
since the trace was recorded.

A trace cannot be computed again if it has steps that raised, requests that failed or were held by
an extension, several steps in flight, as a pipeline has, or KV blocks from the host's memory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoserve.cli.simulate.executor import Scripts, SimulatedExecutor, VirtualClock
from nanoserve.cli.simulate.models import model_config_of
from nanoserve.cli.simulate.step_time import RecordedTimes
from nanoserve.config import EngineConfig
from nanoserve.engine.draft_room import add_draft_tokens
from nanoserve.engine.extension import Extension
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence
from nanoserve.features.trace.reader import Record, Trace, read_trace
from nanoserve.features.trace.recorder import TraceRecorder
from nanoserve.features.trace.whole_lines import WholeLines
from nanoserve.outputs import RequestOutputKind
from nanoserve.sampling_params import SamplingParams
from nanoserve.utils.checks import require

_OPTIONS = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"),
    *("scheduling_policy", "enable_prefix_caching", "max_model_len"),
)
# What two runs must have in common. A queue may have more entries in the trace of a server, where
# requests arrive while a step is recorded.
_COMPARED = (
    *("aborted", "preempted", "admitted", "batch", "rows", "evicted", "published"),
    *("finished", "running"),
)
_QUEUES = ("waiting", "running")
_OF_A_ROW = ("seq", "kind", "computed", "new", "hits", "blocks", "yields", "right")


@dataclass
class Life:
    """The life of a sequence in a trace: its arrival, its output and how it ended.

    output: all tokens after its prompt, with the stop token that ended it, if one did; None where
        an older trace does not have that token.
    """

    arrival: Record
    output: list[int | None]
    reason: str | None = None
    stop_reason: int | str | None = None

    def end(self, reason: str, stop_reason: int | str | None) -> None:
        self.reason, self.stop_reason = reason, stop_reason

    @property
    def is_ended_by_token(self) -> bool:
        return self.reason == "stop" and not isinstance(self.stop_reason, str)

    def script(self, eos_token_id: int) -> list[int]:
        """Return the output, in which a missing stop token is `eos_token_id`, or `stop_reason`."""
        stop = self.stop_reason if isinstance(self.stop_reason, int) else eos_token_id
        return [stop if token_id is None else token_id for token_id in self.output]


def lives_of(trace: Trace) -> dict[int, Life]:
    """Return what happened to each sequence, by arrival number."""
    lives: dict[int, Life] = {}
    for step in trace.steps:
        for arrival in step["arrived"]:
            lives[arrival["seq"]] = Life(arrival, [])
        for row in step["rows"]:
            if row["yields"]:
                accepted = row.get("guesses", [])[: row.get("right", 0)]
                accepted_ids = [token_id for token_id, _ in accepted]
                lives[row["seq"]].output.extend([*accepted_ids, row["token"]])
        for ended in (*step["finished"], *step["aborted"]):
            if ended["seq"] in lives:
                lives[ended["seq"]].end(ended["reason"], ended["stop_reason"])
    return lives


def eos_token_ids(lives: Iterable[Life], vocab_size: int) -> frozenset[int]:
    """Return the tokens that ended sequences as EOS; if none is known, one that is not output."""
    lives = list(lives)
    ended = [life for life in lives if life.is_ended_by_token and life.stop_reason is None]
    known = {life.output[-1] for life in ended if life.output} - {None}
    if known:
        return frozenset(known)
    used = {token_id for life in lives for token_id in life.output}
    return frozenset({next(token_id for token_id in range(vocab_size) if token_id not in used)})


def counts(trace: Trace) -> dict[str, int]:
    """Return the totals of a trace."""
    rows = [row for step in trace.steps for row in step["rows"]]
    block_size = trace.header["block_size"]
    return {
        "steps": len(trace.steps),
        "computed tokens": sum(row["new"] for row in rows),
        "sampled tokens": sum(row["yields"] + row.get("right", 0) for row in rows),
        "cached tokens": sum(row["hits"] for row in rows) * block_size,
        "preemptions": sum(len(step["preempted"]) for step in trace.steps),
        "evicted blocks": sum(len(step["evicted"]) for step in trace.steps),
        "finished": sum(len(step["finished"]) for step in trace.steps),
    }


def first_difference(one: Trace, other: Trace) -> str | None:
    """Return where two runs differ first, or None if they are equal but for times and texts."""
    for ours, theirs in zip(one.steps, other.steps, strict=False):
        for name in _COMPARED:
            left, right = _comparable(ours, name), _comparable(theirs, name)
            if left != right:
                return f"step {ours['step']}: {name} {left} became {right}"
    if len(one.steps) != len(other.steps):
        return f"{len(one.steps)} steps became {len(other.steps)}"
    return None


def renumbered(trace: Trace, numbers: Mapping[int, int]) -> Trace:
    """Return a trace in which sequences have other arrival numbers.

    A trace does not have requests that were aborted before a step saw them, but counts them.
    """

    def renumber(value: Any) -> Any:
        if isinstance(value, dict):
            return value | {"seq": numbers[value["seq"]]}
        return numbers[value]

    lists = ("arrived", "aborted", "undone", "preempted", "admitted", "rows", "finished")
    steps = [
        step | {name: [renumber(value) for value in step[name]] for name in (*lists, *_QUEUES)}
        for step in trace.steps
    ]
    return replace(trace, steps=steps)


def _comparable(step: Record, name: str) -> Any:
    if name == "batch":  # the number of a step counts failed ones, too
        return {key: value for key, value in step[name].items() if key != "step"}
    if name != "rows":
        return sorted(step[name]) if name == "published" else step[name]
    return [[*(row.get(key) for key in _OF_A_ROW), _draft_ids(row)] for row in step["rows"]]


def _draft_ids(row: Record) -> list[int]:
    return [token_id for token_id, _ in row.get("guesses", ())]


class Replay:
    """Runs the requests of a trace again, and records that run as `output`.

    model: replaces the name of the model in the trace, which must be found as for `LLM`. Raises
    `ValueError` for a trace that cannot be computed again.
    """

    def __init__(self, trace: Trace, output: Path, model: str | None = None) -> None:
        self.trace, self.output = trace, output
        self._lives = lives_of(trace)
        check_replayable(trace, self._lives)
        self._scripts, self._clock = Scripts(), VirtualClock()
        self.numbers: dict[Sequence, int] = {}  # recorded arrival numbers
        header = trace.header
        model_config = model_config_of(model or header["model"])
        ends = eos_token_ids(self._lives.values(), model_config.vocab_size)
        self._eos, model_config = min(ends), replace(model_config, eos_token_ids=ends)
        options: dict[str, Any] = {name: header[name] for name in _OPTIONS}
        # A recorded engine has had its defaults set, and runs one step at a time.
        config = EngineConfig(header["model"], async_scheduling=False, **options).for_device("cpu")
        times = RecordedTimes(sum(step["times"].values()) for step in trace.steps)
        parts = config, model_config, header["num_kv_blocks"], times, self._clock, self._scripts
        executor = SimulatedExecutor(*parts)
        self.engine = GuardedEngine(config, model_config, executor, None, self._clock)
        if any("guesses" in row for step in trace.steps for row in step["rows"]):
            self._drafts = RecordedDrafts(self.engine, self.numbers)
            self.engine.add_extension(self._drafts)
        else:
            self._drafts = None

    def run(self) -> Trace:
        """Run to the end of the trace; returns the trace of the simulated run."""
        with WholeLines(self.output) as file:
            recorder = TraceRecorder(self.engine, file)
            self.engine.observers.append(recorder.observe)
            self.engine.scheduler.block_manager.listeners.append(recorder.cache_changes)
            for step in self.trace.steps:
                for ended in step["aborted"]:
                    self.engine.abort_request(self._lives[ended["seq"]].arrival["request"])
                for arrival in step["arrived"]:
                    if arrival["index"] == 0:
                        self._add(arrival)
                self._clock.advance_to(max(self._clock(), step["time"]))
                if self._drafts is not None:
                    self._drafts.begin_step(step["rows"])
                self.engine.step()
        numbers = {seq.arrival: number for seq, number in self.numbers.items()}
        return renumbered(read_trace(self.output), numbers)

    def _add(self, arrival: Record) -> None:
        """Queue a request with the completions that the trace has of it."""
        first = arrival["seq"]
        lives: list[Life] = []
        life = self._lives.get(first)
        while life is not None and life.arrival["request"] == arrival["request"]:
            if life.arrival["index"] != len(lives):
                break  # another request with the same id
            lives.append(life)
            life = self._lives.get(first + len(lives))
        by_length = [len(life.output) for life in lives if life.reason == "length"]
        by_token: list[Any] = [life.stop_reason for life in lives if life.is_ended_by_token]
        params = SamplingParams(
            n=len(lives),
            max_tokens=max(by_length, default=None),
            ignore_eos=None not in by_token,
            stop_token_ids=sorted({*by_token} - {None}) or None,
            seed=first,
        )
        self._scripts.add(first, [life.script(self._eos) for life in lives])
        request = self.engine.input_processor.process(
            arrival["request"],
            arrival["prompt"],
            params,
            arrival["priority"],
            RequestOutputKind.FINAL_ONLY,
        )
        for seq, life in zip(request.sequences, lives, strict=True):
            self.numbers[seq] = life.arrival["seq"]
            if life.reason == "stop" and not life.is_ended_by_token:
                seq.stop_conditions.append(StopAfter(len(life.output), life.stop_reason))
        self.engine.add(request)


@dataclass(frozen=True)
class StopAfter:
    """A stop condition that ends a sequence where a stop string has ended it."""

    num_tokens: int
    stop_reason: Any

    def __call__(self, seq: Sequence) -> tuple[str, Any] | None:
        is_end = seq.num_output_tokens >= self.num_tokens
        return ("stop", self.stop_reason) if is_end else None


class RecordedDrafts(Extension):
    """Adds the draft tokens of the recorded step."""

    def __init__(self, engine: GuardedEngine, numbers: dict[Sequence, int]) -> None:
        self._scheduler, self._numbers = engine.scheduler, numbers
        self._drafts: dict[int, list[int]] = {}

    def begin_step(self, rows: list[Record]) -> None:
        """Take the draft tokens of the recorded rows of the next step."""
        self._drafts = {row["seq"]: _draft_ids(row) for row in rows}

    def extend_plan(self, plan: Plan) -> None:
        for index, row in enumerate(plan.rows):
            token_ids = self._drafts.get(self._numbers[row.seq])
            if token_ids:
                add_draft_tokens(self._scheduler, plan, index, token_ids)


def check_replayable(trace: Trace, lives: dict[int, Life]) -> None:
    """Raise `ValueError` if a trace cannot be computed again, with the step and the reason."""
    require(bool(trace.steps), "the trace has no steps: record a run with at least one request")
    newest = 0
    for step in trace.steps:
        where = f"step {step['step']} of the trace"
        require(not step["undone"], f"{where} follows a step that raised: record another run")
        require(not step.get("stages"), f"{where} ran in pipeline stages: record a run without")
        require(
            not step.get("from_host"),
            f"{where} got KV blocks from the host: record a run without kv_offloading_size and "
            "KV connectors",
        )
        for arrival in step["arrived"]:
            require(
                arrival["index"] > 0 or arrival["seq"] > newest,
                f"{where} has sequence {arrival['seq']}, which an extension had held, such as the "
                "compiler of a grammar: record a run without structured output",
            )
            newest = max(newest, arrival["seq"] * (arrival["index"] == 0))
    for number, life in lives.items():
        require(
            life.reason != "error", f"sequence {number} ended with an error: record a run without"
        )
