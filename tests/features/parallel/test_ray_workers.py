"""Ranks that Ray has placed, on a cluster of two nodes, give the tokens of one process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mixed_life import TINY_POOL, assert_same_life, mixed_life
from rank_remains import PATIENCE, SOON, soon_after_a_step, tell_time, within
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.features.parallel.worker_processes import WorkerError

ray = pytest.importorskip("ray", reason="pip install 'nanoserve[ray]'")

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three_layers")
    make_qwen3(folder, num_hidden_layers=3, vocab_size=2048)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, of a processor each: two ranks do not fit on one."""
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    with contextlib.suppress(ValueError):  # of a driver that is not connected any more
        cluster.shutdown()


def make_llm(path: Path | str, **options: Any) -> LLM:
    common = {"dtype": "float32", "device": "cpu", "tokenizer": "tiny-qwen3"}
    return LLM(path, distributed_executor_backend="ray", **common | options)


@pytest.mark.size("full")
@pytest.mark.usefixtures("cluster")
def test_three_stages_on_two_nodes_answer_as_one_process_does(
    path: Path, by_size: Callable[..., Any]
) -> None:
    num_requests = by_size(60, 60, 300)
    alone = {"dtype": "float32", "device": "cpu", "tokenizer": "tiny-qwen3"}
    with LLM(path, **alone, **TINY_POOL) as llm:
        expected = mixed_life(llm, num_requests)
    with make_llm(path, pipeline_parallel_size=3, **TINY_POOL) as llm:
        pids = llm.engine.executor.worker_pids
        assert len({_node_of(pid) for pid in pids}) == 2
        found = mixed_life(llm, num_requests)
        assert llm.stats.num_preemptions > 5
    assert_same_life(found, expected)
    assert within(SOON, lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.size("full")
@pytest.mark.usefixtures("cluster")
def test_two_ranks_of_one_stage(path: Path) -> None:
    asked = [[7, 8, 9 + i] * 3 for i in range(6)]
    alone = {"dtype": "float32", "device": "cpu", "tokenizer": "tiny-qwen3"}
    with LLM(path, **alone) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(asked, SHORT, use_tqdm=False)]
    with make_llm(path, tensor_parallel_size=2, async_scheduling=True) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(asked, SHORT, use_tqdm=False)]
    assert found == expected


@pytest.mark.size("full")
@pytest.mark.usefixtures("cluster")
def test_a_rank_that_is_killed_ends_all(path: Path) -> None:
    with make_llm(path, pipeline_parallel_size=3) as llm:
        pids = llm.engine.executor.worker_pids
        killed_at: list[float] = []

        def kill() -> None:
            killed_at.append(time.monotonic())
            os.kill(pids[1], signal.SIGKILL)

        soon_after_a_step(llm, kill)
        with pytest.raises(WorkerError, match="rank 2, started by Ray: its"):
            while True:
                llm.generate([[1, 2, 3]] * 8, LONG, use_tqdm=False)
        tell_time(killed_at[0])
        assert within(SOON, lambda: not Path(f"/proc/{pids[0]}").exists())
    with make_llm(path, pipeline_parallel_size=3) as llm:  # their places are free again
        assert llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.size("soak")
@pytest.mark.usefixtures("cluster")
def test_an_error_of_a_rank_arrives(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(path, tensor_parallel_size=2) as llm:
        workers = llm.engine.executor._workers
        send = workers._send
        monkeypatch.setattr(workers, "_send", lambda whole: send(b"\7" + whole[1:]))
        with pytest.raises(WorkerError, match="came with the batch of"):
            llm.generate([1, 2, 3], SHORT, use_tqdm=False)


@pytest.mark.size("full")
@pytest.mark.usefixtures("cluster")
def test_more_ranks_than_the_cluster_has_room_for(path: Path) -> None:
    with pytest.raises(ValueError, match="need 3 CPUs, but Ray's cluster has 2"):
        make_llm(path, pipeline_parallel_size=2, tensor_parallel_size=2)


def test_ray_is_left_where_ranks_cannot_meet(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: told[-1:] == ["joined"])
    monkeypatch.setattr(ray, "init", lambda **options: told.append("joined"))
    monkeypatch.setattr(ray, "shutdown", lambda: told.append("left"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.1")  # nobody's
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        make_llm(path, tensor_parallel_size=2)
    assert told == ["joined", "left"]


def test_one_rank_needs_no_ray(path: Path) -> None:
    with pytest.raises(ValueError, match="distributed_executor_backend='ray' places the ranks"):
        make_llm(path)


def _node_of(pid: int) -> str:
    """The raylet, a node's own process, that has started it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


SCRIPT = """
import sys
from nanoserve import LLM, SamplingParams
options = dict(device="cpu", skip_tokenizer_init=True, distributed_executor_backend="ray")
llm = LLM(sys.argv[1], pipeline_parallel_size=2, **options)
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
print("pid", *llm.engine.executor.worker_pids, flush=True)
"""
ENDS = {
    "at its end, unclosed": ("print(len(llm.generate([1, 2], params)), flush=True)", 0),
    "by kill -9": ("while True: llm.generate([[1, 2]] * 9, params, use_tqdm=False)", -9),
}


@pytest.mark.size("full")
@pytest.mark.full(end=["by kill -9"])
@pytest.mark.parametrize("end", ENDS)
def test_a_script_with_a_local_ray_leaves_nothing(path: Path, tmp_path: Path, end: str) -> None:
    rest, status = ENDS[end]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + rest)
    marked = os.environ | {"NANOSERVE_RAY_TEST": f"{os.getpid()}-{status}", "RAY_ADDRESS": "local"}
    process = subprocess.Popen(
        [sys.executable, script, path], env=marked, stdout=subprocess.PIPE, bufsize=0
    )
    told = process.stdout.readline().split()
    assert told[:1] == [b"pid"]
    if status == -9:
        time.sleep(0.3)
        process.kill()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    mark = f"NANOSERVE_RAY_TEST={os.getpid()}-{status}".encode()
    start = time.monotonic()
    assert within(30, lambda: not _marked(mark)), _marked(mark)
    print(f"all of Ray was gone after {time.monotonic() - start:.1f} seconds")


def _marked(mark: bytes) -> list[str]:
    """Processes that still run of those that the script, or Ray for it, has started.

    But for Ray's two agents, which wait a minute for a Ray that was killed, and then end.
    """
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                found += [command[:80]] * ("agent" not in command.lower())
        except OSError:
            continue
    return found
