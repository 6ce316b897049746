"""One step ahead: the same tokens as without, whatever happens while two steps are under way.

The device does everything as late as it may (tests/support/late_executor.py). What a request must
yield is known without an engine, so both ways of running are held against that.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import late_executor
import pytest
from counting_executor import byte_tokenizer, make_engine
from late_executor import Corruption, LateExecutor, LatePipeline, expected_tokens, mix, require

from nanoserve.engine.batch import Batch
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.executor import ForwardInputs
from nanoserve.engine.extension import Extension
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.kv_groups import SequenceRoom, group_layers
from nanoserve.engine.plan import Plan
from nanoserve.engine.request import Request
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.features.kv_transfer.host_places import HostPlaces
from nanoserve.features.kv_transfer.host_tier import HostTier
from nanoserve.features.parallel.pipeline_schedule import PipelineSchedule
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams

LETTERS = [97, 98, 99]  # ids of the byte tokenizer: a, b, c
TOKENIZER = byte_tokenizer()  # one for all runs


class Failure(RuntimeError):
    """The device has broken down in a step."""


@dataclass
class Asked:
    """One request of a run, and what has come of it."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int
    seed: int
    final: RequestOutput | None = None
    aborted: bool = False
    texts: dict[int, str] = field(default_factory=dict)  # of its deltas, by completion
    token_ids: dict[int, list[int]] = field(default_factory=dict)


class AheadRun:
    """A random engine, random requests, and random misfortunes between and inside its steps."""

    def __init__(
        self, seed: int, ahead: bool, num_stages: int = 1, num_places: int | None = None
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.vocab = LETTERS[: rng.randint(1, 3)]
        block_size, max_num_seqs = rng.randint(1, 4), rng.randint(1, 5)
        self.max_model_len = rng.randint(3, 24)
        eos = frozenset({97}) if rng.random() < 0.3 else frozenset()
        self.by_priority = rng.random() < 0.3
        num_spare_blocks = rng.choice([0, 0, 1, 3, 20])
        max_num_batched_tokens = max_num_seqs + rng.choice([0, 1, 3, 10, 40])
        layers = self._choose_windows(random.Random(f"windows {seed}"))
        windows = [group.window for group in group_layers(layers)]
        room = SequenceRoom(windows, block_size, max_num_batched_tokens)
        self.engine: GuardedEngine = make_engine(
            TOKENIZER,
            num_kv_blocks=room.num_blocks(self.max_model_len) + num_spare_blocks,
            eos=eos,
            sliding_windows=layers,
            async_scheduling=ahead,
            pipeline_parallel_size=num_stages,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=rng.choice([0, 0, 1, 3]),
            scheduling_policy="priority" if self.by_priority else "fcfs",
            block_size=block_size,
            enable_prefix_caching=rng.random() < 0.9,
        )
        self.failure_rate = rng.choice([0, 0, 0.02, 0.1])
        self.abort_rate = rng.choice([0, 0, 0.02])
        kind = LateExecutor if num_stages == 1 else LatePipeline
        executor = kind(
            self.engine.config,
            self.engine.executor.num_kv_blocks,
            self.vocab,
            self._on_call,
            self.engine.scheduler.block_manager.windows,
        )
        if num_stages > 1:
            self.engine.add_extension(PipelineSchedule(self.engine))
        self.tier = None
        if num_places is not None:
            manager = self.engine.scheduler.block_manager
            self.tier = HostTier(manager, HostPlaces(manager.prefix_cache, num_places))
            self.engine.add_extension(self.tier)
        executor.max_model_len = self.max_model_len
        self.executor = executor
        self.engine.replace_executor(executor)
        self.engine.output_processor.collectors["prompt_logprobs"] = self._collect
        self.asked = [self._ask(index) for index in range(rng.randint(1, 8))]
        self.by_id = {asked.request_id: asked for asked in self.asked}
        self.of_prompts: dict[str, list[int]] = {}
        self.most_in_flight = self.num_failures = 0

    def _choose_windows(self, rng: random.Random) -> list[int | None]:
        """Choose the windows of layers; every other run has full attention only."""
        if rng.random() < 0.5:
            return [None]
        # The late device reads prefixes from the first group, which is that of the widest window.
        layers = [rng.choice([None, 2, 5, 9]), *rng.choices(range(1, 10), k=rng.randint(0, 2))]
        return [None if w is None or w >= self.max_model_len else w for w in layers]

    def run(self) -> None:
        waiting = list(self.asked)
        for _ in range(4000):
            while waiting and self.rng.random() < 0.5:
                self._add(waiting.pop(0))
            if not waiting and not self.engine.has_unfinished_requests():
                break
            if self.rng.random() < self.abort_rate:
                self._abort()
            self._step()
        else:
            raise Corruption("livelock: the run does not end")
        self._check_the_end()

    # ------------------------------------------------------------------ the users

    def _ask(self, index: int) -> Asked:
        rng = self.rng
        length = rng.randint(1, self.max_model_len - 1)
        prompt = [rng.choice(self.vocab) for _ in range(length)]
        n = rng.choice([1, 1, 1, 2, 3])
        params = SamplingParams(
            n=n,
            seed=rng.randrange(3),
            repetition_penalty=1.1,  # so that the sampler is told of earlier tokens
            max_tokens=rng.choice([1, 2, 5, None]),
            stop=rng.choice([None, None, "ab", ["ba", "cc"], "aab"]),
            ignore_eos=rng.random() < 0.2,
            stop_token_ids=rng.choice([None, None, [98]]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
            output_kind=rng.choice(list(RequestOutputKind)),
        )
        priority = rng.randint(0, 2) if self.by_priority else 0
        return Asked(f"r{index}", prompt, params, priority, params.seed)

    def _add(self, asked: Asked) -> None:
        self.engine.add_request(asked.request_id, asked.prompt, asked.params, asked.priority)

    def _abort(self) -> None:
        live = list(self.engine.output_processor.requests)
        if live:
            asked = self.by_id[self.rng.choice(live)]
            asked.aborted = True
            output = self.engine.abort_request(asked.request_id)
            if output is not None:  # inside a step, it comes with the step's outputs
                self._take(output)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Failure as error:
            self.num_failures += 1
            assert set(error.request_ids) <= set(self.by_id)
            assert not self.engine.plans_under_way
            return
        self.most_in_flight = max(self.most_in_flight, len(self.engine.plans_under_way))
        for output in outputs:
            self._take(output)
        self.engine.scheduler.check()

    def _on_call(self, name: str) -> None:
        """Each call of the executor: somebody aborts a request, or the device fails."""
        if self.rng.random() < self.abort_rate:
            self._abort()
        # Without an end, a long prompt in small chunks would never get through.
        if self.num_failures < 30 and self.rng.random() < self.failure_rate:
            raise Failure(name)

    # ------------------------------------------------------------------ what they get

    def _collect(self, request: Request, row: Any, values: list[int], first: int) -> None:
        got = self.of_prompts.setdefault(request.request_id, [])
        del got[row.start :]
        got += values[first : first + row.num_outputs - row.num_sampled]

    def _take(self, output: RequestOutput) -> None:
        asked = self.by_id[output.request_id]
        require(asked.final is None, "a request was handed out after its last output")
        is_delta = asked.params.output_kind is RequestOutputKind.DELTA
        for completion in output.outputs:
            index = completion.index
            if is_delta:
                asked.texts[index] = asked.texts.get(index, "") + completion.text
                asked.token_ids.setdefault(index, []).extend(completion.token_ids)
            else:
                asked.texts[index] = completion.text
                asked.token_ids[index] = list(completion.token_ids)
            if completion.finished:
                self._check_completion(asked, index, completion.finish_reason)
        if output.finished:
            asked.final = output

    def _check_completion(self, asked: Asked, index: int, reason: str) -> None:
        token_ids, text, expected_reason = self._expected(asked, index)
        got = asked.token_ids[index]
        if reason == "abort":
            require(got == token_ids[: len(got)], f"aborted with {got}, not a part of {token_ids}")
            return
        require(got == token_ids, f"{asked.request_id}/{index}: {got} instead of {token_ids}")
        require(asked.texts[index] == text, f"text {asked.texts[index]!r} instead of {text!r}")
        require(reason == expected_reason, f"{reason} instead of {expected_reason}")

    def _expected(self, asked: Asked, index: int) -> tuple[list[int], str, str]:
        """Tokens, text and finish reason, told from the prompt and the parameters alone."""
        params = asked.params
        room = self.max_model_len - len(asked.prompt)
        longest = room if params.max_tokens is None else min(room, params.max_tokens)
        stops = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops |= self.engine.input_processor.eos_token_ids
        tokens: list[int] = []
        for token in expected_tokens(asked.prompt, asked.seed, index, self.vocab, longest):
            if token in stops:
                return tokens, bytes(tokens).decode(), "stop"
            tokens.append(token)
            text = bytes(tokens).decode()
            found = [text.find(stop) for stop in params.stop_strings if stop in text]
            if found:
                return tokens, text[: min(found)], "stop"
        return tokens, bytes(tokens).decode(), "length"

    def _check_the_end(self) -> None:
        scheduler = self.engine.scheduler
        manager = scheduler.block_manager
        require(manager.num_free_blocks == manager.num_blocks, "blocks leaked")
        require(not self.engine.output_processor.requests, "a request was lost")
        require(not self.engine.plans_under_way, "a step was never collected")
        scheduler.check()
        for asked in self.asked:
            require(asked.final is not None, f"{asked.request_id} was never handed out")
            if asked.params.prompt_logprobs is not None and not asked.aborted:
                prefix, expected = 0, []
                for token, following in zip(asked.prompt, asked.prompt[1:], strict=False):
                    prefix = mix(prefix, token)
                    expected.append(mix(prefix, following))
                got = self.of_prompts.get(asked.request_id, [])
                require(got == expected, "outputs of a prompt")


def run_many(
    num_runs: int, ahead: bool, num_stages: int = 1, with_tier: bool = False
) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(num_runs):
        num_places = (1, 2, 5, 20)[seed % 4] if with_tier else None
        run = AheadRun(seed, ahead, num_stages, num_places)
        try:
            run.run()
        except Exception as error:
            pytest.fail(f"seed {seed}, ahead={ahead}, {num_stages} stages: {error!r}")
        seen["overlapped"] += run.most_in_flight > 0
        seen["failed"] += run.num_failures > 0
        seen["preempted"] += run.engine.scheduler.num_preemptions > 0
        seen["hit"] += run.engine.scheduler.num_hit_tokens > 0
        seen["loaded"] += run.tier is not None and run.tier.stats.num_loaded > 0
        seen["aborted"] += any(asked.aborted for asked in run.asked)
        seen["windows"] += run.engine.scheduler.block_manager.has_windows
    return seen


HARD = ("failed", "preempted", "hit", "aborted", "windows")


@pytest.mark.parametrize("ahead", [True, False], ids=["one step ahead", "no step ahead"])
def test_every_request_gets_its_tokens(fuzz_runs: int, ahead: bool) -> None:
    # Without a step ahead nothing can come too late: fewer runs show the same.
    num_runs = fuzz_runs // (3 if ahead else 8)
    seen = run_many(num_runs, ahead)
    assert (seen["overlapped"] > 0.5 * num_runs) == ahead
    # The runs must be hard enough to mean something.
    assert min(seen[what] for what in HARD) > 0.1 * num_runs


@pytest.mark.small(num_stages=[3])
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_every_request_gets_its_tokens_from_a_pipeline(fuzz_runs: int, num_stages: int) -> None:
    """Several steps are under way, of which the first stage has computed more than the last."""
    num_runs = max(40, fuzz_runs // 12)
    seen = run_many(num_runs, False, num_stages)
    assert seen["overlapped"] > 0.5 * num_runs
    assert min(seen[what] for what in HARD) > 0.1 * num_runs


@pytest.mark.small(num_stages=[1])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_every_request_gets_its_tokens_with_a_host_tier(fuzz_runs: int, num_stages: int) -> None:
    num_runs = max(40, fuzz_runs // 6)
    seen = run_many(num_runs, num_stages == 1, num_stages, with_tier=True)
    assert min(seen[what] for what in HARD) > 0.1 * num_runs
    assert seen["loaded"] > 0.02 * num_runs


def readmitted_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is preempted may run again before a step under way has given it its token."""
    monkeypatch.setattr(PipelineSchedule, "on_release", Extension.on_release)


def in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is not left out of a step because its token is pending."""

    def limit_tokens(self: PipelineSchedule, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        return num_tokens

    monkeypatch.setattr(PipelineSchedule, "limit_tokens", limit_tokens)


def settings_at_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot's settings change while a step of its last owner is under way."""
    forward = LatePipeline.forward

    def early(self: LatePipeline, batch: Batch, inputs: ForwardInputs) -> Any:
        handle = forward(self, batch, ForwardInputs())
        for change in inputs.slot_updates:
            self.states[change.slot] = late_executor.State(change, list(change.output_token_ids))
        return handle

    monkeypatch.setattr(LatePipeline, "forward", early)


def search(known: int, num_seeds: int, full_size: bool) -> list[int]:
    """Return the seeds to try: all of them in turn, but at small size one that is known first."""
    return [*([] if full_size else [known]), *range(num_seeds)]


# Each with the first seed whose run shows it.
@pytest.mark.parametrize(
    ("plant", "known"), [(readmitted_too_early, 282), (in_two_steps, 2), (settings_at_launch, 35)]
)
def test_bugs_planted_into_a_pipeline_are_seen(
    plant: Any, known: int, full_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((Corruption, IndexError, ValueError, AssertionError, RuntimeError)):
        for seed in search(known, 3000, full_size):
            AheadRun(seed, False, 2 + seed % 4).run()


# ---------------------------------------------------------------- planted bugs


def pending_token_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is offered before its last token is known, as if that were an `a`."""
    original = BlockManager.cache

    def cache(self: BlockManager, seq: Sequence, num_tokens: int) -> list[int]:
        missing = num_tokens - len(seq.token_ids)
        seq.token_ids += [97] * missing
        published = original(self, seq, num_tokens)
        if missing > 0:
            del seq.token_ids[-missing:]
        return published

    monkeypatch.setattr(BlockManager, "cache", cache)


def state_learns_its_token_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time a token is there, its slot may have gone to another sequence."""
    monkeypatch.setattr(LateExecutor, "records_by_slot", True)


def pending_token_read_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateExecutor, "reads_pending_by_row", True)


def slot_freed_when_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What will end by length gives its slot away while its last step is still to be planned."""
    original = Scheduler._schedule_running

    def schedule_running(self: Scheduler, plan: Any) -> None:
        original(self, plan)
        for row in plan.rows:
            if row.num_sampled and row.seq.num_tokens + 1 >= row.seq.max_num_tokens:
                self._slots._free.append(row.seq.slot)

    monkeypatch.setattr(Scheduler, "_schedule_running", schedule_running)


def blocks_freed_before_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What will end by length gives its blocks back when its last step is planned."""
    original = Scheduler._schedule_running

    def schedule_running(self: Scheduler, plan: Any) -> None:
        original(self, plan)
        for row in plan.rows:
            if row.num_sampled and row.seq.num_tokens + 1 >= row.seq.max_num_tokens:
                self.block_manager.free(row.seq)

    monkeypatch.setattr(Scheduler, "_schedule_running", schedule_running)


def stale_row_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of a sequence that has ended a step ago counts like any other."""
    original = Scheduler.update

    def update(self: Scheduler, plan: Any, token_ids: list[list[int]]) -> list[int]:
        ended = [row.seq for row in plan.sampled if row.seq.finished]
        for seq in ended:
            seq.status, seq.finish_reason = SequenceStatus.HELD, None
        joined = original(self, plan, token_ids)
        for seq in ended:
            seq.status = SequenceStatus.FINISHED
        return joined

    monkeypatch.setattr(Scheduler, "update", update)


def progress_counts_only_at_update(monkeypatch: pytest.MonkeyPatch) -> None:
    original, late = Scheduler.commit, Scheduler.update
    monkeypatch.setattr(Scheduler, "commit", lambda self, plan: None)

    def update(self: Scheduler, plan: Any, token_ids: list[list[int]]) -> list[int]:
        original(self, plan)
        return late(self, plan, token_ids)

    monkeypatch.setattr(Scheduler, "update", update)


def batch_reused_one_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_batch(self: LateExecutor) -> Batch:
        batch = self.batches[0]
        batch.memory[:] = 0xAA
        batch.step, self.num_batches = self.num_batches, self.num_batches + 1
        return batch

    monkeypatch.setattr(LateExecutor, "next_batch", next_batch)


def released_one_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pending token counts as computed, so the step ahead lacks the first token that it sees."""
    original = BlockManager._release_behind_windows

    def release(self: BlockManager, seq: Sequence) -> None:
        seq.num_computed_tokens += seq.num_pending
        original(self, seq)
        seq.num_computed_tokens -= seq.num_pending

    monkeypatch.setattr(BlockManager, "_release_behind_windows", release)


def released_before_the_step_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind the window after a step goes to others in that step, which write first."""
    original = Scheduler._plan_row

    def plan_row(self: Scheduler, seq: Sequence, plan: Plan) -> None:
        num_rows = len(plan.rows)
        original(self, seq, plan)
        for row in plan.rows[num_rows:]:
            seq.num_computed_tokens = row.start + row.n
            self.block_manager._release_behind_windows(seq)
            seq.num_computed_tokens = row.start

    monkeypatch.setattr(Scheduler, "_plan_row", plan_row)


def packed_by_the_table_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Batch.pack

    def pack(self: Batch, plan: Plan, block_tables: Any, block_size: int) -> None:
        original(self, plan, block_tables[::-1], block_size)

    monkeypatch.setattr(Batch, "pack", pack)


# With the first seed whose run shows each.
PLANTED_BUGS = {
    pending_token_published: 131,
    state_learns_its_token_by_slot: 6,
    pending_token_read_by_row: 3,
    slot_freed_when_planned: 3,
    blocks_freed_before_update: 3,
    stale_row_delivered: 0,
    progress_counts_only_at_update: 5,
    batch_reused_one_step_early: 0,
    released_one_token_early: 6,
    released_before_the_step_has_read: 3,
    packed_by_the_table_of_another_group: 17,
}


@pytest.mark.parametrize("plant", PLANTED_BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(
    plant: Any, full_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the invariants, which would see some of these before the device does."""
    plant(monkeypatch)
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    for seed in search(PLANTED_BUGS[plant], 1000, full_size):
        try:
            AheadRun(seed, ahead=True).run()
        except (Corruption, LookupError, ValueError, AssertionError, AttributeError):
            return
    pytest.fail("1000 runs with a planted bug, and none was caught")


def test_the_device_sees_what_a_planted_bug_does() -> None:
    """`expected_tokens` and the device agree, and disagree as soon as a prefix differs."""
    tokens = expected_tokens([97, 98], 1, 0, LETTERS, 20)
    assert tokens == expected_tokens([97, 98], 1, 0, LETTERS, 20)
    assert tokens != expected_tokens([98, 98], 1, 0, LETTERS, 20)
    assert late_executor.POISON not in LETTERS
