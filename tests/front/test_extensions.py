"""What it takes to change an engine from outside: a policy, an extension, a few lines each.

Everything here uses what a reader may use: `scheduler_cls`, `add_extension` and public methods. Two
more of that kind are a stage of the sampler (`tests/sampling/test_own_stage.py`) and an executor
(`test_seams.py`).
"""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.engine.draft_room import add_draft_tokens
from nanoserve.engine.executor import StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence

PROMPTS = [list(range(5, 5 + length)) for length in (40, 9, 25, 3, 17, 30, 12, 6)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SMALL = {"skip_tokenizer_init": True, "max_num_seqs": 2, "block_size": 4, "num_kv_blocks": 64}


def answers(llm: LLM, params: SamplingParams | list[SamplingParams] = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    with LLM(checkpoint, **SMALL) as llm:
        return answers(llm)


# ---------------------------------------------------------------------- (a) a policy


class ShortestFirst(Scheduler):
    """Admits the shortest prompt first, and preempts the longest."""

    def order(self, seq: Sequence) -> tuple[int, ...]:
        return (seq.num_prompt_tokens, seq.arrival)


class AdmissionOrder(Extension):
    def __init__(self) -> None:
        self.lengths: list[int] = []

    def extend_plan(self, plan: Plan) -> None:
        self.lengths += [seq.num_prompt_tokens for seq in plan.admitted]


SHORTEST = sorted(map(len, PROMPTS))


@pytest.mark.parametrize("scheduler_cls", [ShortestFirst, f"{__name__}.ShortestFirst"])
def test_a_scheduler_of_ones_own(checkpoint: Path, expected, scheduler_cls) -> None:
    with LLM(checkpoint, scheduler_cls=scheduler_cls, **SMALL) as llm:
        admitted = AdmissionOrder()
        llm.engine.add_extension(admitted)
        assert answers(llm) == expected
        assert admitted.lengths == SHORTEST


@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "one step ahead"])
def test_it_stays_in_force_whatever_is_added(is_async: bool) -> None:
    """Draft tokens from the start; a grammar comes when the engine has run."""
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    guided = SamplingParams(
        temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="[a-f ]{20}")
    )
    params = [guided if len(prompt) % 2 else GREEDY for prompt in PROMPTS]
    options = SMALL | {"skip_tokenizer_init": False, "dtype": "float32"}
    with LLM("tiny-qwen3", **options) as plain:
        greedy, mixed = answers(plain), answers(plain, params)
    options |= {"speculative_config": drafts, "async_scheduling": is_async}
    with LLM("tiny-qwen3", scheduler_cls=ShortestFirst, **options) as llm:
        scheduler = llm.engine.scheduler
        assert answers(llm) == greedy
        admitted = AdmissionOrder()
        llm.engine.add_extension(admitted)
        assert answers(llm, params) == mixed
        assert type(scheduler) is ShortestFirst and llm.engine.scheduler is scheduler
        # A grammar may have kept one that is guided from being the first.
        lengths = [n for n in admitted.lengths if n % 2 == 0]
        assert lengths == sorted(lengths) and sorted(admitted.lengths) == SHORTEST
        assert llm.stats.num_draft_tokens > 0


def test_what_is_no_scheduler_is_refused(checkpoint: Path) -> None:
    for scheduler_cls in (dict, "no.such.Scheduler", "Scheduler", "nanoserve.llm.LLM", 3):
        with pytest.raises(ValueError, match="scheduler_cls="):
            LLM(checkpoint, scheduler_cls=scheduler_cls, **SMALL)


# ---------------------------------------------------------------------- (b) hold until a callback


class Gate(Extension):
    """Holds requests until another thread lets them pass, as an adapter's download would."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held: list[Sequence] = []
        self._is_open = threading.Event()

    def open(self) -> None:
        self._is_open.set()

    def on_add(self, seq: Sequence) -> str | None:
        if self._is_open.is_set() or seq.num_prompt_tokens < 10:
            return None
        self._held.append(seq)
        return "the gate is closed"

    def on_step_start(self) -> None:
        if self._is_open.is_set():
            self._scheduler.release(self._held, "the gate is closed")
            self._held.clear()


def test_requests_are_held_until_a_callback(checkpoint: Path, expected) -> None:
    with LLM(checkpoint, **SMALL) as llm:
        gate = Gate(llm.engine.scheduler)
        llm.engine.add_extension(gate)
        for index, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(index), prompt, GREEDY)
        early = {output.request_id for _ in range(100) for output in llm.engine.step()}
        assert early == {"1", "3", "7"}  # the short ones; none waits behind what is held
        assert llm.engine.abort_request("0").outputs[0].finish_reason == "abort"
        threading.Timer(0.05, gate.open).start()
        late = {output.request_id: output for output in _rest(llm)}
        assert late.keys() == {"2", "4", "5", "6"}
        assert all(late[i].outputs[0].token_ids == expected[int(i)] for i in late)


def _rest(llm: LLM) -> Iterator:
    while llm.engine.has_unfinished_requests():
        yield from llm.engine.step()


# ---------------------------------------------------------------------- (c) draft tokens


class FixedDrafts(Extension):
    """Expects that every sequence goes on as a list says."""

    def __init__(self, scheduler: Scheduler, texts: list[list[int]]) -> None:
        self._scheduler, self._texts = scheduler, texts

    def extend_plan(self, plan: Plan) -> None:
        for index, row in enumerate(plan.rows):
            for text in self._texts:
                if text[: row.seq.num_prompt_tokens] == row.seq.prompt_token_ids:
                    rest = text[len(row.seq.token_ids) :]
                    add_draft_tokens(self._scheduler, plan, index, rest[:5])


@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "one step ahead"])
def test_draft_tokens_from_a_list(checkpoint: Path, expected, is_async: bool) -> None:
    texts = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    texts[2] = [*texts[2][:30], 1, 2, 3, 4, 5, 6]  # which does not come
    with LLM(checkpoint, **SMALL, async_scheduling=is_async) as llm:
        llm.engine.add_extension(FixedDrafts(llm.engine.scheduler, texts))
        assert answers(llm) == expected
        stats = llm.stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos)
        if not is_async:
            assert stats.num_steps < 2 * len(PROMPTS) * 24 / 2 / 2  # a step yields several


# ---------------------------------------------------------------------- (d) tokens per tenant


class TenantLimit(Extension):
    """Gives each tenant at most so many tokens of a step: a long prompt is cut into chunks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.largest = 0

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        return min(num_tokens, self._most - self._used(plan)[seq.cache_key])

    def may_admit(self, seq: Sequence, plan: Plan) -> bool:
        return self._used(plan)[seq.cache_key] < self._most

    def on_result(self, plan: Plan, result: StepResult) -> None:
        self.largest = max([self.largest, *self._used(plan).values()])

    def _used(self, plan: Plan) -> Counter:
        used: Counter = Counter()
        for row in plan.rows:
            used[row.seq.cache_key] += row.n
        return used


def test_a_limit_of_tokens_per_tenant(checkpoint: Path, expected) -> None:
    with LLM(checkpoint, **SMALL | {"max_num_seqs": 8}) as llm:
        limit = TenantLimit(7)
        llm.engine.add_extension(limit)
        prompts = [
            {"prompt_token_ids": prompt, "cache_salt": f"tenant {index % 2}"}
            for index, prompt in enumerate(PROMPTS)
        ]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert limit.largest == 7


class Greedy(Extension):
    """Asks for more than there is, and for less than nothing."""

    def token_budget(self, num_tokens: int) -> int:
        return 10 * num_tokens

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        return -1 if plan.rows and seq.num_tokens % 3 == 0 else 10 * num_tokens


def test_an_extension_can_only_lower_a_limit(checkpoint: Path, expected) -> None:
    with LLM(checkpoint, **SMALL, max_num_batched_tokens=16) as llm:
        llm.engine.add_extension(Greedy())
        largest = 0

        def watch(plan: Plan, *step: object) -> None:
            nonlocal largest
            largest = max(largest, plan.num_tokens)

        llm.engine.observers.append(watch)
        assert answers(llm) == expected
        assert largest == 16


def test_the_loop_runs_without_its_guard(checkpoint: Path, expected) -> None:
    with LLM(checkpoint, **SMALL) as llm:
        loop, process = llm.engine.loop, llm.engine.input_processor.process
        for index, prompt in enumerate(PROMPTS):
            loop.add(process(str(index), prompt, GREEDY))
        found = {}
        while loop.scheduler.has_unfinished():
            found |= {int(o.request_id): o.outputs[0].token_ids for o in loop.step()}
    assert [found[index] for index in range(len(PROMPTS))] == expected


# ---------------------------------------------------------------------- (f) hidden states


class LastHidden(Extension):
    """Keeps the hidden state of each prompt's last token, which an embedding would be made of."""

    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor] = {}

    def on_result(self, plan: Plan, result: StepResult) -> None:
        for row, place in zip(plan.sampled, result.hidden_rows, strict=True):
            if row.start + row.n == row.seq.num_prompt_tokens:
                self.states[row.seq.request_id] = result.hidden[place].clone()


def test_the_hidden_state_of_a_prompts_last_token(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    with LLM(checkpoint, **SMALL, dtype="float32", max_num_batched_tokens=16) as llm:
        hidden = LastHidden()
        llm.engine.add_extension(hidden)
        for index, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(index), prompt, SamplingParams(max_tokens=2))
        assert {output.request_id for output in _rest(llm)} == hidden.states.keys()
    for index, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            state = reference(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close(hidden.states[str(index)], state, rtol=1e-3, atol=1e-4)
