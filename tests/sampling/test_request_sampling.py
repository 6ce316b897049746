"""Same seed, same tokens; draws with the right probabilities; n completions that share a prompt."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting_executor import make_engine

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import SlotUpdate, StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.outputs import RequestOutput
from nanoserve.sampling.sampler import Sampler

# ---------------------------------------------------------------- same seed, same tokens


def push_up(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits + (torch.arange(len(logits)) % 7 == len(output_token_ids) % 7)


SEEDED: dict[str, Any] = {
    "seed": 7, "temperature": 0.9, "top_p": 0.95, "max_tokens": 20,
    "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2,
    "logit_bias": {3: 2.5, 250: -4.0}, "logits_processors": [push_up],
    "stop_token_ids": [11, 12, 13], "min_tokens": 20,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "chunks of 7, no prefix cache": {
        "long_prefill_token_threshold": 7,
        "enable_prefix_caching": False,
    },
    "one step ahead": {"async_scheduling": True},
    "one step ahead, chunks of 7": {
        "async_scheduling": True,
        "long_prefill_token_threshold": 7,
    },
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The first is the one that is watched; a third of the others begin like it."""
    rng = np.random.default_rng(5)
    watched = rng.integers(300, size=70).tolist()
    others = [rng.integers(300, size=rng.integers(1, 40)).tolist() for _ in range(64)]
    return [watched, *(watched[:40] + o if i % 3 == 0 else o for i, o in enumerate(others))]


def other_params(i: int) -> SamplingParams:
    settings = {"temperature": 0.5 * (i % 2), "max_tokens": 12}
    return SamplingParams(**settings, **({"frequency_penalty": 1.0} if i % 5 == 0 else {}))


def tokens_of(output: RequestOutput) -> list[list[int]]:
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [completion.token_ids for completion in output.outputs]


@pytest.fixture(scope="module", params=[1, 4], ids="n={}".format)
def expected(request: pytest.FixtureRequest, checkpoint: Path, prompts) -> list[list[int]]:
    """What the watched request gives when it is alone."""
    params = SamplingParams(**SEEDED, n=request.param)
    with LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64) as llm:
        (output,) = llm.generate(prompts[0], params, use_tqdm=False)
    assert len(output.outputs) == request.param
    return tokens_of(output)


def test_completions_differ_and_the_first_is_that_of_n_1(checkpoint: Path, prompts) -> None:
    with LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64) as llm:
        params = [SamplingParams(**SEEDED, n=n) for n in (1, 4, 2)]
        one, four, two = map(tokens_of, llm.generate([prompts[0]] * 3, params, use_tqdm=False))
    assert len(set(map(tuple, four))) == 4
    assert four[:1] == one and four[:2] == two
    assert all(len(set(completion)) > 4 for completion in four)


# With others, and each option in one of these.
@pytest.mark.small(
    expected=[4],
    num_others=[64],
    name=["plain", "chunks of 7, no prefix cache", "one step ahead, chunks of 7"],
)
@pytest.mark.parametrize("num_others", [0, 64])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_seeded_request_gives_the_same_tokens(
    name: str, num_others: int, checkpoint: Path, prompts, expected
) -> None:
    watched = SamplingParams(**SEEDED, n=len(expected))
    params = [*(other_params(i) for i in range(num_others)), watched]
    order = [*prompts[1 : 1 + num_others], prompts[0]]
    options = {"num_kv_blocks": 600, **OPTIONS[name]}
    with LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, **options) as llm:
        for _ in range(2):  # the second time, if there is a prefix cache, out of it
            output = llm.generate(order, params, use_tqdm=False)[-1]
            assert tokens_of(output) == expected
        assert (output.metrics.num_cached_prompt_tokens > 0) == ("no prefix" not in name)


@pytest.mark.small(expected=[4], caching=[True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_steps", [3, 14], ids=["in its prompt", "in its output"])
def test_a_seeded_request_that_is_preempted_gives_the_same_tokens(
    num_steps: int, caching: bool, ahead: bool, checkpoint: Path, prompts, expected
) -> None:
    """Others are more urgent, and the pool has not enough for all."""
    options = {
        "num_kv_blocks": 14,
        "max_model_len": 128,
        "scheduling_policy": "priority",
        "long_prefill_token_threshold": 9,
        "enable_prefix_caching": caching,
        "async_scheduling": ahead,
    }
    lost: list[int] = []  # output tokens that the watched request had when it was preempted
    with LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, **options) as llm:
        engine = llm.engine
        engine.observers.append(
            lambda plan, batch, result, times: lost.extend(
                seq.num_output_tokens for seq in plan.preempted if seq.request_id == "watched"
            )
        )
        params = SamplingParams(**SEEDED, n=len(expected))
        engine.add_request("watched", prompts[0], params, priority=9)
        for _ in range(num_steps):
            engine.step()
        for i in range(12):  # one block each, and soon a second
            engine.add_request(str(i), [i] * 14, SamplingParams(max_tokens=30), priority=1)
        finished = run(engine)
    assert lost and (max(lost) > 0 if num_steps > 8 else min(lost) == 0)
    assert finished["watched"].metrics.num_preemptions == len(lost)
    assert tokens_of(finished["watched"]) == expected


@pytest.mark.small(expected=[4])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_seeded_request_survives_a_pool_that_is_too_small(
    ahead: bool, checkpoint: Path, prompts, expected
) -> None:
    """Under FCFS the last one gives way: the watched request has come after the others."""
    options = {"num_kv_blocks": 10, "max_model_len": 96, "async_scheduling": ahead}
    with LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, **options) as llm:
        for i in range(3):
            llm.engine.add_request(str(i), [i] * 14, SamplingParams(max_tokens=40, seed=i))
        llm.engine.add_request("watched", prompts[0], SamplingParams(**SEEDED, n=len(expected)))
        output = run(llm.engine)["watched"]
    assert output.metrics.num_preemptions > 0
    assert tokens_of(output) == expected


# ---------------------------------------------------------------- the right probabilities

PROBABILITIES = np.array([0.26, 0.19, 0.15, 0.12, 0.09, 0.07, 0.05, 0.04, 0.02, 0.01])
NUM_DRAWS = 20_000
# The 0.999 quantile of chi-square, by degrees of freedom.
QUANTILE = dict(enumerate([10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88], 1))
FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 4},
    {"top_k": 2},
    {"top_p": 0.7},
    {"top_p": 0.95},
    {"min_p": 0.3},
    {"min_p": 0.1},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.2, "temperature": 0.7},
    {"top_k": 5, "top_p": 0.95, "min_p": 0.5, "temperature": 1.8},
]


def renormalised(top_k: int = 0, top_p: float = 1, min_p: float = 0, temperature: float = 1):
    """The exact distribution; PROBABILITIES are in falling order."""
    probs = PROBABILITIES ** (1 / temperature)
    probs /= probs.sum()
    probs[probs < min_p * probs[0]] = 0
    probs[top_k or len(probs) :] = 0
    probs /= probs.sum()
    mass_before = np.cumsum(probs) - probs
    probs[mass_before >= top_p] = 0
    return probs / probs.sum()


def assert_drawn_from(drawn: np.ndarray, probs: np.ndarray) -> None:
    counts = np.bincount(drawn, minlength=len(probs))
    possible = probs > 0
    assert counts[~possible].sum() == 0  # nothing outside is ever drawn
    wanted = probs[possible] * len(drawn)
    chi_square = ((counts[possible] - wanted) ** 2 / wanted).sum()
    assert chi_square < QUANTILE[possible.sum() - 1]


@pytest.mark.parametrize("along", ["positions", "seeds"])
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_draws_follow_the_renormalised_distribution(
    settings: dict[str, float], along: str, by_size: Callable[..., int]
) -> None:
    probs, num_draws = renormalised(**settings), by_size(4_000, NUM_DRAWS, 100_000)
    params = SamplingParams(**settings)
    # The tokens in another order, so that a place in the vocabulary is no rank.
    order = np.random.default_rng(0).permutation(len(probs))
    logits = np.log(PROBABILITIES[order]).astype(np.float32) + 3
    rows = torch.from_numpy(logits).repeat(num_draws, 1)
    count, constant = np.arange(num_draws), np.full(num_draws, 9)
    sampler = Sampler(num_draws if along == "seeds" else 1, len(probs), torch.device("cpu"))
    if along == "seeds":
        for seed in range(num_draws):
            sampler.set_slot(SlotUpdate(seed, params, seed))
        drawn = sampler.sample(rows, count, constant).token_ids
    else:
        sampler.set_slot(SlotUpdate(0, params, seed=12345))
        drawn = sampler.sample(rows, 0 * count, count).token_ids
    assert_drawn_from(order[drawn.numpy()], probs)


def test_completions_of_one_seed_are_independent() -> None:
    """Pairs of draws, by completion 0 and 1 of one seed at one position."""
    probs = np.array([0.5, 0.3, 0.2])
    rows = torch.from_numpy(np.log(probs)).float().repeat(NUM_DRAWS, 1)
    sampler = Sampler(2, 3, torch.device("cpu"))
    slots, positions = np.zeros(NUM_DRAWS, dtype=np.int32), np.arange(NUM_DRAWS)
    for index in (0, 1):
        sampler.set_slot(SlotUpdate(index, SamplingParams(), seed=5, completion=index))
    first, second = (
        sampler.sample(rows, slots + index, positions).token_ids.numpy() for index in (0, 1)
    )
    assert_drawn_from(first * 3 + second, np.outer(probs, probs).flatten())


# ---------------------------------------------------------------- one prompt, n completions

BLOCK_SIZE = 16


class Group:
    """A request for n completions, in a scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        num_prompt_tokens: int = 40,
        n: int = 4,
        priority: int = 0,
        arrival: int = 0,
        **settings: Any,
    ) -> None:
        self.scheduler = scheduler
        params = SamplingParams(n=n, **{"max_tokens": 5, **settings})
        prompt = [arrival + i % 50 for i in range(num_prompt_tokens)]
        self.sequences = [
            Sequence(
                f"request {arrival}",
                list(prompt),
                params,
                max_model_len=512,
                arrival=arrival + index,
                index=index,
                priority=priority,
            )
            for index in range(n)
        ]
        self.first, *self.siblings = self.sequences
        self.first.siblings = self.siblings
        scheduler.add(self.first)

    def are(self, status: SequenceStatus) -> bool:
        return all(seq.status is status for seq in self.siblings)

    def check_shared(self) -> None:
        """All that run share the prompt's full blocks, and nothing else: none without a cache."""
        running = [seq for seq in self.sequences if seq.status is SequenceStatus.RUNNING]
        has_cache = self.scheduler.block_manager.enable_prefix_caching
        num_shared = (self.first.num_prompt_tokens - 1) // BLOCK_SIZE if has_cache else 0
        uses = Counter(block for seq in running for block in seq.block_table)
        assert len({tuple(seq.block_table[:num_shared]) for seq in running}) == 1
        shared = {block: count for block, count in uses.items() if count > 1}
        assert shared == dict.fromkeys(running[0].block_table[:num_shared], len(running))


def make_scheduler(caching: bool = True, num_kv_blocks: int = 64, **options: Any) -> Scheduler:
    options = {"max_num_seqs": 8, "enable_prefix_caching": caching, **options}
    config = EngineConfig("none", **options).for_device("cpu")
    return Scheduler(config, num_kv_blocks, max_model_len=512)


def step(scheduler: Scheduler, token_of: dict[Sequence, int] | None = None) -> dict[Sequence, int]:
    """Sequences draw token 100 unless told otherwise; returns what was computed."""
    plan = scheduler.schedule()
    scheduler.commit(plan)
    scheduler.update(plan, [[(token_of or {}).get(row.seq, 100)] for row in plan.sampled])
    scheduler.check()
    return {row.seq: row.n for row in plan.rows}


def finish_all(scheduler: Scheduler) -> None:
    for _ in range(1000):
        if not scheduler.has_unfinished():
            break
        step(scheduler)
    assert not scheduler.has_unfinished()
    assert_nothing_leaked(scheduler)


def assert_nothing_leaked(scheduler: Scheduler) -> None:
    scheduler.check()
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
    assert not scheduler.held


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("num_prompt_tokens", "recomputed"), [(40, 8), (48, 16), (33, 1), (32, 16), (16, 16), (7, 7)]
)
def test_siblings_wait_for_the_prompt_and_recompute_at_most_its_last_block(
    num_prompt_tokens: int, recomputed: int, caching: bool
) -> None:
    """Without a cache, all of it: then nothing is shared."""
    recomputed = recomputed if caching else num_prompt_tokens
    scheduler = make_scheduler(caching, long_prefill_token_threshold=15)
    group = Group(scheduler, num_prompt_tokens)
    num_computed = 0
    while num_computed < num_prompt_tokens:
        assert group.are(SequenceStatus.HELD)
        plan = step(scheduler)
        assert set(plan) == {group.first}
        num_computed += plan[group.first]
    assert group.are(SequenceStatus.WAITING)
    num_used = len(group.first.block_table)
    plan = step(scheduler)
    assert plan[group.first] == 1
    chunk = min(15, recomputed)  # the threshold cuts a whole block in two
    assert [plan[sibling] for sibling in group.siblings] == [chunk] * 3
    group.check_shared()
    num_used += num_prompt_tokens % BLOCK_SIZE == 0  # a block for the first one's new token
    num_used += 3 * -(-recomputed // BLOCK_SIZE)
    manager = scheduler.block_manager
    assert manager.num_blocks - manager.num_free_blocks == num_used
    finish_all(scheduler)
    assert all(seq.output_token_ids == [100] * 5 for seq in group.sequences)


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_share_with_a_first_that_ended_at_its_first_token(caching: bool) -> None:
    scheduler = make_scheduler(caching)
    group = Group(scheduler, stop_token_ids=[9])
    step(scheduler, {group.first: 9})
    assert group.first.finished and group.are(SequenceStatus.WAITING)
    assert scheduler.block_manager.num_free_blocks == 64  # given back, but not forgotten
    assert list(step(scheduler).values()) == [8 if caching else 40] * 3
    group.check_shared()
    finish_all(scheduler)
    assert [len(seq.output_token_ids) for seq in group.sequences] == [0, 5, 5, 5]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("then", ["go on", "abort"])
@pytest.mark.parametrize("in_prompt", [True, False], ids=["in its prompt", "in its output"])
def test_a_first_that_is_preempted_holds_its_siblings_only_if_they_lack_the_prompt(
    in_prompt: bool, then: str, caching: bool
) -> None:
    """A more urgent request grows until it has the whole pool of 12 blocks."""
    scheduler = make_scheduler(
        caching, 12, scheduling_policy="priority", long_prefill_token_threshold=8
    )
    length = 10 if in_prompt else 90
    group = Group(scheduler, 160 if in_prompt else 40, max_tokens=length, priority=9)
    first = group.first
    for _ in range(6):
        step(scheduler)
    assert group.are(SequenceStatus.HELD if in_prompt else SequenceStatus.RUNNING)
    urgent = Group(scheduler, 30, n=1, arrival=100, max_tokens=160)
    while first.status is SequenceStatus.RUNNING:
        step(scheduler)
    assert first.status is SequenceStatus.WAITING and not first.block_table
    assert group.are(SequenceStatus.HELD if in_prompt else SequenceStatus.WAITING)
    if then == "abort":
        for seq in group.sequences:
            scheduler.finish(seq, "abort")
            scheduler.check()
    while in_prompt and then == "go on" and not first.output_token_ids:
        assert group.are(SequenceStatus.HELD)
        step(scheduler)
    finish_all(scheduler)
    assert len(urgent.first.output_token_ids) == 160
    if then == "go on":
        assert [len(seq.output_token_ids) for seq in group.sequences] == [length] * 4


STATES = (
    "waiting", "in its prompt", "undone in its prompt", "siblings wait", "all run",
    "first ended", "first preempted", "siblings preempted", "finished",
)  # fmt: skip


def bring_into(
    scheduler: Scheduler, state: str, prompt_logprobs: int | None
) -> tuple[Group, list[Sequence]]:
    """A group in `state`, and others that are in its way."""
    settings = {"stop_token_ids": [9], "max_tokens": 120, "prompt_logprobs": prompt_logprobs}
    group = Group(scheduler, priority=9, **settings)
    first, others = group.first, []
    if state == "waiting":
        return group, others
    step(scheduler)
    if "in its prompt" in state:
        assert first.num_computed_tokens == 16 and group.are(SequenceStatus.HELD)
        if state == "undone in its prompt":
            scheduler.schedule()
            scheduler.reset(group.sequences)
            assert first.metrics.num_preemptions == 1 and group.are(SequenceStatus.HELD)
        return group, others
    step(scheduler)
    step(scheduler, {first: 9} if state == "first ended" else None)
    assert group.are(SequenceStatus.WAITING) and first.finished == (state == "first ended")
    if state == "siblings wait":
        return group, others
    step(scheduler)
    assert group.are(SequenceStatus.RUNNING)
    if "preempted" in state:
        others = Group(scheduler, 50, n=1, arrival=100, max_tokens=300).sequences
        wanted = [first] if state == "first preempted" else [group.siblings[-1]]
        while any(seq.status is SequenceStatus.RUNNING for seq in wanted):
            step(scheduler)
        assert all(seq.status is SequenceStatus.WAITING for seq in wanted)
    if state == "finished":
        finish_all(scheduler)
    return group, others


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt_logprobs", [None, 2])
@pytest.mark.parametrize("state", STATES)
def test_abort_in_any_state_frees_what_a_group_holds(
    state: str, prompt_logprobs: int | None, caching: bool
) -> None:
    scheduler = make_scheduler(
        caching, 12, scheduling_policy="priority", long_prefill_token_threshold=16
    )
    group, others = bring_into(scheduler, state, prompt_logprobs)
    for seq in [*group.sequences, *others]:
        scheduler.finish(seq, "abort")
        scheduler.check()
    assert not scheduler.has_unfinished()
    assert_nothing_leaked(scheduler)
    assert all(seq.finished for seq in group.sequences)


# ---------------------------------------------------------------- the same, through the engine


def run(engine: GuardedEngine) -> dict[str, RequestOutput]:
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
    return finished


# "ahead" is with a step ahead: `async_scheduling`.


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [True, False])
def test_n_completions_cost_the_prompt_once(caching: bool, ahead: bool) -> None:
    """Without a cache each of them computes its own."""
    engine = make_engine(enable_prefix_caching=caching, async_scheduling=ahead)
    engine.add_request("a", list(range(40)), SamplingParams(n=4, max_tokens=5))
    output = run(engine)["a"]
    assert tokens_of(output) == [[40, 41, 42, 43, 44]] * 4
    assert engine.stats.num_computed_tokens == 40 + 3 * (8 if caching else 40) + 4 * 4
    assert engine.stats.num_output_tokens == output.metrics.num_output_tokens == 20
    assert sorted(change.completion for change in engine.executor.sampling) == [0, 1, 2, 3]
    assert len({change.seed for change in engine.executor.sampling}) == 1
    assert_nothing_leaked(engine.scheduler)


def test_without_prefix_caching_a_request_never_reads_what_another_has_left() -> None:
    """Not even under the id of one that has finished, nor one completion from the other."""
    engine = make_engine(enable_prefix_caching=False)
    for _ in range(2):
        before = engine.stats.num_computed_tokens
        engine.add_request("a", list(range(40)), SamplingParams(n=2, max_tokens=1))
        output = run(engine)["a"]
        assert output.metrics.num_cached_prompt_tokens == 0
        assert engine.stats.num_computed_tokens - before == 40 + 40


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [True, False])
def test_the_first_completion_alone_ends_at_its_first_token(caching: bool, ahead: bool) -> None:
    options = {"enable_prefix_caching": caching, "async_scheduling": ahead}
    engine = make_engine(eos=frozenset({9}), **options)
    collect = engine.executor.collect
    results = [StepResult([[9]])]
    engine.executor.collect = lambda handle: results.pop() if results else collect(handle)
    engine.add_request("a", list(range(100, 140)), SamplingParams(n=3, max_tokens=2))
    output = run(engine)["a"]
    assert tokens_of(output) == [[], [140, 141], [140, 141]]
    reasons = [completion.finish_reason for completion in output.outputs]
    assert reasons == ["stop", "length", "length"]
    # Ahead, the first one's second token was on its way before its first was seen.
    rest = (8 if caching else 40) + 1
    assert engine.stats.num_computed_tokens == 40 + ahead + 2 * rest
    assert_nothing_leaked(engine.scheduler)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_steps", range(7))
def test_a_step_that_raises_costs_a_group_nothing_but_time(
    num_steps: int, caching: bool, ahead: bool
) -> None:
    options = {"enable_prefix_caching": caching, "async_scheduling": ahead}
    engine = make_engine(long_prefill_token_threshold=16, **options)
    engine.add_request("a", list(range(40)), SamplingParams(n=3, max_tokens=5))
    for _ in range(num_steps):
        engine.step()
    engine.executor.fail_next = True
    with pytest.raises(RuntimeError, match="on fire"):
        engine.step()
    engine.scheduler.check()
    output = run(engine)["a"]
    assert tokens_of(output) == [[40, 41, 42, 43, 44]] * 3
    assert output.metrics.num_preemptions == (1 if num_steps < 3 else 3)
    assert_nothing_leaked(engine.scheduler)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_kv_blocks", [8, 64], ids="{} blocks".format)
def test_abort_after_any_number_of_steps_leaves_nothing(
    num_kv_blocks: int, caching: bool, ahead: bool, by_size: Callable[..., int]
) -> None:
    """A pool of 8 blocks preempts siblings on the way, one of 64 does not."""
    options = {"enable_prefix_caching": caching, "async_scheduling": ahead}
    options |= {"long_prefill_token_threshold": 16, "max_model_len": 96}
    for num_steps in range(0, 60, by_size(4, 1)):
        engine = make_engine(num_kv_blocks=num_kv_blocks, **options)
        engine.add_request("a", list(range(40)), SamplingParams(n=4, max_tokens=40))
        engine.add_request("b", [7], SamplingParams(max_tokens=2))
        for _ in range(num_steps):
            engine.step()
        aborted = engine.abort_request("a")
        assert engine.abort_request("a") is None
        run(engine)
        assert_nothing_leaked(engine.scheduler)
        assert not engine.output_processor.requests
        if aborted is not None:
            for tokens in tokens_of(aborted):
                assert tokens == [(40 + i) % 256 for i in range(len(tokens))]
    assert (engine.stats.num_preemptions > 0) == (num_kv_blocks == 8)
