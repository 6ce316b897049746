"""Everything of an engine happens on its own GPU, whichever one its caller has chosen.

torch's operations find their GPU by their tensors. Triton's kernels, page-locking and the recording
of graphs take the current one: there they must be told.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from packed_batches import make_plan, make_sequence

import nanoserve.features.parallel.tp_worker as tp_worker
import nanoserve.sampling.fused_sampler as fused_sampler
from nanoserve import SamplingParams
from nanoserve.attention.torch import TorchAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.parallel.process_group import anonymous_file, map_memory
from nanoserve.features.parallel.tp_worker import SharedSteps
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner

CALLERS, OWN = 0, 1


class TwoGPUs(FakeCuda):
    """The second of two GPUs; the process's current one is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.current = CALLERS
        self.calls: list[tuple[str, int]] = []  # what asks for the current GPU, and which it was

    def note(self, name: str) -> None:
        self.calls.append((name, self.current))

    @contextmanager
    def guard(self) -> Iterator[None]:
        before, self.current = self.current, OWN
        yield
        self.current = before

    def page_lock(self, memory: np.ndarray) -> None:
        self.note("page_lock")

    def close(self) -> None:
        self.note("close")

    def capture(self, forward: Callable[[], torch.Tensor], pool: list[int]) -> Any:
        self.note("capture")
        return super().capture(forward, pool)

    def seen(self) -> set[str]:
        """What has been called since the last time, all of it on the right GPU."""
        calls, self.calls = self.calls, []
        assert {gpu for _, gpu in calls} == {OWN}, calls
        return {name for name, _ in calls}

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which takes note of it."""

        def watched(*args: Any, **options: Any) -> Any:
            self.note(call.__name__)
            return call(*args, **options)

        return watched


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> TwoGPUs:
    """The sampler's kernels take note, too."""
    cuda = TwoGPUs()
    for kernel in (fused_sampler.choose_tokens, fused_sampler.filter_borders):
        monkeypatch.setattr(fused_sampler, kernel.__name__, cuda.watched(kernel))
    return cuda


def make_runner(
    cuda: TwoGPUs, config: EngineConfig, path: Path, parallel: ParallelContext | None = None
) -> ModelRunner:
    attention, ops = TorchAttention(), TorchOps()
    for owner, names in (
        (attention, ["attend"]),
        (ops, ["rms_norm", "add_rms_norm", "act_and_mul"]),
    ):
        for name in names:
            setattr(owner, name, cuda.watched(getattr(owner, name)))
    parallel = parallel or ParallelContext()
    context = LayerContext(attention=attention, ops=ops, parallel=parallel)
    device = CudaDevice(config, cuda, is_capturable=True)
    return ModelRunner.load(config, ModelConfig.from_checkpoint(path), path, context, device)


MODEL = {"rms_norm", "add_rms_norm", "act_and_mul", "attend"}
SAMPLER = {"choose_tokens", "filter_borders"}


@pytest.mark.size("full")
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 50}], ids=["profiled", "explicit"])
def test_from_its_making_to_its_end_an_engine_keeps_to_its_gpu(
    checkpoint: Path, cuda: TwoGPUs, options: dict[str, Any]
) -> None:
    config = EngineConfig(str(checkpoint), max_num_seqs=2, **options).for_device("cpu")
    runner = make_runner(cuda, config, checkpoint)
    assert cuda.seen() == MODEL | SAMPLER | {"page_lock", "capture"}
    runner.use_memory(np.zeros(2 * runner.layout.num_bytes, dtype=np.uint8))
    assert cuda.seen() == {"page_lock"}
    engine = GuardedEngine(config, runner.model_config, runner, tokenizer=None)
    engine.add_request("r", [1, 2, 3], SamplingParams(top_k=5, max_tokens=3, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        assert cuda.seen() == MODEL | SAMPLER
    engine.close()
    assert cuda.seen() == {"close"} and cuda.current == CALLERS


def test_another_ranks_process_chooses_its_gpu_before_anything_else(
    checkpoint: Path, cuda: TwoGPUs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For NCCL and whatever else has no guard. Then it runs a prompt and a decode step."""
    config = EngineConfig(str(checkpoint), max_num_seqs=2, num_kv_blocks=50)
    config = config.for_device("cpu")
    model_config = ModelConfig.from_checkpoint(checkpoint)
    gpu, runners = torch.device("cuda", OWN), []

    def set_device(device: torch.device) -> None:
        cuda.current = device.index

    def join_ranks(*args: Any) -> ParallelContext:
        cuda.note("join_ranks")
        return ParallelContext(TensorParallel(1, 2))

    def make(
        config: EngineConfig, _: ModelConfig, path: Path, parallel: ParallelContext
    ) -> ModelRunner:
        cuda.note("make_runner")
        runners.append(make_runner(cuda, config, path))
        return runners[0]

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(tp_worker, "choose_device", lambda *args: gpu)
    monkeypatch.setattr(tp_worker, "find_store", lambda *args: None)
    monkeypatch.setattr(tp_worker, "join_ranks", join_ranks)
    monkeypatch.setattr(tp_worker, "make_runner", make)
    # What rank 0 shares: two batches, and a pipe that tells of them and ends.
    layout = make_runner(cuda, config, checkpoint).layout
    cuda.seen()
    memory, (steps, told) = anonymous_file(), os.pipe()
    os.ftruncate(memory, 2 * layout.num_bytes)
    tables = np.ones((1, 2, layout.max_blocks_per_row), np.int32)
    parts = np.split(map_memory(memory, 2 * layout.num_bytes), 2)
    for step, (length, computed) in enumerate([(3, 0), (4, 3)]):
        batch = Batch(layout, parts[step])
        batch.step = step
        plan = make_plan({make_sequence(length, computed, slot=0): length - computed})
        batch.pack(plan, tables, block_size=16)
        os.write(told, step.to_bytes(4, "little"))
    os.close(told)

    job = {"options": asdict(config), "path": checkpoint, "size": 2, "rank": 1, "port": 0}
    job |= {"host": "", "model": (model_config.architecture, ""), "heads": {}}
    shared = SharedSteps({"steps": steps, "memory": memory}, 2)
    tp_worker.serve(job, shared, lambda **state: None)
    assert cuda.seen() == MODEL | SAMPLER | {"join_ranks", "make_runner", "page_lock", "capture"}
    assert runners[0]._num_batches == 2
    os.close(steps)
    os.close(memory)
