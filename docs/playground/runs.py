"""Runs the engine's own `Scheduler` with all combinations of some settings, for the playground.

    python docs/playground/runs.py

writes `runs.js`, which the page loads. There is no model: sampled tokens are made up, which
changes nothing, since the scheduler never looks at their values. `playground.js` only draws these
runs; it decides nothing.

A run is a string, with its steps separated by spaces and the seven fields of a step by semicolons.
Requests are called A to F. The fields describe the state while the step runs:

    0  rows: request, kind, tokens. Kinds: d decodes, p computes all that is left, b was cut by the
       budget, t by the threshold. `Ad1Cb15`
    1  waiting requests, in order: `DE`
    2  admitted requests, each with its number of tokens found in the prefix cache: `C16`
    3  preempted requests, each followed by the one that needed a block: `CA`
    4  requests that end with this step: `B`
    5  why the first waiting request was not admitted: p for a preemption in this step, b for
       budget, s for slots, k5/2 for five blocks of which two were free
    6  blocks that changed: number, owners or -, and * if the block is in the prefix cache: `3A*7-`.
       Before the first step all are free
"""

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from nanoserve.config import EngineConfig
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

RUNS_FILE = Path(__file__).with_name("runs.js")
MAX_MODEL_LEN = 128
NAMES = "ABCDEF"


class Request(NamedTuple):
    prompt: int  # tokens
    output: int
    arrival: int = 1  # the first step that it may run in
    priority: int = 1  # a lower value goes first
    shared: int = 0  # length of the prefix that is shared with other prompts


_MIXED = (
    *(Request(20, 12), Request(12, 20), Request(40, 8)),
    *(Request(8, 16), Request(30, 10, priority=0), Request(16, 14)),
)
_LATE = (1, 3, 6, 9, 12, 15)
REQUESTS: dict[str, tuple[Request, ...]] = {
    "three at once": _MIXED[:3],
    "six at once": _MIXED,
    "six, one after the other": tuple(
        one._replace(arrival=arrival) for one, arrival in zip(_MIXED, _LATE, strict=True)
    ),
    "two long prompts": (
        *(Request(8, 24), Request(8, 24), Request(100, 6, arrival=4)),
        *(Request(100, 6, arrival=5), Request(6, 12, arrival=6, priority=0)),
    ),
    "a shared beginning": tuple(
        Request(40, 8, arrival=arrival, priority=int(i != 4), shared=32)
        for i, arrival in enumerate((1, 1, 4, 4, 8, 12))
    ),
}

# The options, in the order of the index. The size of the pool is in KV slots, that is, in tokens.
OPTIONS: dict[str, tuple] = {
    "requests": tuple(REQUESTS),
    "budget": (16, 32, 64),
    "slots": (2, 4, 6),
    "pool": (112, 128, 320),
    "block_size": (4, 8, 16),
    "threshold": (0, 16),
    "policy": ("fcfs", "priority"),
    "prefix_caching": (False, True),
}
DEFAULTS = {
    **{"requests": "six at once", "budget": 32, "slots": 4, "pool": 128, "block_size": 16},
    **{"threshold": 0, "policy": "fcfs", "prefix_caching": False},
}
# Totals of a run: steps, tokens of the largest step, preemptions, tokens computed, tokens found in
# the prefix cache, and the mean numbers of steps from arrival to the first and to the last token.
TOTALS = ("steps", "largest", "preemptions", "computed", "found", "to_first", "to_last")


class Run(NamedTuple):
    steps: list[str]
    totals: list[float]  # as in TOTALS


class Watched(Scheduler):
    """The engine's scheduler, which also records reasons. Its decisions are unchanged."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.kinds: dict[Sequence, str] = {}
        self.causes: list[tuple[Sequence, Sequence]] = []

    def _plan_row(self, seq: Sequence, plan: Plan) -> None:
        left = plan.budget
        super()._plan_row(seq, plan)
        if plan.rows and plan.rows[-1].seq is seq:
            row = plan.rows[-1]
            if row.start + row.n < seq.num_tokens:
                self.kinds[seq] = "t" if self.max_tokens_per_seq < left else "b"
            else:
                decodes = row.n == 1 and row.start >= seq.num_prompt_tokens
                self.kinds[seq] = "d" if decodes else "p"

    def _make_room(self, seq: Sequence, n: int, plan: Plan) -> bool:
        before = len(plan.preempted)
        has_room = super()._make_room(seq, n, plan)
        self.causes += [(victim, seq) for victim in plan.preempted[before:]]
        return has_room


def run(setting: dict) -> Run:
    """Run all requests of a setting, from the first step to the last."""
    scheduler = _scheduler(setting)
    sequences = _sequences(REQUESTS[setting["requests"]])
    due = list(sequences)
    arrival = {seq: request.arrival for seq, request in sequences.items()}
    first, last = {}, {}
    steps, blocks, computed, found = [], _blocks(scheduler), [], 0
    while due or scheduler.has_unfinished():
        number = len(steps) + 1
        while due and arrival[due[0]] <= number:
            scheduler.add(due.pop(0))
        scheduler.kinds, scheduler.causes = {}, []
        plan = scheduler.schedule()
        scheduler.commit(plan)
        fields = _decisions(scheduler, plan)
        now = _blocks(scheduler)
        changed = {block: held for block, held in now.items() if blocks.get(block) != held}
        blocks = now
        computed.append(plan.num_tokens)
        found += sum(hits for _, hits in _admitted(scheduler, plan))
        for row in plan.sampled:
            first.setdefault(row.seq, number - arrival[row.seq] + 1)
        scheduler.update(plan, [[_token(row.seq)] for row in plan.sampled])
        ended = [row.seq for row in plan.rows if row.seq.finished]
        last |= {seq: number - arrival[seq] + 1 for seq in ended}
        fields[4] = _names(ended)
        fields[6] = "".join(f"{block}{held}" for block, held in changed.items())
        steps.append(";".join(fields))
    means = [round(sum(of.values()) / len(sequences), 1) for of in (first, last)]
    counts = [max(computed), scheduler.num_preemptions, sum(computed), found]
    return Run(steps, [len(steps), *counts, *means])


def settings() -> Iterator[dict]:
    """All combinations of the options; the last option changes fastest."""
    for values in product(*OPTIONS.values()):
        yield dict(zip(OPTIONS, values, strict=True))


def runs_js() -> str:
    """The file that the page loads. Equal runs, of which there are many, are stored once."""
    number: dict[str, int] = {}
    totals, index = [], []
    for setting in settings():
        found = run(setting)
        text = " ".join(found.steps)
        if text not in number:
            number[text] = len(number)
            totals.append(found.totals)
        index.append(number[text])
    data = {
        **{"options": OPTIONS, "defaults": DEFAULTS, "totalNames": TOTALS},
        "requests": {name: [list(one) for one in many] for name, many in REQUESTS.items()},
        **{"index": index, "totals": totals, "runs": list(number)},
    }
    written = json.dumps(data, separators=(",", ":"))
    return f"// Written by runs.py, from runs of the engine's scheduler.\nconst RUNS = {written};\n"


def _scheduler(setting: dict) -> Watched:
    config = EngineConfig(
        "none",
        **{"block_size": setting["block_size"], "max_num_seqs": setting["slots"]},
        max_num_batched_tokens=setting["budget"],
        long_prefill_token_threshold=setting["threshold"],
        scheduling_policy=setting["policy"],
        enable_prefix_caching=setting["prefix_caching"],
        prefix_cache_seed=0,
    ).for_device("cpu")
    return Watched(config, setting["pool"] // setting["block_size"], MAX_MODEL_LEN)


def _sequences(requests: tuple[Request, ...]) -> dict[Sequence, Request]:
    """Sequences of the requests. Prompts have no token in common except their shared prefix."""
    found = {}
    for i, (name, request) in enumerate(zip(NAMES, requests, strict=False)):
        prompt = [99] * request.shared + [i] * (request.prompt - request.shared)
        params = SamplingParams(max_tokens=request.output)
        more = {"arrival": i + 1, "priority": request.priority}
        found[Sequence(name, prompt, params, MAX_MODEL_LEN, **more)] = request
    return found


def _decisions(scheduler: Watched, plan: Plan) -> list[str]:
    """The fields of a step, except for the ended requests and the blocks."""
    return [
        "".join(f"{row.seq.request_id}{scheduler.kinds[row.seq]}{row.n}" for row in plan.rows),
        _names(scheduler.waiting),
        "".join(f"{seq.request_id}{hits}" for seq, hits in _admitted(scheduler, plan)),
        "".join(victim.request_id + cause.request_id for victim, cause in scheduler.causes),
        "",
        _why(scheduler, plan),
        "",
    ]


def _admitted(scheduler: Watched, plan: Plan) -> list[tuple[Sequence, int]]:
    """Admitted sequences with their tokens in the prefix cache: where their first row starts."""
    start = {row.seq: row.start for row in plan.rows}
    return [(seq, start[seq]) for seq in plan.admitted]


def _why(scheduler: Watched, plan: Plan) -> str:
    """Why the head of the queue waits, by the conditions of `Scheduler._admit_waiting`."""
    if not scheduler.waiting:
        return ""
    if plan.preempted:
        return "p"
    if plan.budget <= 0:
        return "b"
    if len(scheduler.running) >= scheduler.max_num_seqs:
        return "s"
    manager, head = scheduler.block_manager, scheduler.waiting[0]
    in_use = {block for seq in scheduler.running for block in seq.block_table}
    shared = sum(block in in_use for block in manager.lookup(head))
    return f"k{manager.blocks_needed(head.num_tokens) - shared}/{manager.num_free_blocks}"


def _blocks(scheduler: Watched) -> dict[int, str]:
    """The owners of each block, and a * if it is in the prefix cache."""
    manager = scheduler.block_manager
    owners = dict.fromkeys(range(1, manager.num_blocks + 1), "")
    for seq in sorted(scheduler.running, key=lambda seq: seq.arrival):
        for block in seq.block_table:
            owners[block] += seq.request_id
    return {
        block: (names or "-") + "*" * manager.prefix_cache.has(block)
        for block, names in owners.items()
    }


def _token(seq: Sequence) -> int:
    """The sampled token: different for each sequence, and never a stop token."""
    return 200 + seq.arrival


def _names(sequences: Iterable[Sequence]) -> str:
    return "".join(seq.request_id for seq in sequences)


if __name__ == "__main__":
    RUNS_FILE.write_text(runs_js(), encoding="utf-8")
