"""Decode steps whose tokens are chosen in a graph: which they are; and nothing else changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from count_replays import choices, count_replays
from fake_cuda import GIB, FakeCuda
from packed_batches import make_plan, make_sequence

from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.torch import TorchAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import ForwardInputs, SampleInputs, SlotUpdate
from nanoserve.engine.guard import GuardedEngine
from nanoserve.models.layers.context import LayerContext
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.sampling_program import SamplingProgram

Requests = list[tuple[list[int], SamplingParams]]
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])


class CapturableTorchAttention(TorchAttention):
    """In a graph that is a function which is called again, everything can be."""

    capturable = True


@pytest.fixture(autouse=True)
def no_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted here: its sampling takes seconds, and is tested elsewhere."""
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, runner: None)


def make_runner(
    path: Path, cuda: FakeCuda, attention: AttentionBackend | None = None, **options: Any
) -> ModelRunner:
    options = {"num_kv_blocks": 60, "max_num_seqs": 5, "capture_sampling": True} | options
    config = EngineConfig(str(path), **options).for_device("cuda")
    context = LayerContext(attention=attention or CapturableTorchAttention())
    device = CudaDevice(config, cuda, context.attention.capturable)
    return ModelRunner.load(config, ModelConfig.from_checkpoint(path), path, context, device)


def make_engine(path: Path, ahead: bool = True, **options: Any) -> tuple[GuardedEngine, list[int]]:
    """And a list that gets the size of each graph of choices that is replayed."""
    runner = make_runner(path, FakeCuda(), async_scheduling=ahead, **options)
    sizes = count_replays(choices(runner.device))
    return GuardedEngine(runner.config, runner.model_config, runner, tokenizer=None), sizes


def run(engine: GuardedEngine, requests: Requests) -> list[list[int]]:
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    engine.scheduler.check()
    return [c.token_ids for i in range(len(requests)) for c in done[str(i)].outputs]


def on_cpu(path: Path, requests: Requests) -> list[list[int]]:
    with LLM(path, skip_tokenizer_init=True, device="cpu", num_kv_blocks=60) as llm:
        return run(llm.engine, requests)


def asks(num_tokens: int, **settings: Any) -> SamplingParams:
    common = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
    return SamplingParams(**common | settings)


def plain(count: int, num_tokens: int = 9) -> Requests:
    """Greedy and drawn in turns; each ends at another step, so that slots are used again."""
    return [
        ([i + 1, 7, 2 * i], asks(num_tokens + i % 4, temperature=0.8 * (i % 2), seed=i))
        for i in range(count)
    ]


@pytest.mark.small(num_requests=[3, 7], ahead=[True])
@AHEAD
@pytest.mark.parametrize("num_requests", [1, 3, 7, 12])
def test_plain_steps_are_chosen_in_graphs_with_the_tokens_of_a_cpu(
    checkpoint: Path, num_requests: int, ahead: bool
) -> None:
    """Also with rows that fill a graph up, and with more requests than slots."""
    engine, sizes = make_engine(checkpoint, ahead)
    headers = []
    engine.observers.append(lambda plan, batch, result, times: headers.append(batch.header))
    requests = plain(num_requests)
    assert run(engine, requests) == on_cpu(checkpoint, requests)
    decoding = [header for header in headers if header.max_query_len == 1]
    assert len(sizes) == len(decoding) >= 8
    if num_requests == 3:
        assert any(size > header.num_rows for size, header in zip(sizes, decoding, strict=True))
    assert any(header.num_pending for header in decoding) is ahead


@pytest.mark.small(ahead=[True])
@AHEAD
@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": 1},
        {"temperature": 0.9, "top_k": 5, "seed": 3},
        {"temperature": 0.9, "min_p": 0.1, "seed": 3},
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 4.0}},
        {"logits_processors": [lambda token_ids, logits: logits + 1]},
    ],
    ids=lambda settings: [*settings][-1],
)
def test_as_long_as_one_row_asks_for_more_none_is_chosen_in_a_graph(
    checkpoint: Path, settings: dict[str, Any], ahead: bool, by_size: Callable[..., int]
) -> None:
    """And when it has ended, the others are."""
    engine, sizes = make_engine(checkpoint, ahead)
    num_tokens = by_size(2, 5)
    requests = [*plain(2, by_size(5, 12)), ([9, 8], asks(num_tokens, **settings))]
    counts = []
    engine.observers.append(lambda plan, batch, result, times: counts.append(batch.header.num_rows))
    assert run(engine, requests) == on_cpu(checkpoint, requests)
    assert counts.count(3) >= num_tokens and sizes == [1 if n == 1 else 2 for n in counts if n < 3]


@pytest.mark.small(ahead=[True])
@AHEAD
def test_a_token_in_the_middle_of_a_prompt_is_not_sampled(checkpoint: Path, ahead: bool) -> None:
    """Its row looks like any that decodes. Nor is what a head wants of it forgotten."""
    engine, sizes = make_engine(checkpoint, ahead, long_prefill_token_threshold=1)
    requests = [*plain(2), (list(range(6)), asks(3)), ([5, 6, 7, 8], asks(9, prompt_logprobs=1))]
    assert run(engine, requests) == on_cpu(checkpoint, requests)
    assert 0 < len(sizes) < engine.stats.num_steps


def test_settings_arrive_before_a_graph_that_goes_by_them(checkpoint: Path) -> None:
    """A prompt of one token begins in a graph, in the slot that another sequence has left."""
    engine, sizes = make_engine(checkpoint, max_num_seqs=1)
    requests = [([i], asks(2, temperature=1.5 * (i % 2), seed=i)) for i in range(8)]
    assert run(engine, requests) == on_cpu(checkpoint, requests)
    assert len(sizes) == 16 == engine.stats.num_steps


def keeps_for_nobody_in_slot_0(engine: GuardedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.executor.device.programs[0], "_padding_slot", 0)


def brings_settings_too_late(engine: GuardedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.executor.sampler, "update_settings", lambda: None)


@pytest.mark.parametrize("plant", [keeps_for_nobody_in_slot_0, brings_settings_too_late])
def test_a_planted_fault_is_another_token(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[GuardedEngine, pytest.MonkeyPatch], None],
) -> None:
    engine, _ = make_engine(checkpoint)
    requests = plain(3)
    plant(engine, monkeypatch)
    assert run(engine, requests) != on_cpu(checkpoint, requests)


@pytest.mark.small(ahead=[True])
@AHEAD
def test_a_row_without_a_token_ends_its_request_alone(checkpoint: Path, ahead: bool) -> None:
    """One row of the embedding is broken, and one request comes to it."""
    engine, sizes = make_engine(checkpoint, ahead)
    requests = [([5, 6], asks(6)), ([7], asks(6, temperature=0.7, seed=2))]
    alone = run(engine, requests)
    engine.executor.model.model.embed_tokens.weight[250, 3] = torch.nan
    sizes.clear()
    for i, (prompt, params) in enumerate([*requests, ([250], asks(6))]):
        engine.add_request(str(i), prompt, params)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert [done[str(i)].outputs[0].token_ids for i in range(3)] == [*alone, []]
    assert isinstance(done["2"].error, FloatingPointError) and sizes
    assert done["0"].error is done["1"].error is None


def test_memory_of_both_kinds_of_graphs_is_counted(checkpoint: Path) -> None:
    """Each kind has a pool of its own; what is left is the KV cache's."""
    took = {"pool_bytes": 40 * 2**20, "graph_bytes": 2**20, "stream_bytes": 32 * 2**20}
    cuda = FakeCuda(total=GIB, free=GIB, **took)
    options = {"num_kv_blocks": None, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    runner = make_runner(checkpoint, cuda, **options)
    assert isinstance(runner.device.programs[0], SamplingProgram)
    assert cuda.free == GIB - (2 * 40 + 32 + 2 * 3) * 2**20
    block_bytes = runner.kv_cache_layout.block_bytes
    used = GIB - cuda.free + block_bytes * (runner.num_kv_blocks + 1)
    assert used <= 0.9 * GIB < used + 2 * block_bytes


def test_close_lets_go_of_both(checkpoint: Path) -> None:
    engine, _ = make_engine(checkpoint)
    run(engine, plain(2))
    runner = engine.executor
    engine.close()
    assert not runner.device.programs and runner.last_token is None
    for part in (runner, runner.device):
        assert not [name for name, value in vars(part).items() if isinstance(value, torch.Tensor)]


def test_what_cannot_be_captured_is_refused(checkpoint: Path) -> None:
    for other in ({"enforce_eager": True}, {"tensor_parallel_size": 2}):
        with pytest.raises(ValueError, match="capture_sampling=True requires enforce_eager=False"):
            EngineConfig(str(checkpoint), capture_sampling=True, **other)
    with pytest.raises(ValueError, match=r"attention_backend='torch' cannot be part of a CUDA"):
        make_runner(checkpoint, FakeCuda(), TorchAttention(), attention_backend="torch")


class Only:
    """A token mask that leaves one token."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def first_illegal(self, token_ids: list[int]) -> int | None:
        return next((i for i, token in enumerate(token_ids) if token != self.token_id), None)

    def fill(self, index: int, mask: np.ndarray) -> None:
        mask[:] = 0
        mask[self.token_id // 32] = 1 << self.token_id % 32


def test_a_mask_that_comes_after_the_choice_is_obeyed(checkpoint: Path) -> None:
    """Whoever brings it has told nobody, and the graph has kept another token for the next step."""
    runner = make_runner(checkpoint, FakeCuda(), async_scheduling=True)
    tables = np.arange(1, 11, dtype=np.int32).reshape(1, 5, 2)
    rows = {make_sequence(4, 3, slot): 1 for slot in (2, 0, 1)}
    updates = [SlotUpdate(slot, asks(9), seed=slot) for slot in range(3)]

    def step(inputs: SampleInputs) -> list[list[int]]:
        batch = runner.next_batch()
        batch.pack(make_plan(rows), tables, block_size=16)
        handle = runner.forward(batch, ForwardInputs(updates))
        assert handle.chosen is not None
        runner.sample(handle, inputs)
        return runner.collect(handle).token_ids

    free = step(SampleInputs())
    assert len(free) == 3 and free[1] != [77]
    assert step(SampleInputs(token_masks={0: Only(77)})) == [free[0], [77], free[2]]
    assert runner.last_token[[2, 0, 1]].tolist() == [*free[0], 77, *free[2]]
    assert step(SampleInputs()) == free


def test_requests_with_a_grammar_are_not_chosen_in_a_graph(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, FakeCuda())
    tables = np.arange(1, 11, dtype=np.int32).reshape(1, 5, 2)
    batch = runner.next_batch()
    batch.pack(make_plan({make_sequence(4, 3, slot): 1 for slot in (2, 0)}), tables, block_size=16)
    guided = asks(9, structured_outputs=StructuredOutputsParams(regex="[ab]+"))
    sampling = runner.device.programs[0]
    runner.fill_slots([SlotUpdate(0, asks(9), seed=0)])
    for params, covered in ((asks(9), True), (guided, False), (asks(9, seed=3), True)):
        runner.fill_slots([SlotUpdate(2, params, seed=0)])
        assert sampling.covers(batch, batch.header) is covered
