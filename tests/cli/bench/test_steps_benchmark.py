"""benchmarks/steps.py: every step's time is split into parts, and no prompt is computed."""

from argparse import Namespace
from pathlib import Path

import pytest
from steps import fits, load, measure

from nanoserve import LLM, SamplingParams
from nanoserve.cli.bench.step_timer import PARTS, StepTimer

ARGS = Namespace(
    shape="tiny",
    model=None,
    seqs=[1, 5],
    contexts=[64, 96],
    steps=3,
    kv_gib=0.01,
    dtype="float32",
    device="cpu",
    attention_backend="torch",
    kv_cache_dtype="int8",
)


def test_the_parts_add_up_to_the_whole(checkpoint: Path) -> None:
    with LLM(checkpoint, skip_tokenizer_init=True) as llm:
        executes, timer = [], StepTimer(llm.engine)
        llm.engine.observers.append(lambda plan, batch, result, times: executes.append(times))
        llm.generate([[5] * 9, [6]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(timer.steps) == len(executes) == 4
    assert [step.is_decode for step in timer.steps] == [False, True, True, True]
    assert [step.context for step in timer.steps] == [5, 6, 7, 8]
    for step, times in zip(timer.steps, executes, strict=True):
        assert step.model + step.sample == pytest.approx(times.execute)
        assert 0 < step.sample < times.execute
        assert step.total == pytest.approx(
            times.schedule + times.pack + times.execute + times.update + step.between
        )
        assert step.own_share == pytest.approx(1 - step.model / step.total)


def test_points_are_measured_without_computing_their_prompts(tmp_path: Path) -> None:
    llm, timer = load(ARGS, tmp_path)
    model, computed = llm.engine.executor.model, []
    model.register_forward_pre_hook(lambda module, inputs: computed.append(len(inputs[0])))
    point = measure(llm, timer, 5, 64, num_steps=3)
    assert point.num_rows == 5
    assert 64 < point.context < 80
    assert all(getattr(point, part) > 0 for part in PARTS)
    assert set(computed) == {5} and len(computed) <= 8  # decode steps only
    assert not llm.engine.has_unfinished_requests()
    assert fits(llm, 5, 64, 3)
    assert not fits(llm, 5, 512, 3)  # a sequence would be longer than max_model_len
    assert not fits(llm, 300, 64, 3)  # the pool would not hold them
