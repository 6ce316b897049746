"""Show that two versions of the engine give the same answers, or where they do not.

    python benchmarks/same_answers.py OLD NEW                 two source trees, all configurations
    python benchmarks/same_answers.py OLD NEW --part 2/4      every fourth one, from the second on
    python benchmarks/same_answers.py OLD NEW --only "async"  those with this in their name
    python benchmarks/same_answers.py OLD NEW --seed 7        other requests

`git worktree add /tmp/old COMMIT` makes a tree of an earlier commit. Both run side by side, each in
processes of its own with the tree as PYTHONPATH; `same_answers_scenario.py` makes the requests,
`same_answers_run.py` runs them on the bundled model in float32, with one thread.

Compared are token ids, texts (of streams, the pieces put together), finish and stop reasons,
errors with their messages, cached tokens of requests that run alone, and log-probabilities, of
prompts and beams, too. Log-probabilities have to be equal to the last bit where the steps do not
depend on time ("exactly" in the table); elsewhere, with grammars that compile in the background or
adaptive speculation, rows are computed beside other ones and may round otherwise: there, and
with `--tolerance` everywhere, they may differ by that much (0.0001). Tokens never may. A request
that is aborted after some tokens may have got more or fewer when steps are others: what both have
got is compared, and the table says how many had another length.

The exit status is 1 if anything differs, if a process died, or if it took too long for one
configuration. Steps, preemptions and cached tokens are shown for both, and how many requests ended
in another step; with `--schedule` that is a difference, too, where steps do not depend on time.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from same_answers_scenario import make_scenario

RUNNER = Path(__file__).with_name("same_answers_run.py")
MOST_DEATHS = 3  # of processes for one tree
DEFAULT_TOLERANCE = 1e-4
EXACT_FIELDS = (
    *("refused", "raised", "accepted", "faults", "prompt", "prompt_token_ids", "error"),
    *("finished", "num_output_tokens", "num_cached_tokens"),
)
COMPLETION_FIELDS = ("token_ids", "text", "finish_reason", "stop_reason")
STATS = {
    "steps": "num_steps",
    "preempted": "num_preemptions",
    "cached": "prefix_cache_hits",
    "accepted": "num_accepted_tokens",
}


class Difference(NamedTuple):
    """One field in which the answers to a request differ."""

    where: str
    field: str
    old: Any
    new: Any


class Comparison:
    """Compares the answers to one configuration."""

    def __init__(
        self, configuration: dict[str, Any], tolerance: float, has_same_steps: bool
    ) -> None:
        self._configuration, self._tolerance = configuration, tolerance
        self._has_same_steps = has_same_steps
        self.differences: list[Difference] = []
        self.num_requests = self.num_tokens = self.num_refused = self.num_other_length = 0
        self.num_other_step = 0
        self.largest = 0.0  # difference of two log-probabilities

    def compare(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        rounds = self._configuration["rounds"]
        for number, made in enumerate(rounds):
            sides = [run["rounds"][number : number + 1] for run in (old, new)]
            old_answers, new_answers = (side[0] if side else [] for side in sides)
            where = f"{self._configuration['name']}, round {number} ({made['kind']})"
            if not len(old_answers) == len(new_answers) == len(made["requests"]):
                found = [answers[:1] for answers in (old_answers, new_answers)]
                self.differences.append(Difference(where, "the round did not end", *found))
                continue
            answered = zip(made["requests"], old_answers, new_answers, strict=True)
            for index, (request, one, other) in enumerate(answered):
                named = f"{where}, request {index}"
                self.num_requests += 1
                self.num_refused += bool(one.get("refused"))
                self._compare_request(named, request, one, other)

    def _compare_request(
        self, where: str, request: dict[str, Any], old: dict[str, Any], new: dict[str, Any]
    ) -> None:
        # Completions beside the one whose error ends a request have got as far as they were.
        is_one_of_several = request.get("params", {}).get("n", 1) > 1
        is_cut = "abort_after" in request or (bool(old.get("error")) and is_one_of_several)
        for name in EXACT_FIELDS:
            if name in ("finished", "num_output_tokens", "prompt", "prompt_token_ids") and is_cut:
                continue
            self._equal(where, name, old.get(name), new.get(name))
        steps = [answer.get("last_step") for answer in (old, new)]
        self.num_other_step += steps[0] != steps[1]
        if self._has_same_steps:
            self._equal(where, "last step", *steps)
        prompts = [answer.get("prompt_logprobs") for answer in (old, new)]
        if None not in prompts or not is_cut:
            self._near(where, "prompt_logprobs", *prompts)
        old_parts, new_parts = old.get("completions", {}), new.get("completions", {})
        if not is_cut:
            self._equal(where, "number of completions", len(old_parts), len(new_parts))
        for index in sorted(old_parts.keys() & new_parts.keys()):
            one, other = old_parts[index], new_parts[index]
            self.num_tokens += len(one["token_ids"])
            named = f"{where}, completion {index}"
            reasons = {one["finish_reason"], other["finish_reason"]}
            if is_cut and reasons & {None, "abort", "error"}:
                self._compare_beginnings(named, one, other)
            else:
                self._compare_completions(named, one, other)

    def _compare_completions(self, where: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        for name in COMPLETION_FIELDS:
            self._equal(where, name, old[name], new[name])
        self._near(where, "logprobs", old["logprobs"], new["logprobs"])
        for name in ("cumulative_logprob", "score"):
            values = [one.get(name) for one in (old, new)]
            as_positions = [None if v is None else [[[0, v]]] for v in values]
            self._near(where, name, *as_positions, factor=1 + len(old["token_ids"]))

    def _compare_beginnings(self, where: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        """Compare what both have got of an answer that was cut short."""
        most = min(len(old["token_ids"]), len(new["token_ids"]))
        self.num_other_length += len(old["token_ids"]) != len(new["token_ids"])
        self._equal(where, "token_ids", old["token_ids"][:most], new["token_ids"][:most])
        # Bytes of a character that is not complete are shown as U+FFFD.
        texts = [one["text"].rstrip("\ufffd") for one in (old, new)]
        shorter = min(map(len, texts))
        self._equal(where, "text", texts[0][:shorter], texts[1][:shorter])
        lists = [one["logprobs"] and one["logprobs"][:most] for one in (old, new)]
        if None not in lists:
            self._near(where, "logprobs", *lists)

    def _equal(self, where: str, field: str, old: Any, new: Any) -> None:
        if old != new:
            self.differences.append(Difference(where, field, old, new))

    def _near(self, where: str, field: str, old: Any, new: Any, factor: int = 1) -> None:
        """Compare lists of positions, each None or a list of [token id, log-probability, ...]."""
        if old == new:
            return
        distance = distance_of(old, new)
        self.largest = max(self.largest, distance)
        if not distance <= self._tolerance * factor:
            self.differences.append(Difference(where, f"{field} (by {distance:.2g})", old, new))


def distance_of(old: Any, new: Any) -> float:
    """Return the largest difference of two log-probabilities; infinity for other tokens.

    Candidates that are as good as equal may change places: only the chosen one, the first of its
    position, has to be the same token.
    """
    if old is None or new is None or len(old) != len(new):
        return float("inf")
    largest = 0.0
    for one, other in zip(old, new, strict=True):
        if one == other:
            continue
        if not one or not other or len(one) != len(other) or one[0][0] != other[0][0]:
            return float("inf")
        largest = max(largest, abs(one[0][1] - other[0][1]))
        values = [sorted(entry[1] for entry in position) for position in (one, other)]
        largest = max(largest, *(abs(a - b) for a, b in zip(*values, strict=True) if a != b), 0.0)
    return largest


def run_tree(tree: Path, scenario: list[dict[str, Any]], limit: float) -> dict[str, Any]:
    """Return answers by configuration; of one that killed its process, what is known of that."""
    answers: dict[str, Any] = {}
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    num_deaths = 0
    with tempfile.TemporaryDirectory() as folder:
        requested, answered, log = (Path(folder, name) for name in ("requested", "answered", "log"))
        while len(answers) < len(scenario) and num_deaths < MOST_DEATHS:
            waiting = [one for one in scenario if one["name"] not in answers]
            requested.write_text(json.dumps(waiting))
            answered.write_text("")
            command = [sys.executable, str(RUNNER), str(requested), str(answered), str(tree)]
            with log.open("w") as output:
                process = subprocess.Popen(
                    command, env=environment, cwd=folder, stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
                fate = wait_for(process, answered, limit)
            for line in answered.read_text().splitlines():
                answer = json.loads(line)
                answers[answer["name"]] = answer
            first = next((one["name"] for one in waiting if one["name"] not in answers), None)
            if first is not None:
                num_deaths += 1
                reason = f"{fate}; its last lines: {log.read_text()[-600:]}"
                answers[first] = {"rounds": [], "stats": {}, "seconds": 0.0, "died": reason}
    return answers


def wait_for(process: subprocess.Popen, answered: Path, limit: float) -> str:
    """Wait for the end of a process, and kill it if no answer comes for `limit` seconds."""
    size, since = 0, time.monotonic()
    try:
        while process.poll() is None:
            if answered.stat().st_size != size:
                size, since = answered.stat().st_size, time.monotonic()
            if time.monotonic() - since > limit:
                return f"took more than {limit:g} seconds"
            time.sleep(0.1)
        return f"the process ended with status {process.returncode}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # and the ranks that it has started
            process.wait()


def parse_args() -> Namespace:
    parser = ArgumentParser(description="Compare the answers of two versions of the engine.")
    add = parser.add_argument
    add("old", type=Path, help="a source tree")
    add("new", type=Path, help="another one")
    add("--seed", type=int, default=1, help="of the requests (%(default)s)")
    add("--scale", type=float, default=1.0, help="multiplies the number of requests (%(default)s)")
    add("--part", default="1/1", metavar="I/N", help="every Nth configuration from the Ith on")
    add("--only", default="", metavar="TEXT", help="configurations with this in their names")
    add("--tolerance", type=float, help="of log-probabilities, also where they should be equal")
    add("--schedule", action="store_true", help="requests have to end in the same steps, too")
    add("--limit", type=float, default=180, help="seconds for a configuration (%(default)s)")
    add("--show", type=int, default=5, help="differences to show of each (%(default)s)")
    add("--scenario", metavar="FILE", help="write the requests there, as JSON")
    return parser.parse_args()


def show(configuration: dict[str, Any], found: Comparison, runs: list[dict[str, Any]]) -> None:
    """Print the line of one configuration."""
    kind = "exactly" if configuration["is_exact"] else "nearly"
    verdict = f"{len(found.differences)} DIFFERENCES" if found.differences else f"equal ({kind})"
    counted = []
    for word, name in STATS.items():
        old, new = (run["stats"].get(name, 0) for run in runs)
        if old or new:
            counted.append(f"{word} {old}/{new}")
    if found.num_refused:
        counted.append(f"refused {found.num_refused}")
    if found.num_other_length:
        counted.append(f"other length {found.num_other_length}")
    if found.num_other_step:
        counted.append(f"other last step {found.num_other_step}")
    if found.largest:
        counted.append(f"largest difference {found.largest:.1e}")
    seconds = "/".join(f"{run['seconds']:.1f}" for run in runs)
    size = f"{found.num_requests:4} requests {found.num_tokens:6} tokens"
    name = configuration["name"]
    print(f"{name:26} {size}  {verdict:17} {', '.join(counted)}; {seconds} s", flush=True)


def main() -> None:
    args = parse_args()
    first, step = (int(number) for number in args.part.split("/"))
    scenario = make_scenario(args.seed, args.scale)[first - 1 :: step]
    scenario = [one for one in scenario if args.only in one["name"]]
    if args.scenario:
        Path(args.scenario).write_text(json.dumps(scenario))
    trees = [tree.resolve() for tree in (args.old, args.new)]
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(run_tree, tree, scenario, args.limit) for tree in trees]
        runs = [task.result() for task in tasks]
    totals: Counter[str] = Counter()
    missing = {"rounds": [], "stats": {}, "seconds": 0.0, "died": "was not run any more"}
    for configuration in scenario:
        pair = [run.get(configuration["name"], missing) for run in runs]
        allowed = 0.0 if configuration["is_exact"] else DEFAULT_TOLERANCE
        has_same_steps = args.schedule and configuration["is_exact"]
        found = Comparison(configuration, args.tolerance or allowed, has_same_steps)
        found.compare(*pair)
        if "died" in pair[0] or "died" in pair[1]:  # in both trees it is a failure, too
            fates = [run.get("died", "ended") for run in pair]
            found.differences.insert(0, Difference(configuration["name"], "process", *fates))
        show(configuration, found, pair)
        for difference in found.differences[: args.show]:
            print(f"    {difference.where}: {difference.field}")
            print(
                f"        old {str(difference.old)[:700]}\n        new {str(difference.new)[:700]}"
            )
        totals["requests"] += found.num_requests
        totals["tokens"] += found.num_tokens
        totals["differences"] += len(found.differences)
    print(", ".join(f"{number:,} {name}" for name, number in totals.items()))
    sys.exit(bool(totals["differences"] or not totals["requests"]))


if __name__ == "__main__":
    main()
