"""The front door: generate, chat, Ctrl-C, two engines, and what is left afterwards."""

import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from tiny_checkpoints import make_qwen3

import nanoserve
from nanoserve import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(params=[False, True], ids=["one step at a time", "one step ahead"])
def llm(request: pytest.FixtureRequest, checkpoint: Path):
    options = {"skip_tokenizer_init": True, "num_kv_blocks": 100}
    with LLM(checkpoint, async_scheduling=request.param, **options) as llm:
        yield llm


def is_idle(llm: LLM) -> bool:
    llm.engine.scheduler.check()
    manager = llm.engine.scheduler.block_manager
    return not llm.engine.has_unfinished_requests() and manager.num_free_blocks == 100


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[3] * n for n in (50, 1, 200, 7)]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 2, 1, 30)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(ids) for ids in tokens(outputs)] == [9, 2, 1, 30]
    assert is_idle(llm)


def test_the_forms_of_a_prompt(llm: LLM) -> None:
    expected = tokens(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False))
    for prompts in ([5, 6, 7], {"prompt_token_ids": [5, 6, 7]}, [{"prompt_token_ids": (5, 6, 7)}]):
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_the_progress_bar_counts_tokens(llm: LLM, capsys: pytest.CaptureFixture) -> None:
    llm.generate([[1], [2]], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "tok/s" in shown
    llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("num_tokens", [100, 3])  # with 3, it strikes as a request ends
def test_ctrl_c_leaves_nothing_behind(llm: LLM, num_tokens: int) -> None:
    expected = tokens(llm.generate([[9] * 20], GREEDY, use_tqdm=False))
    steps = []

    def interrupt(*args: object) -> None:
        steps.append(args)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    llm.engine.observers.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (num_tokens, 100)]
        llm.generate([[9] * 20, [8] * 70], params, use_tqdm=False)
    assert len(steps) == 3
    llm.engine.observers.clear()
    assert is_idle(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens(llm.generate([[9] * 20], GREEDY, use_tqdm=False)) == expected


@pytest.mark.size("full")  # a process that imports all that an engine needs
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has none")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_that_uses_the_engine_is_told_so_instead_of_waiting_for_ever(
    checkpoint: Path,
) -> None:
    """In a process of its own: one that has run other tests may be too large to be doubled."""
    code = f"""
import os, signal
from nanoserve import LLM, SamplingParams
llm = LLM({str(checkpoint)!r}, skip_tokenizer_init=True, num_kv_blocks=16)
ask = lambda: llm.generate([[9] * 20], SamplingParams(temperature=0), use_tqdm=False)
expected = ask()[0].outputs[0].token_ids
child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        ask()
    except RuntimeError as error:
        told = "belongs to another process" in str(error)
        os._exit(0 if told and not llm.engine.has_unfinished_requests() else 2)
    os._exit(1)
print(os.waitpid(child, 0)[1], ask()[0].outputs[0].token_ids == expected)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["0", "True"]


def test_a_failing_step_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm.generate([[9] * 20], GREEDY, use_tqdm=False))
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.executor.device, "run", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[9] * 40, [7]], GREEDY, use_tqdm=False)
    assert is_idle(llm)
    assert tokens(llm.generate([[9] * 20], GREEDY, use_tqdm=False)) == expected


def test_two_engines_live_in_one_process(checkpoint: Path, tmp_path: Path) -> None:
    make_qwen3(tmp_path, seed=1, num_key_value_heads=1)
    first = LLM(checkpoint, skip_tokenizer_init=True, block_size=4)
    second = LLM(tmp_path, skip_tokenizer_init=True, block_size=32)
    a, b = (llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False) for llm in (first, second))
    second.close()
    assert tokens(first.generate([[1, 2, 3]], GREEDY, use_tqdm=False)) == tokens(a) != tokens(b)
    first.close()


@pytest.mark.parametrize("how", ["with", "close", "garbage collection"])
def test_the_weights_are_released(checkpoint: Path, how: str) -> None:
    llm = LLM(checkpoint, skip_tokenizer_init=True)
    llm.generate([[1]], GREEDY, use_tqdm=False)
    model = weakref.ref(llm.engine.executor.model)
    if how == "with":
        with llm:
            pass
    elif how == "close":
        llm.close()
        llm.close()
    else:
        del llm
    gc.collect()
    assert model() is None


def test_the_packages_names_are_resolved_lazily() -> None:
    assert {"LLM", "SamplingParams", "RequestOutput"} <= set(dir(nanoserve))
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        nanoserve.LLMs  # noqa: B018
