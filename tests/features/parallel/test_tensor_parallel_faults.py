"""What goes wrong with several processes ends soon, in a clear error, and leaves nothing behind.

Each test looks for the same three remains: processes, files in /dev/shm, and words on stderr.
"""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_remains import (  # the fixture is for each test of this file
    MARK,
    PATIENCE,
    SOON,
    nothing_is_left_behind,  # noqa: F401
    soon_after_a_step,
    tell_time,
    within,
)
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.engine.executor import StepResult
from nanoserve.features.parallel import tensor_parallel
from nanoserve.features.parallel.process_group import Group
from nanoserve.features.parallel.worker_processes import WorkerError
from nanoserve.sampling.slot_state import SlotState
from nanoserve.worker.model_runner import Handle

pytestmark = pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="looks for processes in /proc"
)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def make_llm(path: Path, **options: Any) -> LLM:
    common = {"device": "cpu", "skip_tokenizer_init": True, "tensor_parallel_size": 2}
    return LLM(path, **common | options)


# ---------------------------------------------------------------- a worker fails


def test_a_worker_that_is_killed_in_the_middle_of_a_step(checkpoint: Path) -> None:
    with make_llm(checkpoint) as llm:
        (pid,) = llm.engine.executor.worker_pids
        killed_at: list[float] = []

        def kill() -> None:
            killed_at.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        soon_after_a_step(llm, kill)
        with pytest.raises(WorkerError, match="rank 1 was killed by signal 9"):
            while True:  # however fast the machine is
                llm.generate([[1, 2, 3]] * 4, LONG, use_tqdm=False)
        tell_time(killed_at[0])
        for _ in range(3):  # and it stays so, without a wait
            with pytest.raises(WorkerError, match="signal 9"):
                llm.generate([1, 2, 3], SHORT, use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()


class DeafWork:
    """A collective whose end is never noticed."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


@pytest.mark.size("full")
def test_a_worker_that_is_killed_and_gloo_does_not_notice(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen once on a busy machine, where rank 0 waited for the whole of the group's timeout."""
    with make_llm(checkpoint) as llm:
        executor = llm.engine.executor
        (pid,), (group,) = executor.worker_pids, executor._groups
        killed_at: list[float] = []

        def wait_for_the_dead(work: Any) -> None:
            if not killed_at:
                killed_at.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)
            Group.wait(group, DeafWork())

        monkeypatch.setattr(group, "wait", wait_for_the_dead)
        with pytest.raises(WorkerError, match="rank 1 was killed by signal 9"):
            llm.generate([1, 2, 3], SHORT, use_tqdm=False)
        tell_time(killed_at[0])


@pytest.mark.size("full")
def test_tokens_of_a_step_in_which_a_worker_dies_are_nobodys(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the wait for such a step ends without an error, and what it has computed is garbage.

    It would be a whole answer: nothing comes after it in which the death would be noticed.
    """
    with make_llm(checkpoint) as llm:
        executor = llm.engine.executor
        collect = executor.runner.collect

        def collect_while_it_dies(handle: Handle) -> StepResult:
            result = collect(handle)
            os.kill(executor.worker_pids[0], signal.SIGKILL)
            assert within(PATIENCE, lambda: executor._workers.failure is not None)
            return result

        monkeypatch.setattr(executor.runner, "collect", collect_while_it_dies)
        with pytest.raises(WorkerError, match="rank 1 was killed by signal 9"):
            llm.generate([1, 2, 3], SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.size("full")
def test_a_worker_that_is_killed_between_two_calls(checkpoint: Path) -> None:
    with make_llm(checkpoint) as llm:
        llm.generate([1, 2, 3], SHORT, use_tqdm=False)
        os.kill(llm.engine.executor.worker_pids[0], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 was killed by signal 9"):
            llm.generate([1, 2, 3], SHORT, use_tqdm=False)
        tell_time(start)


def test_an_exception_in_a_worker_arrives_with_its_traceback(
    checkpoint: Path, by_size: Callable[..., int]
) -> None:
    """Told of a step that is not the one in the buffer, a worker refuses the batch."""
    size = by_size(2, 2, 4)
    with make_llm(checkpoint, tensor_parallel_size=size, max_num_seqs=4) as llm:
        llm.generate([1, 2, 3], SHORT, use_tqdm=False)
        workers = llm.engine.executor._workers
        tell, later = workers._send_number, (2).to_bytes(4, "little")
        workers._send_number = lambda message: tell(
            bytes(map(sum, zip(message, later, strict=True)))
        )
        start = time.monotonic()
        with pytest.raises(WorkerError, match="was overwritten by") as caught:
            llm.generate([1, 2, 3], SHORT, use_tqdm=False)
        tell_time(start)
        assert re.search(r"rank \d failed:\nTraceback .*in serve\n", str(caught.value), re.S)


@pytest.mark.size("full")
def test_a_worker_that_is_stopped_is_waited_for_but_not_for_long(checkpoint: Path) -> None:
    stopped_for = 1.5
    failing = Failing()
    options = {"logits_processors": [failing], "worker_timeout_seconds": 5}
    with make_llm(checkpoint, **options) as llm:
        (pid,) = llm.engine.executor.worker_pids
        expected = llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].outputs[0].token_ids

        def stop(seconds: float | None = None) -> None:
            os.kill(pid, signal.SIGSTOP)
            if seconds is not None:
                threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()

        stop(stopped_for)
        start = time.monotonic()
        again = llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].outputs[0].token_ids
        assert again == expected and time.monotonic() - start > stopped_for - 1
        # Also where it is asked whether it still works for this engine, because a step has raised.
        failing.num_calls_left, failing.before = 2, lambda: stop(stopped_for)
        with pytest.raises(ZeroDivisionError):
            llm.generate([1, 2, 3], SHORT, use_tqdm=False)
        assert llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].outputs[0].token_ids == expected

        stopped_at: list[float] = []
        soon_after_a_step(llm, lambda: stopped_at.append(time.monotonic()) or stop())
        with pytest.raises(WorkerError, match=rf"rank 1, process {pid}, .* no heartbeat for 4"):
            while True:
                llm.generate([[1, 2, 3]] * 4, LONG, use_tqdm=False)
        tell_time(stopped_at[0], PATIENCE)
        assert within(SOON, lambda: not Path(f"/proc/{pid}").exists())
        start = time.monotonic()
    tell_time(start)  # to close


@pytest.mark.size("full")
@pytest.mark.parametrize("moment", ["exit", "raise"])
def test_a_worker_that_fails_while_it_starts(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    failing = {"exit": "os._exit(7)", "raise": "sys.modules['safetensors'] = None"}[moment]
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nif 'nanoserve.features.parallel.tp_worker' in sys.orig_argv: {failing}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 ended with (7|1)"):
        make_llm(checkpoint)
    tell_time(start, PATIENCE)  # of which Python's start and imports take most


def test_workers_that_cannot_be_started(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def fail() -> None:
        with pytest.raises(FileNotFoundError, match="/nowhere/python") as caught:
            make_llm(checkpoint)
        del caught  # its frames hold the store
        gc.collect()

    fail()  # a process's first engine opens what its libraries keep
    num_open = open_files()
    for _ in range(3):
        fail()
    assert within(SOON, lambda: open_files() <= num_open)


# ---------------------------------------------------------------- rank 0 fails


@pytest.mark.size("full")
def test_a_checkpoint_that_does_not_load(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ValueError, match="damaged"):
        make_llm(tmp_path)


class Failing:
    """A logits processor of the engine that raises at the call that was asked for."""

    def __init__(self) -> None:
        self.num_calls_left = -1
        self.before: Callable[[], None] = lambda: None

    def __call__(self, logits: torch.Tensor, states: list[SlotState]) -> None:
        self.num_calls_left -= 1
        if self.num_calls_left == -1:
            self.before()
            raise ZeroDivisionError("no such luck")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[tuple[LLM, Failing]]:
    """With the processor that is called in it; for tests after which it goes on.

    The parameter is `async_scheduling`.
    """
    failing = Failing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*MARK.split("="))
        options = {"logits_processors": [failing], "async_scheduling": request.param}
        with make_llm(checkpoint, **options) as llm:
            pids = llm.engine.executor.worker_pids
            yield llm, failing
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.size("full")
@pytest.mark.parametrize("engine", [False, True], indirect=True)
def test_an_exception_in_sampling_is_not_the_end(engine: tuple[LLM, Failing]) -> None:
    """Whichever step it strikes, and whatever is under way beside it."""
    llm, failing = engine
    expected = llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].outputs[0].token_ids
    asks_more = SamplingParams(prompt_logprobs=2, max_tokens=4, ignore_eos=True)
    for num_calls in (0, 1, 2, 3, 0, 0):
        failing.num_calls_left = num_calls
        with pytest.raises(ZeroDivisionError, match="no such luck") as caught:
            llm.generate([[1, 2, 3], [4, 5, 6]], [SHORT, asks_more], use_tqdm=False)
        assert len(caught.value.request_ids) == 2
        again = llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].outputs[0].token_ids
        assert again == expected
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.small(engine=[True])
@pytest.mark.parametrize("engine", [False, True], indirect=True)
def test_a_step_is_given_up_that_no_rank_has_failed_in(
    engine: tuple[LLM, Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch is packed anew only when the others have done with it, and that is asked for once.

    In steps that nothing happens to nobody is asked.
    """
    llm, asked = engine[0], []
    workers, processor = llm.engine.executor._workers, llm.engine.output_processor
    are_waiting, process = workers.are_waiting, processor.process
    expected = llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].outputs[0].token_ids
    monkeypatch.setattr(
        workers, "are_waiting", lambda timeout: asked.append(1) or are_waiting(timeout)
    )
    assert llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert not asked
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(processor, "process", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate([[1, 2, 3], [4, 5, 6]], SHORT, use_tqdm=False)
        assert processor.process == process
        again = llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].outputs[0].token_ids
        assert again == expected
        # The step whose outputs were lost had been collected; only one ahead of it had not.
        assert len(asked) == llm.engine.config.async_scheduling
        asked.clear()


@pytest.mark.small(engine=[True])
@pytest.mark.parametrize("engine", [False, True], indirect=True)
def test_a_processor_of_one_request_ends_that_one_alone(engine: tuple[LLM, Failing]) -> None:
    def broken(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no such luck")

    llm, _ = engine
    expected = llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].outputs[0].token_ids
    asks_more = SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=4, ignore_eos=True)
    params = [SamplingParams(logits_processors=[broken]), asks_more]
    for _ in range(2):
        failed, other = llm.generate([[4, 5, 6], [1, 2, 3]], params, use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error" and not failed.outputs[0].token_ids
        assert isinstance(failed.error, ZeroDivisionError)
        assert other.outputs[0].token_ids == expected and other.error is None


def press_ctrl_c_twice(*args: object) -> None:
    """The first one waits for the end of the step."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.size("full")
@pytest.mark.parametrize(
    ("kind", "hook"),
    [(ZeroDivisionError, lambda *args: 1 / 0), (KeyboardInterrupt, press_ctrl_c_twice)],
)
def test_an_exception_in_rank_0s_model_ends_the_engine(
    checkpoint: Path, kind: type[BaseException], hook: Callable[..., object]
) -> None:
    told = f"rank 0 failed in a step that other ranks had started: {kind.__name__}"
    with make_llm(checkpoint) as llm:
        layer = llm.engine.executor.runner.model.model.layers[1]
        layer.register_forward_pre_hook(hook)
        start = time.monotonic()
        with pytest.raises(kind) as caught:
            llm.generate([1, 2, 3], SHORT, use_tqdm=False)
        tell_time(start)  # it gives the others two seconds to answer
        if kind is KeyboardInterrupt:
            assert told in str(caught.value.__cause__)
        for _ in range(2):  # whoever calls later is told why
            with pytest.raises(WorkerError, match=told):
                llm.generate([1, 2, 3], SHORT, use_tqdm=False)


@pytest.mark.size("full")
def test_threads_are_as_before_whichever_engine_goes_first(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture compares them."""
    # Of these two alone: the engine that other tests share may be alive.
    monkeypatch.setattr(tensor_parallel, "_THREADS", [])
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    first, second = make_llm(checkpoint), make_llm(checkpoint)
    shared = torch.get_num_threads()
    first.close()
    assert torch.get_num_threads() == shared < 4
    second.close()
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


# ---------------------------------------------------------------- whole scripts

SCRIPT = """
import sys
from nanoserve import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, tensor_parallel_size=2)
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
print("pid", *llm.engine.executor.worker_pids, flush=True)
"""
ENDS = {
    "at its end, unclosed": ("print(len(llm.generate([1, 2], params)), flush=True)", None, 0),
    "by an exception": ("llm.generate([1, 2], params); raise SystemExit(3)", None, 3),
    "by os._exit": ("llm.generate([1, 2], params); import os; os._exit(4)", None, 4),
    "by Ctrl-C": ("while True: llm.generate([[1, 2]] * 9, params, use_tqdm=False)", "INT", None),
    "by kill": ("while True: llm.generate([[1, 2]] * 9, params, use_tqdm=False)", "TERM", -15),
    "by kill -9": ("while True: llm.generate([[1, 2]] * 9, params, use_tqdm=False)", "KILL", -9),
    "by kill -9, idle": ("import time; time.sleep(100)", "KILL", -9),
}


def start_script(checkpoint: Path, tmp_path: Path, rest: str) -> tuple[subprocess.Popen, list[int]]:
    """A plain script, without `if __name__ == "__main__"`, and the process ids of its workers."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + rest)
    process = subprocess.Popen(
        [sys.executable, script, checkpoint],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # else what `readline` reads ahead is lost to `communicate`
        start_new_session=True,
    )
    told = process.stdout.readline()
    assert told.startswith(b"pid "), finish(process)
    return process, [int(pid) for pid in told.split()[1:]]


def finish(process: subprocess.Popen) -> tuple[str, str]:
    """What is left of its stdout, and its stderr."""
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return stdout.decode(), stderr.decode()


@pytest.mark.size("full")
@pytest.mark.full(end=["at its end, unclosed", "by an exception", "by Ctrl-C", "by kill -9"])
@pytest.mark.parametrize("end", ENDS)
def test_a_script_that_ends(checkpoint: Path, tmp_path: Path, end: str) -> None:
    rest, name, status = ENDS[end]
    process, pids = start_script(checkpoint, tmp_path, rest)
    assert len(pids) == 1
    if name is not None:
        time.sleep(0.3)  # into the middle of a call; nothing depends on it
        # As a terminal does it: to the whole process group.
        os.killpg(process.pid, getattr(signal, f"SIG{name}"))
    _, stderr = finish(process)
    ended = time.monotonic()
    if status is not None:
        assert process.returncode == status, stderr
    else:
        assert process.returncode != 0 and "KeyboardInterrupt" in stderr
    assert within(SOON, lambda: not Path(f"/proc/{pids[0]}").exists())
    print(f"its worker was gone after {time.monotonic() - ended:.2f} seconds")
    for word in ("resource_tracker", "leaked", "terminate called", "Exception ignored"):
        assert word not in stderr


@pytest.mark.size("full")
def test_after_a_ctrl_c_the_engine_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    rest = """
try:
    print("inside", flush=True)
    while True: llm.generate([[1, 2]] * 9, params, use_tqdm=False)
except KeyboardInterrupt:
    params.max_tokens = 5
    print(len(llm.generate([1, 2], params, use_tqdm=False)[0].outputs[0].token_ids))
"""
    process, _ = start_script(checkpoint, tmp_path, rest)
    assert process.stdout.readline() == b"inside\n"
    time.sleep(0.3)  # into the middle of a call; nothing depends on it
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = finish(process)
    assert (stdout, process.returncode) == ("5\n", 0), stderr


FORK = """
import os, time

def fork(seconds):
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        try:
            llm.generate([1, 2], params)
        except RuntimeError as error:
            sys.exit("belongs to another process" not in str(error))
        sys.exit(1)
    return child

print(os.waitpid(fork(0), 0)[1], len(llm.generate([1, 2], params)), flush=True)
print("child", fork(60), flush=True)
time.sleep(100)
"""


@pytest.mark.size("full")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_keeps_the_workers_nor_ends_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    process, (pid,) = start_script(checkpoint, tmp_path, FORK)
    assert process.stdout.readline() == b"0 1\n"
    child = int(process.stdout.readline().split()[1])
    os.kill(process.pid, signal.SIGKILL)
    assert within(SOON, lambda: not Path(f"/proc/{pid}").exists())
    assert Path(f"/proc/{child}").exists()
    os.kill(child, signal.SIGKILL)


@pytest.mark.size("full")
def test_while_a_worker_is_stopped_a_ctrl_c_ends_the_step(checkpoint: Path, tmp_path: Path) -> None:
    rest = "while True: llm.generate([[1, 2]] * 9, params, use_tqdm=False)"
    process, (pid,) = start_script(checkpoint, tmp_path, rest)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)  # so that a step waits for it
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = finish(process)
    tell_time(start, 2 * SOON)
    assert process.returncode != 0 and "\nKeyboardInterrupt: this ends the engine" in stderr
    assert f"rank 1, process {pid}, has sent no heartbeat for 2 seconds" in stderr
    assert within(SOON, lambda: not Path(f"/proc/{pid}").exists())
