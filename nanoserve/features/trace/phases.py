"""Find the phases of each sequence in a trace, and convert a trace to Chrome's format."""

from dataclasses import dataclass
from typing import Any

from nanoserve.features.trace.reader import Pool, Record, Trace

_ENGINE, _REQUESTS, _STAGES = 1, 2, 3  # "processes" of a Chrome trace: each has its own tracks


@dataclass
class Span:
    """A span of time in which a sequence was in one phase.

    phase: "waiting", "prefill", "decode" or "preempted".
    first, last: indices of the first and the last step; last < first if it lies between two steps.
    start, end: in seconds; a span ends where the next one of its sequence starts.
    """

    phase: str
    first: int
    start: float
    last: int = -1
    end: float = 0.0


class _Spans:
    """The spans of all sequences under construction. The last span of a sequence may be open."""

    def __init__(self) -> None:
        self.of: dict[int, list[Span]] = {}  # by arrival number
        self._open: dict[int, Span] = {}

    def begin(self, seq: int, phase: str, step: int, now: float) -> None:
        if seq in self._open:
            if self._open[seq].phase == phase:
                return
            self.end(seq, step - 1, now)
        self._open[seq] = Span(phase, step, now)
        self.of.setdefault(seq, []).append(self._open[seq])

    def end(self, seq: int, step: int, now: float) -> None:
        span = self._open.pop(seq)
        span.last, span.end = step, max(now, span.start)

    def end_all(self, step: int, now: float) -> None:
        for seq in list(self._open):
            self.end(seq, step, now)


def phases(trace: Trace) -> dict[int, list[Span]]:
    """Return the spans of each sequence by arrival number, without gaps from arrival to end."""
    spans = _Spans()
    for i, step in enumerate(trace.steps):
        now = step["time"]
        for arrival in step["arrived"]:
            spans.begin(arrival["seq"], "waiting", i, min(arrival["time"], now))
        for ended in step["aborted"]:
            spans.end(ended["seq"], i - 1, now)
        for seq in [*step["undone"], *step["preempted"]]:
            spans.begin(seq, "preempted", i, now)
        for row in step["rows"]:
            spans.begin(row["seq"], row["kind"], i, now)
        for ended in step["finished"]:
            spans.end(ended["seq"], i, step_end(step))
    if trace.steps:
        spans.end_all(len(trace.steps) - 1, _end_of(trace))
    return spans.of


def step_end(step: Record) -> float:
    """Return the end of a step in seconds from the start of the trace."""
    return step["time"] + sum(step["times"].values())


def _end_of(trace: Trace) -> float:
    return step_end(trace.steps[-1]) if trace.closed is None else trace.closed["closed"]


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Return the trace in Chrome's format, which ui.perfetto.dev and chrome://tracing read.

    It has a track of steps with their parts, counters of blocks and tokens, a track for each
    sequence with its phases, and a track for each pipeline stage. Times are in microseconds, and
    events are ordered by time.
    """
    events = [*_step_events(trace), *_request_events(trace)]
    # Of two events that start together, the longer one encloses the other and comes first.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(trace), *events]}


def _names(trace: Trace) -> list[Record]:
    names = [
        _name("process_name", _ENGINE, 0, f"engine: {trace.header['model']}"),
        _name("process_name", _REQUESTS, 0, "requests"),
        _name("thread_name", _ENGINE, 0, "steps"),
    ]
    stages = max((len(step.get("stages", ())) for step in trace.steps), default=0)
    names += [_name("process_name", _STAGES, 0, "stages")] * (stages > 0)
    names += [_name("thread_name", _STAGES, stage, f"stage {stage}") for stage in range(stages)]
    for step in trace.steps:
        for arrival in step["arrived"]:
            sibling = f"/{arrival['index']}" if arrival["index"] else ""
            title = f"#{arrival['seq']} request {arrival['request']}{sibling}"
            names.append(_name("thread_name", _REQUESTS, arrival["seq"], title))
    return names


def _name(what: str, pid: int, tid: int, name: str) -> Record:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _step_events(trace: Trace) -> list[Record]:
    events, pool = [], Pool()
    for step in trace.steps:
        start, args = step["time"], step["batch"]
        events.append(_complete(_ENGINE, 0, f"step {step['step']}", start, step_end(step), args))
        for part, seconds in step["times"].items():
            events.append(_complete(_ENGINE, 0, part, start, start + seconds))
            start += seconds
        for stage, span in enumerate(step.get("stages", ())):
            if span:
                events.append(_complete(_STAGES, stage, f"step {step['step']}", *span))
        pool.advance(step)
        used = len(pool.ref_counts())
        events.append(_counter("KV blocks in use", step["time"], used))
        events.append(_counter("tokens in the batch", step["time"], step["batch"]["num_tokens"]))
        pool.release(step)
    return events


def _request_events(trace: Trace) -> list[Record]:
    return [
        _complete(_REQUESTS, seq, span.phase, span.start, span.end)
        for seq, spans in phases(trace).items()
        for span in spans
    ]


def _complete(
    pid: int, tid: int, name: str, start: float, end: float, args: Record | None = None
) -> Record:
    ts, dur = _microseconds(start), _microseconds(end - start)
    event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
    return event if args is None else event | {"args": args}


def _counter(name: str, now: float, value: int) -> Record:
    ts = _microseconds(now)
    return {"ph": "C", "name": name, "pid": _ENGINE, "ts": ts, "args": {"value": value}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


@dataclass(frozen=True)
class StageUse:
    """Utilisation of one stage.

    bubble: the fraction of the time in which it computed nothing. ideal: its bubble if the busiest
    stage had none between its first and its last step, which is due to unequal stages and to
    filling and draining the pipeline.
    """

    busy: float  # seconds
    bubble: float
    ideal: float


def stage_uses(trace: Trace) -> list[StageUse]:
    """Return the utilisation of each stage from the first step to the last; [] for one stage."""
    steps = [step["stages"] for step in trace.steps if all(step.get("stages", [[]]))]
    if not steps:
        return []
    whole = max(step[-1][1] for step in steps) - min(step[0][0] for step in steps)
    busy = [sum(end - begin for begin, end in spans) for spans in zip(*steps, strict=True)]
    # A stage starts after the first step has passed the stages before it, and the last step ends
    # after it has passed the stages after it.
    first, last = ([end - begin for begin, end in step] for step in (steps[0], steps[-1]))
    least = max(
        sum(first[:stage]) + used + sum(last[stage + 1 :]) for stage, used in enumerate(busy)
    )
    return [StageUse(used, 1 - used / whole, 1 - used / least) for used in busy]


def describe_stages(trace: Trace) -> str:
    """Return a line of text for each stage."""
    return "".join(
        f"\nstage {index}: busy for {use.busy:.3f} s, bubble {use.bubble:.1%}; "
        f"{use.ideal:.1%} if the busiest stage never waited"
        for index, use in enumerate(stage_uses(trace))
    )
