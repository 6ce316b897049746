"""The engine on a GPU that runs nothing before somebody waits for it: see `late_cuda`."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from count_replays import choices, count_replays
from late_cuda import LateCuda, LateEvent
from late_engine import OPTIONS, make_engine
from proposers import Mixed, Oracle, Wrong
from tiny_checkpoints import make_qwen3

import nanoserve.worker.mixed_program as mixed_program
from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.speculative.extension import Speculation
from nanoserve.features.speculative.head_proposer import HeadProposer
from nanoserve.features.speculative.hidden_head import HiddenHead
from nanoserve.text.tokenizer import Tokenizer
from nanoserve.worker.mixed_program import MixedProgram
from nanoserve.worker.model_runner import ModelRunner

COMMON: dict[str, Any] = {"ignore_eos": True}
KINDS = [
    SamplingParams(temperature=0, max_tokens=12, **COMMON),
    SamplingParams(temperature=0.8, seed=7, max_tokens=9, **COMMON),
    SamplingParams(temperature=1.2, seed=5, top_k=20, top_p=0.9, max_tokens=7, **COMMON),
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=1, max_tokens=8, **COMMON),
    SamplingParams(temperature=0.7, seed=1, n=2, prompt_logprobs=1, max_tokens=5, **COMMON),
    SamplingParams(temperature=0, stop_token_ids=[*range(0, 300, 7)], max_tokens=30),
]
ASKED = [
    ([(7 * j + i % 3) % 300 for j in range(1 + 11 * i % 40)], KINDS[i % len(KINDS)])
    for i in range(12)
]


Requests = list[tuple[list[int], SamplingParams]]


def answers(engine: GuardedEngine, asked: Requests) -> list[list[int]]:
    for i, (prompt, params) in enumerate(asked):
        engine.add_request(str(i), prompt, params)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [c.token_ids for i in range(len(asked)) for c in done[str(i)].outputs]


@pytest.fixture(scope="module")
def asked(by_size: Callable[..., Requests]) -> Requests:
    return by_size(ASKED[6:], ASKED)  # one of each kind; too many tokens for the pool


@pytest.fixture(scope="module")
def expected(checkpoint: Path, asked: Requests) -> list[list[int]]:
    with LLM(checkpoint, skip_tokenizer_init=True, device="cpu", **OPTIONS) as llm:
        return answers(llm.engine, asked)


MIXED = {"capture_mixed_steps": True}
ALL = MIXED | {"capture_sampling": True}


@pytest.mark.small(ahead=[True], graphs=[ALL])  # of some steps
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])
@pytest.mark.parametrize(
    "graphs", [{}, {"enforce_eager": True}, {"capture_sampling": True}, MIXED, ALL], ids=str
)
def test_however_late_a_gpu_is_its_tokens_are_those_of_a_cpu(
    checkpoint: Path,
    asked: Requests,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
    graphs: dict[str, bool],
    by_size: Callable[..., set[int]],
) -> None:
    monkeypatch.setattr(mixed_program, "_SMALLEST", 4)  # so that there are several sizes up to 30
    cuda = LateCuda()
    engine = make_engine(checkpoint, cuda, monkeypatch, async_scheduling=ahead, **graphs)
    mixed = [p for p in engine.executor.device.programs if isinstance(p, MixedProgram)]
    assert len(mixed) == ("capture_mixed_steps" in graphs)
    replayed = [count_replays(p.graphs) for p in mixed]
    pending: list[int] = []
    engine.observers.append(
        lambda plan, batch, result, times: pending.append(batch.header.num_pending)
    )
    choosing = "capture_sampling" in graphs
    chosen = count_replays(choices(engine.executor.device)) if choosing else []
    assert answers(engine, asked) == expected
    assert (len(chosen) > len(asked) // 2) is choosing
    for sizes in replayed:  # while prompts wait steps are full, and of few requests most do
        assert set(sizes) >= by_size({4, 30}, {8, 16, 30}) and len(sizes) > 5
    assert any(pending) is ahead and engine.stats.num_preemptions > 0
    # It was late: whole steps lay in the queue, and ahead the most of two.
    num_launched = cuda.num_run + len(cuda.queue)
    assert cuda.longest > (1.5 if ahead else 0.9) * num_launched / engine.stats.num_steps
    engine.close()
    assert not cuda.queue


def reads_ids_too_early(runner: ModelRunner) -> None:
    runner.device.wait = lambda fetched: fetched.token_ids.tolist()


def packs_over_what_is_not_read_yet(runner: ModelRunner) -> None:
    runner.batches[1] = runner.batches[0]
    runner.device.wait_until_read = lambda batch: None


@pytest.mark.parametrize(
    ("plant", "ahead"), [(reads_ids_too_early, False), (packs_over_what_is_not_read_yet, True)]
)
def test_a_planted_fault_comes_out_as_other_tokens(
    checkpoint: Path,
    asked: Requests,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[ModelRunner], None],
    ahead: bool,
) -> None:
    """Or as an error, since most of what is read then is no token at all."""
    engine = make_engine(checkpoint, LateCuda(), monkeypatch, async_scheduling=ahead)
    plant(engine.executor)
    try:
        tokens = answers(engine, asked)
    except (LookupError, OverflowError, RuntimeError, ValueError) as error:
        tokens = repr(error)
    assert tokens != expected


@pytest.mark.small(ahead=[True], graphs=[{}])
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])
@pytest.mark.parametrize("graphs", [{}, {"capture_sampling": True}], ids=str)
def test_however_late_a_gpu_is_its_guided_tokens_are_those_of_a_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
    graphs: dict[str, bool],
    by_size: Callable[..., Any],
) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    make_qwen3(tmp_path, vocab_size=2048, num_hidden_layers=1)
    guides: list[dict[str, Any]] = [
        {"regex": "[a-z]{5}, [0-9]{3}"},
        {"choice": ["block table", "KV cache"]},
        {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
    ]
    kinds = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_k": 9}]
    asked = [
        SamplingParams(
            max_tokens=20,
            structured_outputs=StructuredOutputsParams(**guides[i % 3]),
            **kinds[i // 3],
        )
        for i in by_size([0, 4, 8], range(9))
    ]
    asked[2:2] = [SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)] * 2

    def answers(engine: GuardedEngine) -> list[str]:
        for i, params in enumerate(asked):
            engine.add_request(str(i), [3 + i, 4], params)
        done: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step() if output.finished}
        assert [done[str(i)].error for i in range(len(asked))] == [None] * len(asked)
        return [done[str(i)].outputs[0].text for i in range(len(asked))]

    options = OPTIONS | {"seed": 0}
    with LLM(tmp_path, tokenizer="tiny-qwen3", device="cpu", **options) as llm:
        expected = answers(llm.engine)
    cuda = LateCuda()
    made = make_engine(tmp_path, cuda, monkeypatch, async_scheduling=ahead, **graphs)
    tokenizer = Tokenizer(bundled_checkpoint("tiny-qwen3"))
    engine = GuardedEngine(made.config, made.model_config, made.executor, tokenizer)
    assert answers(engine) == expected
    assert engine.stats.num_draft_tokens == 0  # runs are not forced where nobody has tried it
    engine.close()


@pytest.mark.small(ahead=[True])
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])
@pytest.mark.parametrize("capture_sampling", [False, True], ids=["", "sampling too"])
def test_however_late_a_gpu_is_graphs_of_draft_rows_give_the_tokens_of_a_cpu(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool, capture_sampling: bool
) -> None:
    """What fills their rows up is written where the last step but one was copied from."""
    kinds = KINDS[:2] if capture_sampling else KINDS[:4]
    asked = [(prompt, kinds[i % len(kinds)]) for i, (prompt, _) in enumerate(ASKED[:8])]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    options = {"num_kv_blocks": 60, "speculative_config": drafts | {"enforce_eager": False}}
    options |= {"async_scheduling": ahead, "capture_sampling": capture_sampling}
    with LLM(checkpoint, skip_tokenizer_init=True, device="cpu", **OPTIONS) as reference:
        expected = answers(reference.engine, asked)
        engine = make_engine(checkpoint, LateCuda(), monkeypatch, **options)
        vocab_size = engine.model_config.vocab_size
        proposers = [Oracle(reference), Wrong(vocab_size)]
        mixed = Mixed(random.Random(0), vocab_size, proposers)
        engine.add_extension(Speculation(engine, lambda executor, scheduler: mixed))
        program = engine.executor.device.programs[1 if capture_sampling else -1]
        graphs = program.choices if capture_sampling else program.graphs
        replayed = count_replays(graphs)
        assert answers(engine, asked) == expected
        assert len(replayed) > 5 and engine.stats.num_accepted_tokens > 10
        engine.close()


class CountingHead(HeadProposer):
    """Counts what each proposal brings to the device, and how often it waits for it."""

    def __init__(self, head: HiddenHead, runner: ModelRunner, monkeypatch: Any) -> None:
        super().__init__(head, runner)
        self.copies: list[int] = []
        self.waits: list[int] = []
        self._monkeypatch = monkeypatch

    def propose(self, wanted: Any) -> list[list[int]]:
        copies: list[str] = []
        waits: list[None] = []
        with self._monkeypatch.context() as patch:
            for name in ("from_numpy", "tensor", "as_tensor"):
                make = getattr(torch, name)
                patch.setattr(
                    torch, name, lambda *a, make=make, **k: copies.append("") or make(*a, **k)
                )
            wait = LateEvent.synchronize
            patch.setattr(LateEvent, "synchronize", lambda event: waits.append(None) or wait(event))
            drafts = super().propose(wanted)
        if any(drafts):
            self.copies.append(len(copies))
            self.waits.append(len(waits))
        return drafts


@pytest.mark.small(num_drafts=[3])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_however_late_a_gpu_is_a_heads_draft_tokens_do_not_wait_for_each_other(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """However many there are: the rows travel once, and all draft tokens come back at once."""
    asked = [(prompt, KINDS[i % 3]) for i, (prompt, _) in enumerate(ASKED[:2])]
    drafts = {"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False}
    options = {"num_kv_blocks": 60, "speculative_config": drafts}
    with LLM(checkpoint, skip_tokenizer_init=True, device="cpu", **OPTIONS) as reference:
        expected = answers(reference.engine, asked)
    engine = make_engine(checkpoint, LateCuda(), monkeypatch, async_scheduling=True, **options)
    head = HiddenHead.untrained(engine.model_config.hidden_size, 16)
    proposer = CountingHead(head, engine.executor, monkeypatch)
    engine.add_extension(Speculation(engine, lambda executor, scheduler: proposer))
    assert answers(engine, asked) == expected
    assert set(proposer.copies) == set(proposer.waits) == {1} and len(proposer.waits) > 5
    assert engine.stats.num_draft_tokens > 5 * num_drafts
    engine.close()
