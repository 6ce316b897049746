"""A pipeline with several steps under way: whatever dies or raises, it ends soon, or goes on."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_remains import (
    MARK,
    PATIENCE,
    nothing_is_left_behind,  # noqa: F401
    soon_after_a_step,
    tell_time,
)
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.features.parallel.worker_processes import WorkerError

pytestmark = pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="looks for processes in /proc"
)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ASKED = [[i, 2, 3] for i in range(12)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three_layers")
    make_qwen3(folder, num_hidden_layers=3)
    return folder


def make_llm(path: Path, stages: int = 3, tp: int = 1, **options: Any) -> LLM:
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": tp}
    return LLM(path, device="cpu", skip_tokenizer_init=True, **sizes, **options)


@pytest.mark.size("full")
@pytest.mark.full(rank=[1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(3, 1), (2, 2)], ids=str)
def test_any_rank_that_is_killed_ends_all(path: Path, sizes: tuple[int, int], rank: int) -> None:
    if rank >= sizes[0] * sizes[1]:
        pytest.skip("there is no such rank")
    with make_llm(path, *sizes) as llm:
        pid = llm.engine.executor.worker_pids[rank - 1]
        killed_at: list[float] = []

        def kill() -> None:
            killed_at.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        soon_after_a_step(llm, kill)
        with pytest.raises(WorkerError, match=f"rank {rank} was killed by signal 9"):
            while True:  # however fast the machine is
                llm.generate(ASKED, LONG, use_tqdm=False)
        tell_time(killed_at[0])
        with pytest.raises(WorkerError, match="signal 9"):
            llm.generate([1, 2, 3], SHORT, use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()


@pytest.mark.size("full")
def test_a_rank_that_is_killed_while_nobody_asks(path: Path) -> None:
    with make_llm(path) as llm:
        llm.generate(ASKED, SHORT, use_tqdm=False)
        os.kill(llm.engine.executor.worker_pids[1], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerError, match="rank 2 was killed by signal 9"):
            llm.generate(ASKED, SHORT, use_tqdm=False)
        tell_time(start)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[LLM]:
    """For tests after which it goes on. The parameter is its sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*MARK.split("="))
        with make_llm(path, *request.param) as llm:
            pids = llm.engine.executor.worker_pids
            yield llm
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.size("full")
@pytest.mark.parametrize("engine", [(3, 1), (2, 2)], ids=str, indirect=True)
def test_steps_that_are_given_up_leave_no_rank_behind(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails between steps, amid sampling, and in the settings of a request."""
    llm = engine
    expected = [o.outputs[0].token_ids for o in llm.generate(ASKED, SHORT, use_tqdm=False)]
    runner, processor = llm.engine.executor.runner, llm.engine.output_processor
    for broken, method in (
        (processor, "process"),
        (runner, "sample"),
        (runner.sampler, "set_slot"),
        (llm.engine.scheduler, "commit"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(broken, method, lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate(ASKED, LONG, use_tqdm=False)
        assert not llm.engine.executor._launched
        again = [o.outputs[0].token_ids for o in llm.generate(ASKED, SHORT, use_tqdm=False)]
        assert again == expected, method


@pytest.mark.size("full")
@pytest.mark.parametrize("engine", [(3, 1), (2, 2)], ids=str, indirect=True)
def test_who_is_aborted_leaves_no_rank_waiting(engine: LLM) -> None:
    """The last requests end while steps are under way that nobody will collect."""
    llm = engine
    expected = llm.generate(ASKED, SHORT, use_tqdm=False)
    for _ in range(3):
        for number, prompt in enumerate(ASKED):
            llm.engine.add_request(str(number), {"prompt_token_ids": prompt}, LONG)
        for _ in range(5):
            llm.engine.step()
        assert llm.engine.plans_under_way
        for number in range(len(ASKED)):
            llm.engine.abort_request(str(number))
        assert not llm.engine.plans_under_way and not llm.engine.executor._launched
        start = time.monotonic()
        assert llm.engine.executor._workers.are_waiting(PATIENCE)
        tell_time(start)
    again = llm.generate(ASKED, SHORT, use_tqdm=False)
    assert [o.outputs for o in again] == [o.outputs for o in expected]


@pytest.mark.size("full")
def test_an_exception_in_a_stage_arrives_with_its_traceback(tmp_path: Path) -> None:
    """A damaged file is told by whichever rank comes to it, and ends all."""
    make_qwen3(tmp_path, num_hidden_layers=3)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="safetensors"):
        make_llm(tmp_path)
