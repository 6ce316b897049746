"""What a decode step of Qwen3-0.6B launches and copies, counted on torch's "meta" device.

Tensors without memory go through the runner, the model, its LM head and the sampler of a GPU. Every
operation that would be a launch is counted, and kernels where the interpreter would begin. A value
that the host looks at would have to be there: on this device there is none.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from packed_batches import make_sequence
from shapes import SHAPES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from triton.runtime.interpreter import GridExecutor

import nanoserve.checkpoint.loader
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs, SampleInputs, SlotUpdate
from nanoserve.engine.plan import Plan, Row
from nanoserve.kernels.triton import dependent_launch, paged_attention, store_kv
from nanoserve.models.layers.context import LayerContext
from nanoserve.sampling_params import SamplingParams
from nanoserve.worker.build_executor import _backend
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.graph_programs import DecodeProgram
from nanoserve.worker.model_runner import ModelRunner

META = torch.device("meta")
MAX_ROWS, CONTEXT, NUM_LAYERS = 256, 2000, 28
# Launches of a layer: each kernel, and the products qkv, o, gate_up and down.
PER_LAYER = {"_add_rms_norm": 2, "_store_kv": 1, "_act_and_mul": 1, "aten::linear": 4}
MOST_ATTENTION = 2  # the attention of a layer, and the merge of its parts
# Around the layers: embedding, an empty residual stream, the last norm.
AROUND = {"aten::embedding": 1, "aten::zeros_like": 1, "_add_rms_norm": 1}
# Before a replay: two copies, and what fills in the tokens that only the device knows. Behind it:
# rows and positions are gathered, LM head, sampler, the ids are kept for the next step and fetched.
BESIDE = {
    "aten::copy_": 4, "aten::index": 3, "aten::lt": 1, "aten::where": 1, "aten::add": 1,
    "aten::linear": 1, "_best_of_parts": 1, "_best_part": 1, "aten::clamp": 1, "aten::to": 1,
    "aten::index_put_": 1,
}  # fmt: skip
# Of which a graph of choices has the second half, and the model's what fills in tokens. Then two
# copies are left before the replays, and one behind them.
FILLED_IN = {"aten::index": 1, "aten::lt": 1, "aten::where": 1, "aten::copy_": 1}
CHOICES = {
    "aten::add": 1, "aten::linear": 1, "_best_of_parts": 1, "_best_part": 1, "aten::clamp": 1,
    "aten::to": 1, "aten::index_put_": 1,
}  # fmt: skip
MOST_COPIED_IN = 400_000  # bytes, of a step of 256 rows of 2,000 tokens


class Watch(TorchDispatchMode):
    """Counts launches, and the bytes of copies between host and device. Nothing else may mix them.

    A view or an allocation launches nothing. What only the host has to do with is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.copied_in: list[int] = []
        self.copied_out: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name == "aten::copy_" and (args[0].device, args[1].device) != (META, META):
            return self._copy(*args[:2])
        out = func(*args, **kwargs)
        read, written = _tensors((args, kwargs)), _tensors(out)
        if all(t.device != META for t in read + written):
            return out
        # A scalar may lie on the host: it travels with the launch.
        assert all(t.device == META or t.ndim == 0 for t in read), f"{name} mixes devices"
        storages = {t.untyped_storage()._cdata for t in read}
        is_view = all(t.untyped_storage()._cdata in storages for t in written)
        if "empty" not in name and (name.endswith("_") or not is_view):
            self.launches[name] += 1
        return out

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        self.launches["aten::copy_"] += 1
        (self.copied_in if target.device == META else self.copied_out).append(source.nbytes)
        return target


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if torch.is_tensor(value)]


@pytest.fixture(scope="module")
def launched() -> Iterator[Counter[str]]:
    """By name, kernels that would have been launched."""
    launched: Counter[str] = Counter()

    def count(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launched[self.fn.__name__] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", count)
        yield launched


class RecordingCuda(FakeCuda):
    """Its graphs launch nothing that the host could count."""

    def __init__(self) -> None:
        super().__init__(total=2**50, free=2**50)
        self.device = META

    def capture(
        self, forward: Callable[[], torch.Tensor], pool: list[int]
    ) -> tuple[Callable[[], None], torch.Tensor]:
        _, output = super().capture(forward, pool)
        return lambda: self.events.append("replay"), output


@pytest.fixture(scope="module")
def runner(launched: Counter[str], tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(tmp_path_factory.mktemp("qwen3"), enforce_eager=True)


@pytest.fixture(scope="module")
def capturing(launched: Counter[str], tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    options = {"capture_sampling": True, "capture_mixed_steps": False}
    return make_runner(tmp_path_factory.mktemp("qwen3"), **options)


def make_runner(path: Path, **options: Any) -> ModelRunner:
    (path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    config = EngineConfig(
        str(path),
        load_format="dummy",
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=8192,
        num_kv_blocks=MAX_ROWS * 40_960 // 16,
        async_scheduling=True,
        **options,
    )
    model_config = ModelConfig.from_checkpoint(path, "bfloat16")
    attention, ops = _backend("triton", config)
    context = LayerContext(torch.bfloat16, META, attention=attention, ops=ops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nanoserve.checkpoint.loader, "fill_randomly", lambda model: None)
        device = CudaDevice(config, RecordingCuda(), True, captures_mixed_steps=True)
        return ModelRunner.load(config, model_config, path, context, device)


@pytest.fixture(scope="module")
def mixed(launched: Counter[str], tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(tmp_path_factory.mktemp("qwen3"))


def pack(runner: ModelRunner, num_rows: int, prompts: tuple[int, ...] = ()) -> Batch:
    """A step of rows of `CONTEXT` tokens; of every other one only the device knows the last.

    Behind them are prompts of so many tokens.
    """
    rows = [
        Row(make_sequence(CONTEXT - 1 + slot % 2, CONTEXT - 1, slot), CONTEXT - 1, 1, 1, 1)
        for slot in range(num_rows)
    ]
    rows += [
        Row(make_sequence(length, 0, num_rows + i), 0, length, 1, 1)
        for i, length in enumerate(prompts)
    ]
    tables = np.zeros((1, MAX_ROWS, runner.layout.max_blocks_per_row), dtype=np.int32)
    batch = runner.next_batch()
    batch.pack(Plan(budget=0, rows=rows), tables, runner.config.block_size)
    return batch


def step(
    runner: ModelRunner,
    num_rows: int,
    changes: list[SlotUpdate],
    prompts: tuple[int, ...] = (),
) -> Watch:
    batch = pack(runner, num_rows, prompts)
    with Watch() as watch:
        handle = runner.forward(batch, ForwardInputs(changes))
        runner.sample(handle, SampleInputs())
    return watch


def changes(num_rows: int) -> list[SlotUpdate]:
    params = SamplingParams(temperature=0.6)
    return [SlotUpdate(slot, params, seed=slot) for slot in range(num_rows)]


def split_attention(launches: Counter[str]) -> tuple[Counter[str], int]:
    """Launches without attention's kernels, and how many these are: they may be cut differently."""
    known = {*PER_LAYER, *AROUND, *BESIDE}
    kernels = {name for name in launches if "::" not in name and name not in known}
    rest = Counter({name: n for name, n in launches.items() if name not in kernels})
    return rest, sum(launches[name] for name in kernels)


def decode_program(runner: ModelRunner) -> DecodeProgram:
    """What would be captured of a runner that launches kernel by kernel."""
    device, sizes = runner.device, [1, 16, 256]
    return DecodeProgram(device.cuda, device.buffers, runner._computation, sizes, False)


def of_the_model() -> Counter[str]:
    return Counter({name: NUM_LAYERS * n for name, n in PER_LAYER.items()}) + Counter(AROUND)


@pytest.mark.parametrize("num_rows", [1, 16, 256])
def test_what_a_graph_records_is_launches_and_nothing_else(
    runner: ModelRunner, launched: Counter[str], num_rows: int
) -> None:
    launched.clear()
    with Watch() as watch, torch.inference_mode():
        decode_program(runner).launch(num_rows)
    assert not watch.copied_in and not watch.copied_out
    launches, attention = split_attention(watch.launches + launched)
    assert launches == of_the_model()
    assert NUM_LAYERS <= attention <= MOST_ATTENTION * NUM_LAYERS


@pytest.mark.parametrize("num_rows", [1, 256])
def test_a_step_is_copied_in_once_and_out_once(
    runner: ModelRunner, launched: Counter[str], num_rows: int
) -> None:
    step(runner, num_rows, changes(num_rows))  # settings travel when slots change
    launched.clear()
    watch = step(runner, num_rows, [])
    assert len(watch.copied_in) == 1 and watch.copied_in[0] <= MOST_COPIED_IN, watch.copied_in
    assert watch.copied_out == [8 * num_rows]
    launches, attention = split_attention(watch.launches + launched)
    assert launches == of_the_model() + Counter(BESIDE)
    assert attention <= MOST_ATTENTION * NUM_LAYERS


@pytest.mark.parametrize("num_rows", [1, 256])
def test_what_the_host_launches_of_a_step_whose_tokens_are_chosen_in_a_graph(
    capturing: ModelRunner, launched: Counter[str], num_rows: int
) -> None:
    """Sixteen launches and a replay become three and two."""
    step(capturing, num_rows, changes(num_rows))
    launched.clear()
    events = capturing.device.cuda.events
    events.clear()
    watch = step(capturing, num_rows, [])
    assert watch.launches + launched == Counter({"aten::copy_": 3})
    assert watch.copied_in[0] <= MOST_COPIED_IN and watch.copied_out == [8 * num_rows]
    assert events == ["replay", "replay"]


@pytest.mark.parametrize("num_rows", [1, 256])
def test_what_its_graphs_record(
    capturing: ModelRunner, launched: Counter[str], num_rows: int
) -> None:
    sampling, decode = capturing.device.programs
    launched.clear()
    with Watch() as watch, torch.inference_mode():
        decode.launch(num_rows)
    launches, _ = split_attention(watch.launches + launched)
    assert launches == of_the_model() + Counter(FILLED_IN)
    launched.clear()
    with Watch() as watch, torch.inference_mode():
        sampling.launch(num_rows)
    assert watch.launches + launched == Counter(CHOICES)
    assert not watch.copied_in and not watch.copied_out


def test_one_kernel_a_layer_if_it_merges_and_all_start_early_if_asked(
    launched: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """56 launches fewer, and no kernel of a step waits until the one before has drained."""
    kernel_config = dict.fromkeys(
        ("merge_in_attention", "dependent_launch", "split_products"), True
    )
    variant = make_runner(tmp_path, enforce_eager=True, kernel_config=kernel_config)
    for module in (dependent_launch, paged_attention, store_kv):
        monkeypatch.setattr(module, "has_dependent_launch", lambda: True)
    count, starts_early = GridExecutor.__call__, Counter[str]()

    def look(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        starts_early[self.fn.__name__] += kwargs.get("launch_pdl", False)
        count(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", look)
    step(variant, 16, changes(16))
    launched.clear()
    starts_early.clear()
    watch = step(variant, 16, [])
    launches, attention = split_attention(watch.launches + launched)
    split, other = 4 * NUM_LAYERS, {"_act_and_mul": NUM_LAYERS, "aten::linear": 4 * NUM_LAYERS}
    assert launches == of_the_model() + Counter(BESIDE) - Counter(other)
    assert launched["_split_linear"] == split and attention == NUM_LAYERS + split
    assert starts_early == launched and len(launched) == 6


def test_settings_travel_when_a_slot_changes(runner: ModelRunner) -> None:
    step(runner, 16, changes(16))  # each slot has its settings, before one of them changes
    watch = step(runner, 16, changes(1))
    assert watch.copied_in[1:] == [MAX_ROWS * 32]


# A chunk's attention beside that of decode rows, and the merge of their parts.
MOST_MIXED_ATTENTION = 3


@pytest.mark.parametrize("prompts", [(40,), (700, 3000, 4000)], ids=str)
def test_what_the_host_launches_of_a_mixed_step(
    runner: ModelRunner, mixed: ModelRunner, launched: Counter[str], prompts: tuple[int, ...]
) -> None:
    """Of some 310 launches that find the GPU waiting, those beside the model are left."""
    num_rows, counted = 20, []
    for each in (runner, mixed):
        # The first of them brings the settings.
        step(each, num_rows, changes(num_rows + len(prompts)), prompts)
        launched.clear()
        each.device.cuda.events.clear()
        watch = step(each, num_rows, [], prompts)
        assert len(watch.copied_in) == 1 and watch.copied_out == [8 * (num_rows + len(prompts))]
        counted.append(split_attention(watch.launches + launched))
    (eager, of_eager), (replayed, of_replayed) = counted
    assert eager == of_the_model() + Counter(BESIDE) and eager.total() > 240
    assert 2 * NUM_LAYERS <= of_eager <= MOST_MIXED_ATTENTION * NUM_LAYERS
    assert replayed == Counter(BESIDE) and of_replayed == 0
    assert mixed.device.cuda.events == ["replay"]


def test_what_a_graph_of_mixed_steps_records(mixed: ModelRunner, launched: Counter[str]) -> None:
    """No more than a mixed step launches: what it does not need is left out on the GPU."""
    program = mixed.device.programs[-1]
    launched.clear()
    with Watch() as watch, torch.inference_mode():
        assert program.launch(8192).shape == (8192, 1024)
    launches, attention = split_attention(watch.launches + launched)
    assert launches == of_the_model() + Counter({"aten::copy_": 1})  # to where all leave theirs
    assert attention == MOST_MIXED_ATTENTION * NUM_LAYERS
    assert not watch.copied_in and not watch.copied_out
