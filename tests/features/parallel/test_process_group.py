"""NCCL's side of a group, on a machine that has none: a stand-in, and torch's own stubs.

And what gloo cannot: leave a collective that a dead rank does not come to.
"""

import ast
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanoserve.features.parallel.process_group import Group, join_group
from nanoserve.features.parallel.worker_processes import WorkerError, Workers

GPU = torch.device("cuda", 1)
MIB = 2**20


class FakeNCCL:
    """Of one rank. As with NCCL, the first collective is where the ranks meet."""

    class Options:
        pass

    meet: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.options, self.calls, self.has_met = options, [], False

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> None:
        if not self.has_met:
            self.meet()
        self.has_met = True
        self.calls.append((options.reduceOp, options.asyncOp))

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The GPUs that this process has chosen, of a machine that has some; the last one counts."""
    chosen: list[torch.device] = []

    @contextmanager
    def device(asked: torch.device) -> Iterator[None]:
        chosen.append(asked)
        yield
        chosen.pop()

    tensor = torch.tensor
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    monkeypatch.setattr(torch, "tensor", lambda data, dtype, device: tensor(data, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900 * MIB, 1000 * MIB))
    return chosen


def test_a_worker_that_dies_while_nccl_meets_ends_the_wait_for_it(
    current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL itself waits for ever. Later, in the middle of loading, nobody would look."""
    workers = Workers(1, {}, files={}, num_threads=1, timeout=60)  # none; they are told of below
    is_meeting, end = threading.Event(), threading.Event()

    def meet() -> None:
        is_meeting.set()
        end.wait()

    def die() -> None:
        if is_meeting.wait(100):
            workers.fail("rank 1 was killed by signal 9")

    monkeypatch.setattr(FakeNCCL, "meet", staticmethod(meet))
    threading.Thread(target=die, daemon=True).start()
    with pytest.raises(WorkerError, match="rank 1 was killed by signal 9"):
        workers.watch(partial(join_group, 0, 2, None, GPU, 300))
    end.set()
    workers.close()


def test_when_the_ranks_have_met_nccl_is_ready_and_its_memory_is_counted(
    current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    free, met_on = [900 * MIB], []

    def meet() -> None:
        met_on.extend(current)
        free[0] -= 300 * MIB

    monkeypatch.setattr(FakeNCCL, "meet", staticmethod(meet))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1000 * MIB))
    group = join_group(0, 2, None, GPU, timeout=300)
    assert met_on == [GPU] and not current
    assert group.device_bytes == 300 * MIB
    assert group._process_group.options._timeout.total_seconds() == 300


def test_sums_are_launched_in_order_with_the_kernels_around_them(
    current: list[torch.device],
) -> None:
    """Not on a stream of NCCL's own. There is then nothing to wait for, and torch returns None."""
    group = join_group(0, 2, None, GPU, timeout=300)
    calls = group._process_group.calls
    assert calls == [(dist.ReduceOp.MIN, False)]
    group.all_reduce(torch.ones(3))
    assert calls[1:] == [(dist.ReduceOp.SUM, False)]


def test_nccl_is_aborted_before_its_destructor_complains(current: list[torch.device]) -> None:
    group = join_group(0, 2, None, GPU, timeout=300)
    calls = group._process_group.calls
    group.close()
    assert calls[-1] == "abort" and group._process_group is None
    group.abort()  # a worker that fails after the end changes nothing
    assert calls.count("abort") == 1


class Broken:
    def abort(self) -> None:
        raise RuntimeError("no communicator")


def test_why_a_group_could_not_be_aborted_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="nanoserve"):
        Group(Broken(), None, GPU).abort()
    assert "could not be aborted" in caplog.text and "no communicator" in caplog.text


# ---------------------------------------------------------------- gloo

# Rank 1 has come, and comes to no collective: as if gloo had not noticed that it is dead.
LEAVE_A_SUM = """
import threading, torch
from nanoserve.features.parallel.process_group import find_store, join_group, serve_store

groups, stores = {}, [serve_store(2)]
stores.append(find_store(stores[0].port, 2))
join = lambda rank: join_group(rank, 2, stores[rank], torch.device("cpu"), 300)
meet = lambda rank: groups.update({rank: join(rank)})
other = threading.Thread(target=meet, args=[1])
other.start()
meet(0)
other.join()
threading.Timer(0.3, groups[0].abort).start()
try:
    groups[0].all_reduce(torch.ones(3))
except RuntimeError as error:
    print(error)
groups[0].close()
groups[0].abort()  # a worker that fails after the end changes nothing
print("closed")
"""


@pytest.mark.size("full")
def test_a_sum_to_which_a_dead_rank_does_not_come_is_left_and_nothing_waits_for_it() -> None:
    """Nor does the end of Python: else it would be the 300 seconds of the group's timeout."""
    began = time.monotonic()
    command = [sys.executable, "-c", LEAVE_A_SUM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "another rank has terminated" in done.stdout and done.stdout.endswith("closed\n")
    print(f"after {time.monotonic() - began:.1f} seconds")


# ---------------------------------------------------------------- what torch says of itself


STUBS = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"


@pytest.fixture(scope="module")
def stubs() -> dict[str, ast.ClassDef]:
    """Classes by their names, with those within: "ProcessGroupNCCL.Options"."""
    found: dict[str, ast.ClassDef] = {}

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = node
                add(node.body, f"{prefix}{node.name}.")

    add(ast.parse(STUBS.read_text()).body, "")
    return found


def signatures(stubs: dict[str, ast.ClassDef], name: str, method: str) -> list[list[str]]:
    """Names of the parameters, one list for each overload, of a class or of what it derives from.

    The collectives of every backend are those of `ProcessGroup`, where the stubs have them.
    """
    node = stubs[name]
    found = [
        [argument.arg for argument in item.args.args[1:]]
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name == method
    ]
    bases = [ast.unparse(base) for base in node.bases]
    return found or [
        overload for base in bases if base in stubs for overload in signatures(stubs, base, method)
    ]


def test_what_is_called_of_nccl_is_in_torchs_stubs(stubs: dict[str, ast.ClassDef]) -> None:
    """With these parameters in this order: `Group` and `join_group` give them by position."""
    nccl = "ProcessGroupNCCL"
    assert signatures(stubs, nccl, "__init__") == [["store", "rank", "size", "options"]]
    assert signatures(stubs, f"{nccl}.Options", "_timeout")
    assert signatures(stubs, nccl, "abort") == [[]]
    assert signatures(stubs, nccl, "rank") == signatures(stubs, nccl, "size") == [[]]
    assert ["tensors", "opts"] in signatures(stubs, "ProcessGroup", "allreduce")
    assert ["tensor", "root", "timeout"] in signatures(stubs, "ProcessGroup", "broadcast")
    gathers = signatures(stubs, "ProcessGroup", "gather")
    assert ["output_tensors", "input_tensors", "opts"] in gathers


def test_the_options_of_a_sum_are_in_torchs_stubs(stubs: dict[str, ast.ClassDef]) -> None:
    fields = {
        item.target.id for item in stubs["AllreduceOptions"].body if isinstance(item, ast.AnnAssign)
    }
    assert "reduceOp" in fields
    assert ("asyncOp" in fields) is hasattr(dist.AllreduceOptions(), "asyncOp")
    assert dist.AllreduceOptions().reduceOp == dist.ReduceOp.SUM
