"""The runner of a GPU on a CPU: everything but the hardware, see `fake_cuda`.

Its graphs are functions that are called again, its page-locked memory is plain memory, and its
device buffer is a second tensor: what is not copied there is not seen. So buckets, padding,
buffers, sampling settings and the sizing of the pool are tested end to end.
"""

import json
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from count_replays import count_replays
from fake_cuda import GIB, FakeCuda
from packed_batches import make_plan, make_sequence
from proposers import Mixed, Oracle, Wrong
from stale_memory import poison_what_is_stale
from tiny_checkpoints import DELTA, DELTA_MOE, GEMMA2, make_checkpoint, make_qwen3
from toy_computation import toy_computation
from transformers import (
    Gemma2ForCausalLM,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3NextForCausalLM,
)

from nanoserve import LLM, SamplingParams
from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.torch import TorchAttention
from nanoserve.attention.triton import TritonAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.executor import ForwardInputs, SecondModelMemory
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.kv_groups import kv_cache_groups
from nanoserve.features.parallel.tensor_parallel import options_of_workers
from nanoserve.features.speculative.config import METHODS
from nanoserve.features.speculative.extension import Speculation
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.models.layers.triton_ops import TritonOps
from nanoserve.sampling.fused_sampler import FusedSampler
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.build_executor import attention_options
from nanoserve.worker.cuda_device import CudaDevice, Fetched
from nanoserve.worker.draft_program import DraftProgram, fill_rows
from nanoserve.worker.gpu_memory import GPUMemory
from nanoserve.worker.graph_programs import DecodeProgram
from nanoserve.worker.kv_cache import kv_block_bytes
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.sampling_program import SamplingProgram

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def no_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted here, and its sampling takes a second: for tests of later steps."""
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, runner: None)


def make_runner(
    path: Path,
    cuda: FakeCuda,
    attention: AttentionBackend | None = None,
    is_capturable: bool = True,
    parallel: ParallelContext | None = None,
    **options: Any,
) -> ModelRunner:
    """Torch's attention could not be part of a real graph, because of its `tolist`; here it is."""
    config = EngineConfig(str(path), **options).for_device("cuda")
    model_config = ModelConfig.from_checkpoint(path)
    attention = attention or TorchAttention()
    context = LayerContext(parallel=parallel or ParallelContext(), attention=attention)
    if config.attention_backend == "triton":
        attention = TritonAttention(**attention_options("triton", config))
        context = LayerContext(attention=attention, ops=TritonOps())
    device = CudaDevice(config, cuda, is_capturable)
    return ModelRunner.load(config, model_config, path, context, device)


def make_engine(path: Path, cuda: FakeCuda, **options: Any) -> GuardedEngine:
    runner = make_runner(path, cuda, **options)
    return GuardedEngine(runner.config, runner.model_config, runner, tokenizer=None)


def run(engine: GuardedEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [done[str(i)] for i in range(len(requests))]


def requests(count: int, params: list[SamplingParams]) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 40 tokens, some of which share their beginning."""
    return [
        ([(7 * j + (i % 3)) % 300 for j in range(1 + 11 * i % 40)], params[i % len(params)])
        for i in range(count)
    ]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For attention that is interpreted, which takes its time by token, head and layer."""
    path = tmp_path_factory.mktemp("one_layer")
    make_qwen3(path, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    return path


@pytest.fixture(scope="module")
def asked(by_size: Callable[..., Any]) -> list[tuple[list[int], SamplingParams]]:
    count, max_tokens = by_size((7, 6), (12, 9), (22, 9))
    return requests(count, [replace(kind, max_tokens=max_tokens) for kind in ALL_KINDS])


@pytest.fixture(scope="module")
def expected(checkpoint: Path, asked: list[tuple[list[int], SamplingParams]]) -> dict[str, Any]:
    """What the CPU engine answers to `asked`."""
    with LLM(checkpoint, skip_tokenizer_init=True, device="cpu", max_num_seqs=11) as llm:
        outputs = run(llm.engine, asked)
    return {"tokens": tokens(outputs), "outputs": outputs}


COMMON: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
ALL_KINDS = [
    SamplingParams(temperature=0, **COMMON),
    SamplingParams(temperature=0.8, seed=2**40 + 7, **COMMON),
    SamplingParams(temperature=1.3, seed=2**64 - 5, top_k=20, top_p=0.9, **COMMON),
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2, **COMMON),
    SamplingParams(temperature=0.7, seed=1, n=3, prompt_logprobs=1, **COMMON),
    SamplingParams(temperature=0.9, seed=3, logprobs=0, frequency_penalty=0.5, **COMMON),
]


def watch_pending(engine: GuardedEngine) -> list[int]:
    """How many tokens of each step only the device knows, once the engine has run."""
    pending: list[int] = []
    engine.observers.append(
        lambda plan, batch, result, times: pending.append(batch.header.num_pending)
    )
    return pending


@pytest.mark.small(options=[{"num_kv_blocks": 8}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 16},
        {"block_size": 1},
        {"num_kv_blocks": 8},
        {"enable_prefix_caching": False, "long_prefill_token_threshold": 1},
        {"async_scheduling": False, "enforce_eager": True, "max_num_batched_tokens": 16},
        {"async_scheduling": False, "num_kv_blocks": 8},
        {"capture_sampling": True, "num_kv_blocks": 8},
        {"capture_sampling": True, "async_scheduling": False, "long_prefill_token_threshold": 1},
    ],
    ids=str,
)
def test_every_kind_of_request_gets_what_the_cpu_gives(
    checkpoint: Path,
    asked: list[tuple[list[int], SamplingParams]],
    expected: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Among 11 sequences at a time, so that decode steps need padding to 8 and 11."""
    cuda = FakeCuda()
    if "num_kv_blocks" in options:
        options = options | {"max_model_len": 100}
    engine = make_engine(checkpoint, cuda, max_num_seqs=11, **options)
    poison_what_is_stale(engine.executor)
    pending = watch_pending(engine)
    outputs = run(engine, asked)
    assert tokens(outputs) == expected["tokens"]
    assert any(pending) is options.get("async_scheduling", True)
    for ours, theirs in zip(outputs, expected["outputs"], strict=True):
        if theirs.prompt_logprobs is not None:
            assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)
    replayed = {event for event in cuda.events if event.startswith("replay")}
    assert bool(replayed) is not options.get("enforce_eager", False)
    assert bool(engine.stats.num_preemptions) is ("num_kv_blocks" in options)
    engine.scheduler.check()


def test_with_its_own_kernels_it_gives_what_the_cpu_gives(
    checkpoint: Path, one_layer: Path, full_size: bool, by_size: Callable[..., Path]
) -> None:
    """Everything that a GPU runs: decode and chunks mixed, preemption, prefix hits, padding."""
    checkpoint = by_size(one_layer, one_layer, checkpoint)
    block = 16 if full_size else 8  # and prompts of half as many tokens
    options: dict[str, Any] = {"num_kv_blocks": 5, "max_model_len": 4 * block, "block_size": block}
    options |= {"max_num_seqs": 3, "max_num_batched_tokens": 3 * block // 2}
    shared = list(range(100, 100 + 2 * block - 2))
    max_tokens = 9 if full_size else 2
    greedy, seeded, filtered = (replace(kind, max_tokens=max_tokens) for kind in ALL_KINDS[:3])
    asked = [([*shared, 0], greedy), (list(range(3 * block - 3)), greedy)]
    asked += [([*shared, 0, 9], filtered), ([7], seeded)]
    if full_size:
        asked += [([*shared, 1], seeded), ([*shared, 2], greedy)]
    engine = make_engine(checkpoint, FakeCuda(), attention_backend="triton", **options)
    outputs = run(engine, asked)
    with LLM(checkpoint, skip_tokenizer_init=True, device="cpu", **options) as llm:
        assert tokens(outputs) == tokens(run(llm.engine, asked))
    assert engine.stats.num_preemptions > 0 and engine.stats.prefix_cache_hits > 0


@pytest.mark.usefixtures("no_worst_case")
@pytest.mark.small(architecture=[Qwen3_5ForCausalLM])
@pytest.mark.parametrize("architecture", [Qwen3_5ForCausalLM, Qwen3NextForCausalLM])
def test_queries_beside_gates_are_in_rows_for_tritons_norms(
    architecture: Any, tmp_path: Path
) -> None:
    """Of one token, too: those of several are copied in any case."""
    sizes = DELTA | (DELTA_MOE if architecture is Qwen3NextForCausalLM else {})
    make_checkpoint(architecture, tmp_path, **sizes)
    options = {"num_kv_blocks": 20, "max_num_seqs": 3, "max_model_len": 60}
    options |= {"max_num_batched_tokens": 20, "enable_prefix_caching": False}
    asked = [(prompt, replace(GREEDY, max_tokens=3)) for prompt in ([1], [2, 3, 4])]
    engine = make_engine(tmp_path, FakeCuda(), attention_backend="triton", **options)
    outputs = run(engine, asked)
    with LLM(tmp_path, skip_tokenizer_init=True, device="cpu", **options) as llm:
        assert tokens(outputs) == tokens(run(llm.engine, asked))


@pytest.mark.usefixtures("no_worst_case")
def test_graphs_are_replayed_at_the_next_captured_size_and_only_for_decode_steps(
    checkpoint: Path,
) -> None:
    cuda = FakeCuda()
    engine = make_engine(checkpoint, cuda, max_num_seqs=11, num_kv_blocks=200)
    captures = ["capture 11", "capture 8", "capture 4", "capture 2", "capture 1"]
    assert cuda.events == ["release", *captures]
    cuda.events.clear()
    rows = []
    engine.observers.append(lambda plan, batch, result, times: rows.append(batch.header.num_rows))
    lengths = [3, 5, 9, 9, 12]
    run(
        engine,
        [
            ([i + 1] * 5, SamplingParams(**COMMON | {"max_tokens": n}))
            for i, n in enumerate(lengths)
        ],
    )
    assert rows == [5] * 3 + [4] * 2 + [3] * 4 + [1] * 3  # the first step is the prefill
    sizes = {5: 8, 4: 4, 3: 4, 1: 1}
    assert cuda.events == [f"replay {sizes[n]}" for n in rows[1:]]


@pytest.mark.usefixtures("no_worst_case")
def test_a_request_up_to_the_last_block_of_the_longest_sequence(checkpoint: Path) -> None:
    """Other engines' graphs had a block table one column short there."""
    options = {"max_model_len": 64, "block_size": 16, "max_num_seqs": 2}
    engine = make_engine(checkpoint, FakeCuda(), **options)
    prompt = list(range(50))
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = run(engine, [(prompt, params)])
    assert len(output.outputs[0].token_ids) == 14
    with LLM(checkpoint, skip_tokenizer_init=True, device="cpu", **options) as llm:
        (theirs,) = run(llm.engine, [(prompt, params)])
    assert output.outputs[0].token_ids == theirs.outputs[0].token_ids


@pytest.mark.usefixtures("no_worst_case")
@pytest.mark.small(async_scheduling=[True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_wait_per_step_and_nothing_else_copied_in(
    checkpoint: Path, async_scheduling: bool
) -> None:
    engine = make_engine(checkpoint, FakeCuda(), max_num_seqs=4, async_scheduling=async_scheduling)
    device, copies, fetches = engine.executor.device, [], []
    copy_in, fetch = device.buffers.copy_in, device.fetch

    def counted_copy(batch: Batch, header: BatchHeader) -> torch.Tensor:
        copies.append(header.num_rows)
        return copy_in(batch, header)

    def counted_fetch(token_ids: torch.Tensor) -> Fetched:
        fetches.append(fetch(token_ids))
        return fetches[-1]

    device.buffers.copy_in, device.fetch = counted_copy, counted_fetch
    run(engine, [([1, 2, 3], GREEDY), ([4, 5], GREEDY), ([6], GREEDY)])
    assert [fetched.done.num_waits for fetched in fetches] == [1] * engine.stats.num_steps
    assert copies == [3] + [4] * (len(copies) - 1) and len(copies) == len(fetches)


@pytest.mark.usefixtures("no_worst_case")
def test_a_step_inside_a_prompt_is_waited_for_too(checkpoint: Path) -> None:
    """It yields nothing, but other ranks may still read its batch when this one has the next."""
    engine = make_engine(checkpoint, FakeCuda(), max_num_seqs=4, max_num_batched_tokens=16)
    device, fetches = engine.executor.device, []
    fetch = device.fetch

    def counted_fetch(token_ids: torch.Tensor) -> Fetched:
        fetches.append(fetch(token_ids))
        return fetches[-1]

    device.fetch = counted_fetch
    run(engine, [(list(range(60)), GREEDY)])
    assert [len(fetched.token_ids) for fetched in fetches] == [0] * 3 + [1] * GREEDY.max_tokens
    assert all(fetched.done.num_waits == 1 for fetched in fetches)


@pytest.mark.usefixtures("no_worst_case")
def test_two_batches_take_turns_each_when_its_last_copy_is_over(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, FakeCuda(), num_kv_blocks=8, max_num_seqs=4)
    first, second = runner.batches
    assert first.memory.ctypes.data + runner.layout.num_bytes == second.memory.ctypes.data
    plan, copied = make_plan({make_sequence(3, 0, slot=0): 3}), {}
    for step in range(6):
        batch = runner.next_batch()
        assert batch is (first, second)[step % 2] and batch.step == step
        assert all(copied[b].is_over is (b is batch) for b in copied)
        batch.pack(plan, np.ones((1, 4, 8), np.int32), block_size=16)
        assert batch.header.step == step
        runner.forward(batch, ForwardInputs())
        copied[batch] = runner.device.buffers._copied[batch.memory.ctypes.data]
    assert copied[first] is not copied[second]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_block_tables_travel_narrow_and_arrive_at_the_stride_that_graphs_know(
    num_groups: int,
) -> None:
    """A step's tables are as wide as its longest context; what an earlier one left is not seen."""
    config = EngineConfig("m", max_num_seqs=4, block_size=4)
    device, layout = (
        CudaDevice(config, FakeCuda(), is_capturable=True),
        BatchLayout(64, 4, 8, num_groups=num_groups),
    )
    given: list[torch.Tensor] = []

    def forward(
        tensors: BatchTensors, header: BatchHeader, block_tables: torch.Tensor
    ) -> torch.Tensor:
        """In the place of hidden states: the block tables as attention would be given them."""
        given.append(block_tables)
        return block_tables.transpose(0, 1).clone()  # as hidden states have it, rows first

    last_token = torch.zeros(4, dtype=torch.int32)
    computation = toy_computation(forward, last_token)
    device.prepare(layout, computation)
    device.programs = device._capture(device._computation, device.graph_sizes)
    memory = device.buffers._memory
    full = np.arange(1, 32 * num_groups + 1, dtype=np.int32).reshape(num_groups, 4, 8)
    batch = Batch(layout, np.full(layout.num_bytes, 0xAA, dtype=np.uint8))

    def run(num_new: dict[int, int], length: int) -> torch.Tensor:
        """So many tokens of the sequences in some slots; the tables that their rows are given."""
        memory.fill_(0x55)
        sequences = {make_sequence(length, length - n, slot): n for slot, n in num_new.items()}
        batch.pack(make_plan(sequences), full, block_size=4)
        given.clear()
        hidden = device.run(batch, batch.header, last_token, computation.forward).hidden
        assert given and all(tables.stride() == (32, 8, 1) for tables in given)
        used = batch.num_bytes_used(batch.header._replace(num_rows=len(hidden)))
        assert (memory[used:] == 0x55).all() and used < layout.num_bytes
        return hidden.transpose(0, 1)

    def tables(slots: list[int], width: int, num_dummies: int) -> list[Any]:
        dummies = np.zeros((num_groups, num_dummies, width), dtype=np.int32)
        return np.concatenate([full[:, slots, :width], dummies], axis=1).tolist()

    # Beside a dummy row, since there is no graph of three; in one of its own; without a graph.
    assert run({3: 1, 1: 1, 0: 1}, length=27)[..., :7].tolist() == tables([3, 1, 0], 7, 1)
    assert run({2: 1}, length=9)[..., :3].tolist() == tables([2], 3, 0)
    assert run({1: 1, 2: 1, 0: 1}, length=5)[..., :2].tolist() == tables([1, 2, 0], 2, 1)
    assert run({0: 3, 3: 5}, length=16)[..., :4].tolist() == tables([0, 3], 4, 0)


@pytest.mark.size("full")
@pytest.mark.usefixtures("no_worst_case")
def test_two_engines_do_not_touch_each_other(
    checkpoint: Path,
    asked: list[tuple[list[int], SamplingParams]],
    expected: dict[str, Any],
) -> None:
    engines = [make_engine(checkpoint, FakeCuda(), max_num_seqs=11) for _ in range(2)]
    for engine in engines:
        for i, (prompt, params) in enumerate(asked):
            engine.add_request(str(i), prompt, params)
    done: list[dict[str, Any]] = [{}, {}]
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, outputs in zip(engines, done, strict=True):
            outputs |= {o.request_id: o for o in engine.step() if o.finished}
    for outputs in done:
        answers = [outputs[str(i)] for i in range(len(asked))]
        assert tokens(answers) == tokens(expected["outputs"])


@pytest.mark.usefixtures("no_worst_case")
def test_close_lets_go_of_everything(checkpoint: Path) -> None:
    """When all that was launched is over: also a step that nobody will collect."""
    cuda = FakeCuda()
    engine = make_engine(checkpoint, cuda, max_num_seqs=4, async_scheduling=True)
    runner = engine.executor
    engine.add_request("r", [1, 2, 3], GREEDY)
    engine.step()
    batches = [weakref.ref(batch) for batch in runner.batches]
    engine.close()
    assert cuda.events[-3:] == ["synchronize", "close", "release"]
    for part in (runner, runner.device):
        assert not [name for name, value in vars(part).items() if isinstance(value, torch.Tensor)]
    assert not [batch for batch in batches if batch() is not None]  # nor page-locked memory
    assert not runner.device.programs and runner.device.buffers is None
    assert runner.model is runner.sampler is runner._computation is None


@pytest.mark.usefixtures("no_worst_case")
def test_batches_in_memory_from_elsewhere_are_page_locked_until_the_end(checkpoint: Path) -> None:
    cuda = FakeCuda()
    engine = make_engine(checkpoint, cuda, max_num_seqs=2)
    runner = engine.executor
    assert not [event for event in cuda.events if event.startswith("lock")]
    num_bytes = 2 * runner.layout.num_bytes
    memory = np.zeros(num_bytes, dtype=np.uint8)
    runner.use_memory(memory)
    assert cuda.events[-1] == f"lock {num_bytes}"
    run(engine, [([1, 2, 3], GREEDY)])
    assert memory.any()
    engine.close()
    assert cuda.events[-3:] == ["synchronize", "close", "release"]


# ---------------------------------------------------------------- the size of the pool


@pytest.mark.small(max_num_seqs=[4, 1])
@pytest.mark.parametrize(
    ("max_num_seqs", "measured", "sizes"),
    [(4, [1, 4, 4, 2], [4, 2, 1]), (1, [1, 1, 1], [1]), (9, [1, 9, 9, 8], [9, 8, 4, 2, 1])],
)
def test_the_pool_takes_what_the_worst_case_and_the_graphs_leave(
    checkpoint: Path, max_num_seqs: int, measured: list[int], sizes: list[int]
) -> None:
    """The largest graph and the one after it show what all of them will take."""
    took = {"pool_bytes": 40 * 2**20, "graph_bytes": 2**20, "stream_bytes": 32 * 2**20}
    cuda = FakeCuda(total=GIB, free=GIB, **took)
    cuda.peak = 100 * 2**20
    runner = make_runner(checkpoint, cuda, max_num_seqs=max_num_seqs, max_num_batched_tokens=32)
    block_bytes = kv_block_bytes(runner.config, runner.model_config)
    left = int(0.9 * GIB) - (100 + 40 + 32 + len(sizes)) * 2**20
    assert runner.num_kv_blocks == left // block_bytes - 1
    assert runner.max_model_len == 512
    # A few against a pool of one block, to measure them, and then each of them once.
    captures = [event for event in cuda.events if event != "release"]
    assert captures == ["reset", *(f"capture {size}" for size in measured + sizes)]
    assert cuda.free == GIB - (40 + 32 + len(sizes)) * 2**20  # those that measured are gone


@pytest.mark.usefixtures("no_worst_case")
@pytest.mark.parametrize("without", [{"enforce_eager": True}, {"is_capturable": False}], ids=str)
def test_without_graphs_none_is_measured(checkpoint: Path, without: dict[str, bool]) -> None:
    cuda = FakeCuda(total=GIB, free=GIB, pool_bytes=2**20, graph_bytes=2**20)
    runner = make_runner(checkpoint, cuda, max_num_seqs=4, max_num_batched_tokens=32, **without)
    assert not runner.device.programs and cuda.free == GIB
    block_bytes = runner.kv_cache_layout.block_bytes
    assert runner.num_kv_blocks == int(0.9 * GIB) // block_bytes - 1


class Watched(TorchAttention):
    """Keeps what it was given, once a layer."""

    def __init__(self) -> None:
        self.steps: list[AttentionMetadata] = []

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, kv_cache: Any, metadata: AttentionMetadata
    ) -> torch.Tensor:
        self.steps.append(metadata)
        return super().attend(layer, q, kv_cache, metadata)


def test_the_worst_case_is_a_full_batch(checkpoint: Path) -> None:
    attention = Watched()
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 30, "enforce_eager": True}
    make_runner(checkpoint, FakeCuda(), attention, **options)
    first = attention.steps[0]
    assert (len(first.positions), first.num_rows, first.num_decode_rows) == (30, 4, 0)
    assert first.max_query_len == 8


@pytest.mark.parametrize(("budget", "outputs"), [(30, 16), (10, 10)])
def test_the_worst_case_has_the_logits_of_draft_tokens(
    checkpoint: Path, budget: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more row of logits for each; and a sampler may copy all of them, in float32."""
    found: list[tuple[int, list[int], list[int]]] = []
    sample = FusedSampler.sample

    def recorded(sampler: FusedSampler, logits: Any, slots: Any, *rest: Any) -> Any:
        tensors = rest[-1]
        on_device = tensors.output_slots[: len(logits)].tolist()
        found.append((len(logits), slots.tolist(), on_device))
        return sample(sampler, logits, slots, *rest)

    monkeypatch.setattr(FusedSampler, "sample", recorded)
    monkeypatch.setattr(CudaDevice, "_compile", lambda device, executor: None)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": budget, "speculative_config": DRAFTS}
    make_runner(checkpoint, FakeCuda(), enforce_eager=True, **options)
    slots = [row % 4 for row in range(outputs)]
    assert found == [(outputs, slots, slots)]


def test_a_draft_method_of_rank_0_is_not_looked_for_by_the_others(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(METHODS, "_entries", METHODS.entries())
        METHODS.register("echo", "toy_drafts:prepare_echo")
        drafts = {"method": "echo", "num_speculative_tokens": 5, "enforce_eager": False}
        config = EngineConfig(str(checkpoint), speculative_config=drafts, tensor_parallel_size=2)
        options = json.loads(json.dumps(options_of_workers(config.for_device("cuda"))))
    theirs = EngineConfig(**options).speculative_config
    assert (theirs.num_speculative_tokens, theirs.enforce_eager) == (5, False)


def test_ranks_keep_the_same_blocks_beside_a_draft_model(tmp_path: Path) -> None:
    """It needs what is behind a window, also where no graph of its rows is recorded."""
    make_checkpoint(MistralForCausalLM, tmp_path, sliding_window=9)
    model_config = ModelConfig.from_checkpoint(tmp_path)
    drafts = {"method": "draft_model", "model": "any"}
    options = {"speculative_config": drafts, "tensor_parallel_size": 2}
    config = EngineConfig(str(tmp_path), **options, disable_hybrid_kv_cache_manager=False)
    theirs = EngineConfig(**json.loads(json.dumps(options_of_workers(config))))
    groups = [kv_cache_groups(each, model_config) for each in (config, theirs)]
    assert groups[0] == groups[1] and groups[0][0].window is None


@pytest.mark.small(max_num_seqs=[1, 2])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4])
def test_attention_over_chunks_is_compiled_before_it_serves(
    checkpoint: Path, max_num_seqs: int
) -> None:
    """Also where a step has no more tokens than sequences: one token for each would not do it."""
    attention = Watched()
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_seqs}
    make_runner(checkpoint, FakeCuda(), attention, **options)
    first = attention.steps[0]
    assert (len(first.positions), first.max_query_len) == (max_num_seqs, min(2, max_num_seqs))


class Loading(FakeCuda):
    """A first step takes memory that is not torch's: libraries do, or another process."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(total=4 * GIB, free=4 * GIB - 300 * 2**20)
        self.num_bytes = num_bytes

    def peak_allocated(self) -> int:
        self.free -= self.num_bytes
        return super().peak_allocated()


class GroupOfOne:
    """Its NCCL has taken so much."""

    device_bytes = 200 * 2**20

    def smallest(self, value: int) -> int:
        return value

    def all_reduce(self, x: torch.Tensor) -> None:
        """The sum of one."""

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]


def test_what_cudas_libraries_take_is_part_of_the_share(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though torch knows nothing of it. So almost the whole GPU can be asked for."""
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "gpu_memory_utilization": 0.92}
    cuda = Loading(700 * 2**20)
    parallel = ParallelContext(TensorParallel(group=GroupOfOne()))
    runner = make_runner(checkpoint, cuda, parallel=parallel, **options)
    share = int(0.92 * 4 * GIB) - 900 * 2**20
    assert runner.num_kv_blocks == share // kv_block_bytes(runner.config, runner.model_config) - 1
    assert not caplog.records


def test_another_process_that_starts_beside_it_does_not_shrink_the_share_unseen(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 32}
    with pytest.raises(ValueError, match=r"not enough free.*Other processes.*libraries 1\.00 GiB"):
        make_runner(checkpoint, Loading(3 * GIB), gpu_memory_utilization=0.9, **options)
    assert f"{3 * GIB} bytes of GPU memory were taken" in caplog.text


MEMORY = GPUMemory(total=16 * GIB, free=10 * GIB, weights=2 * GIB, activations=GIB, graphs=GIB)


def num_kv_blocks(memory: GPUMemory, model_config: ModelConfig, **options: Any) -> int:
    config = EngineConfig("m", **options).for_device("cuda")
    return memory.num_kv_blocks(config, model_config, kv_block_bytes(config, model_config))


@pytest.fixture(scope="module")
def model_config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.from_checkpoint(checkpoint)


def test_blocks_fill_the_share_that_was_asked_for(model_config: ModelConfig) -> None:
    """A block of this model is 2 x 2 layers x 2 heads x 16 wide x 4 bytes x 16 tokens = 8 KiB."""
    share = {"gpu_memory_utilization": 0.5}
    assert num_kv_blocks(MEMORY, model_config, **share) == 4 * GIB // 8192 - 1
    assert num_kv_blocks(MEMORY, model_config, **share, block_size=32) == 4 * GIB // 16384 - 1


def test_other_processes_do_not_shrink_the_share_but_must_leave_it_free(
    model_config: ModelConfig,
) -> None:
    for free in (10, 6):  # 4 GiB of blocks, and 2 of activations and graphs
        memory = GPUMemory(16 * GIB, free * GIB, 2 * GIB, GIB, GIB)
        assert num_kv_blocks(memory, model_config, gpu_memory_utilization=0.5) == 2**19 - 1
    memory = GPUMemory(16 * GIB, 5 * GIB, 2 * GIB, GIB, GIB)
    with pytest.raises(ValueError, match=r"1\.00 GiB more than the 5\.00 GiB that are free"):
        num_kv_blocks(memory, model_config, gpu_memory_utilization=0.5)


def test_too_little_memory_is_told_with_its_numbers_and_what_to_lower(
    model_config: ModelConfig,
) -> None:
    numbers = r"0\.25 of 16\.00 GiB is 4\.00 GiB.*2\.00 GiB.*1\.00 GiB.*1\.00 GiB.*Raise"
    with pytest.raises(ValueError, match=numbers) as error:
        num_kv_blocks(MEMORY, model_config, gpu_memory_utilization=0.25)
    assert "max_num_batched_tokens=8192" in str(error.value)
    assert "max_num_seqs=256 1.00 GiB" in str(error.value)
    with pytest.raises(ValueError, match=r"max_num_seqs=256 with 3 draft tokens each 1\.00 GiB"):
        num_kv_blocks(MEMORY, model_config, gpu_memory_utilization=0.25, speculative_config=DRAFTS)


def test_a_huge_gpu_does_not_number_its_slots_beyond_32_bits(model_config: ModelConfig) -> None:
    memory = GPUMemory(2**44, 2**44, 0, 0, 0)
    assert num_kv_blocks(memory, model_config) == 2**20  # plenty
    blocks = num_kv_blocks(memory, model_config, block_size=65536, max_num_seqs=2048)
    assert blocks * 65536 < 2**31


def test_a_second_model_takes_its_weights_graphs_and_blocks(model_config: ModelConfig) -> None:
    """Of 4 GiB for blocks, half a GiB is its weights, and 1 GiB its graphs; and its blocks are as
    many."""
    memory = replace(MEMORY, second_model=SecondModelMemory(weights=GIB // 2, block_bytes=2048))
    share = {"gpu_memory_utilization": 0.5}
    assert num_kv_blocks(memory, model_config, **share) == 5 * GIB // 2 // (8192 + 2048) - 1
    with pytest.raises(ValueError, match=r"a draft model's weights and graphs 1\.50 GiB"):
        num_kv_blocks(memory, model_config, gpu_memory_utilization=0.25)
    with pytest.raises(ValueError, match=r"need 1\.00 GiB more"):
        num_kv_blocks(replace(memory, free=5 * GIB), model_config, **share)


def test_a_second_model_has_no_graphs_of_mixed_steps(model_config: ModelConfig) -> None:
    """And none of any steps if it is a head, without a KV cache."""
    share = {"gpu_memory_utilization": 0.5}
    memory = replace(MEMORY, graphs=GIB // 4, mixed_graphs=3 * GIB // 4)
    assert num_kv_blocks(memory, model_config, **share) == 4 * GIB // 8192 - 1
    model, head = (
        SecondModelMemory(weights=GIB // 2, block_bytes=2048),
        SecondModelMemory(weights=GIB // 2),
    )
    beside = num_kv_blocks(replace(memory, second_model=model), model_config, **share)
    assert beside == 13 * GIB // 4 // (8192 + 2048) - 1
    beside = num_kv_blocks(replace(memory, second_model=head), model_config, **share)
    assert beside == 7 * GIB // 2 // 8192 - 1


def test_a_draft_model_finds_room_beside_a_pool_that_is_sized_by_itself(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, no_worst_case: None
) -> None:
    """Its pool has as many blocks as the target's, which would leave it the last tenth."""
    took = {"pool_bytes": 40 * 2**20, "graph_bytes": 2**20}
    cuda = FakeCuda(total=GIB, free=GIB, **took)
    drafts = {"method": "draft_model", "model": str(checkpoint), "adaptive": False}
    options = {"max_num_seqs": 2, "speculative_config": drafts, "skip_tokenizer_init": True}

    def make_target(
        config: EngineConfig, model_config: ModelConfig, path: Path, second_models: Any
    ) -> ModelRunner:
        device = CudaDevice(config.for_device("cuda"), cuda, True, second_models=second_models)
        return ModelRunner.load(config, model_config, path, LayerContext(), device)

    def make_draft(config: EngineConfig, model_config: ModelConfig, path: Path, _: Any) -> Any:
        (target,) = targets
        cuda.free -= (target.num_kv_blocks + 1) * target.kv_cache_layout.block_bytes
        device = CudaDevice(config.for_device("cuda"), cuda, is_capturable=True)
        drafts = ModelRunner.load(config, model_config, path, LayerContext(), device)
        cuda.free -= (drafts.num_kv_blocks + 1) * drafts.kv_cache_layout.block_bytes
        return drafts

    targets: list[ModelRunner] = []
    monkeypatch.setattr(
        "nanoserve.build.make_executor",
        lambda *args, **named: targets.append(make_target(*args, **named)) or targets[0],
    )
    monkeypatch.setattr("nanoserve.features.speculative.draft_model.make_runner", make_draft)
    with LLM(checkpoint, device="cpu", **options) as llm:
        proposer = llm.engine.extensions[0].proposer
        assert proposer._runner.num_kv_blocks == llm.engine.executor.num_kv_blocks
        assert 0 <= cuda.free - GIB // 10 < 8 * 2**20  # its weights, which take nothing here
        (output,) = run(llm.engine, [([1, 2, 3], GREEDY)])
        assert len(output.outputs[0].token_ids) == 12
        assert llm.stats.num_accepted_tokens == llm.stats.num_draft_tokens > 0  # the same model


def test_an_explicit_pool_is_not_profiled(checkpoint: Path) -> None:
    cuda = FakeCuda(free=GIB)
    runner = make_runner(checkpoint, cuda, kv_cache_memory_bytes=2**20, max_num_seqs=2)
    assert runner.num_kv_blocks == 2**20 // 8192 - 1 and "reset" not in cuda.events
    with pytest.raises(ValueError, match=str(GIB)):
        make_runner(checkpoint, cuda, num_kv_blocks=GIB, max_num_seqs=2)


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
IN_GRAPHS = DRAFTS | {"enforce_eager": False}


@pytest.mark.small(kind=["graphs", "graphs and sampling"], ahead=[True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "kind", ["eager", "graphs", "graphs, triton", "sampling", "graphs and sampling"]
)
def test_requests_with_draft_tokens_get_what_the_cpu_answers(
    ahead: bool,
    kind: str,
    checkpoint: Path,
    one_layer: Path,
    no_worst_case: None,
    by_size: Callable[..., Any],
) -> None:
    has_graphs, is_triton = "graphs" in kind, "triton" in kind
    checkpoint = by_size(one_layer, one_layer, checkpoint) if is_triton else checkpoint
    # Its kernels are interpreted, and so are those that draw the tokens.
    kinds = ALL_KINDS[:2] if kind == "graphs and sampling" else ALL_KINDS
    asked = requests(4 if is_triton else by_size(5, 9), kinds)
    options: dict[str, Any] = {"max_num_seqs": 5, "num_kv_blocks": 60, "max_model_len": 128}
    with LLM(checkpoint, skip_tokenizer_init=True, **options) as reference:
        expected = tokens(run(reference.engine, asked))
        cuda = FakeCuda()
        runner = make_runner(
            checkpoint,
            cuda,
            speculative_config=DRAFTS | {"enforce_eager": not has_graphs},
            attention_backend="triton" if is_triton else "torch",
            async_scheduling=ahead,
            capture_sampling="sampling" in kind,
            **options,
        )
        engine = GuardedEngine(runner.config, runner.model_config, runner, None)
        proposers = [Oracle(reference), Wrong(runner.model_config.vocab_size)]
        mixed = Mixed(random.Random(0), runner.model_config.vocab_size, [proposers[0], *proposers])
        engine.add_extension(Speculation(engine, lambda executor, scheduler: mixed))
        poison_what_is_stale(runner)
        graphs = [p.graphs for p in runner.device.programs if isinstance(p, DraftProgram)]
        choices = [p.choices for p in runner.device.programs if isinstance(p, SamplingProgram)]
        of_drafts = count_replays(graphs[0]) if has_graphs else []
        chosen = [count_replays(graphs) for graphs in choices]
        cuda.events.clear()
        assert tokens(run(engine, asked)) == expected
        engine.scheduler.check()
        stats = engine.stats
        engine.close()
    assert stats.num_accepted_tokens > 10 and stats.num_draft_tokens > stats.num_accepted_tokens
    assert bool(of_drafts) is has_graphs and any(e.startswith("replay") for e in cuda.events)
    if kind == "graphs":
        assert len(set(of_drafts)) >= 2
    if kind == "graphs and sampling":  # a step with draft tokens is sampled in a graph, too
        assert len(chosen) == 2 and chosen[1] == of_drafts


def test_attention_is_made_for_rows_of_draft_tokens(checkpoint: Path) -> None:
    """It cuts their keys into shares, as those of decode rows, but only where graphs want it."""
    eager = DRAFTS | {"enforce_eager": True}
    for drafts, longest_cut in ((None, 1), (eager, 1), (DRAFTS, 4), (IN_GRAPHS, 4)):
        config = EngineConfig(str(checkpoint), speculative_config=drafts).for_device("cuda")
        attention = TritonAttention(**attention_options("triton", config))
        assert attention.longest_cut == longest_cut


def test_a_step_that_does_not_fit_a_graph_is_launched_without(
    checkpoint: Path, no_worst_case: None
) -> None:
    """Rows whose context is shorter than a graph's rows; more rows than a budget has room for."""
    options: dict[str, Any] = {"max_num_seqs": 6, "num_kv_blocks": 60, "max_model_len": 128}
    runner = make_runner(
        checkpoint, FakeCuda(), speculative_config=IN_GRAPHS, max_num_batched_tokens=14, **options
    )
    decode, drafts = runner.device.programs
    assert isinstance(drafts, DraftProgram) and drafts.graphs.sizes == [1, 2, 3]
    assert isinstance(decode, DecodeProgram) and decode.graphs.sizes == [1, 2, 4, 6]
    batch = runner.next_batch()
    for lengths, fits in (
        ({9: 2, 30: 4}, True),
        ({4: 2, 30: 1}, True),
        ({3: 2, 30: 1}, False),  # a context of three tokens
        ({30: 1, 31: 1}, False),  # no draft tokens
        ({30: 5}, False),  # as a prompt has
        ({10: 2, 11: 2, 12: 2, 13: 2}, False),
    ):
        sequences = [
            make_sequence(length, length - n, i) for i, (length, n) in enumerate(lengths.items())
        ]
        plan = make_plan(dict(zip(sequences, lengths.values(), strict=True)))
        batch.pack(plan, np.ones((1, 6, 8), np.int32), block_size=16)
        assert drafts.covers(batch, batch.header) is fits, lengths


@pytest.mark.parametrize("num_groups", [1, 2])
def test_rows_are_filled_in_front(num_groups: int) -> None:
    """The tokens that are wanted stay what and where they are, and are found again."""
    layout = BatchLayout(64, 4, 8, num_groups=num_groups)
    batch = Batch(layout, np.full(layout.num_bytes, 0xAA, dtype=np.uint8))
    tables = np.arange(1, 32 * num_groups + 1, dtype=np.int32).reshape(num_groups, 4, 8)
    sequences = {make_sequence(9, 7, slot=2): 2, make_sequence(6, 5, slot=0): 1}
    sequences[make_sequence(21, 17, slot=1)] = 4
    plan = make_plan(sequences)
    batch.pack(plan, tables, block_size=4)
    before, header = np.copy(batch.memory), batch.header
    wanted = {name: getattr(batch, name)[:7].copy() for name in ("input_ids", "positions")}
    slots, outputs = (
        batch.slot_mapping[:, :7].copy(),
        batch.output_rows[: header.num_outputs].copy(),
    )
    filled = fill_rows(batch, header, 4, block_size=4)
    assert (filled.num_tokens, filled.num_decode_rows, filled.max_query_len) == (12, 0, 4)
    assert batch.header == header and not np.array_equal(before, batch.memory)
    assert batch.cu_seqlens_q[:4].tolist() == [0, 4, 8, 12]
    kept = [2, 3, 7, 8, 9, 10, 11]
    for name, values in wanted.items():
        assert getattr(batch, name)[kept].tolist() == values.tolist()
    assert batch.slot_mapping[:, kept].tolist() == slots.tolist()
    assert batch.output_rows[: header.num_outputs].tolist() == [kept[i] for i in outputs]
    others = [0, 1, 4, 5, 6]
    assert batch.positions[others].tolist() == [5, 6, 2, 3, 4]
    assert batch.slot_mapping[:, others].tolist() == [[1, 2, 2, 3, 0]] * num_groups  # of block 0
    assert not batch.input_ids[others].any()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"enforce_eager": True}, "enforce_eager=True of the engine disables them"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2, because a graph cannot"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 2}, "max_num_batched_tokens=3"),
        ({"is_capturable": False}, "attention_backend='auto' must be one that can be part of"),
    ],
    ids=str,
)
def test_graphs_of_draft_rows_are_refused_where_they_cannot_be(
    checkpoint: Path, options: dict[str, Any], told: str
) -> None:
    """With the reason, before weights are read."""
    with pytest.raises(ValueError, match=told):
        make_runner(
            checkpoint,
            FakeCuda(),
            speculative_config=IN_GRAPHS,
            num_kv_blocks=8,
            **options,
        )


def test_ranks_that_share_a_model_record_the_same_graphs(checkpoint: Path) -> None:
    """The others know how many draft tokens there are, whose logits they take part in."""
    common = {"tensor_parallel_size": 2, "num_kv_blocks": 8, "max_num_seqs": 2}
    for drafts, kinds in ((DRAFTS, [DecodeProgram]), (IN_GRAPHS, [DecodeProgram, DraftProgram])):
        config = EngineConfig(str(checkpoint), speculative_config=drafts, **common)
        config = config.for_device("cuda")
        theirs = EngineConfig(**json.loads(json.dumps(options_of_workers(config))))
        assert theirs.speculative_config == config.speculative_config
        for own in (config, theirs):
            device = CudaDevice(own, FakeCuda(), is_capturable=True)
            layout = BatchLayout(64, 2, 8)
            forward, last_token = lambda *step: torch.zeros(1), torch.zeros(3, dtype=torch.int32)
            device.prepare(layout, toy_computation(forward, last_token))
            programs = device._capture(device._computation, device.graph_sizes)
            assert [type(program) for program in programs] == kinds


@pytest.mark.parametrize("num_groups", [1, 2])
def test_what_other_ranks_read_of_a_batch_stays_as_it_was_packed(num_groups: int) -> None:
    """Rank 0 replays its graph while they copy the batch: what it fills up must not show."""
    config = EngineConfig("m", max_num_seqs=4, block_size=4, speculative_config=IN_GRAPHS)
    device = CudaDevice(config.for_device("cuda"), FakeCuda(), is_capturable=True)
    layout = BatchLayout(64, 4, 8, num_groups=num_groups)
    last_token = torch.zeros(5, dtype=torch.int32)

    def forward(
        tensors: BatchTensors, header: BatchHeader, block_tables: torch.Tensor
    ) -> torch.Tensor:
        return tensors.input_ids[: header.num_tokens].clone()

    computation = toy_computation(forward, last_token)
    device.prepare(layout, computation)
    device.programs = device._capture(device._computation, device.graph_sizes)
    tables = np.arange(1, 32 * num_groups + 1, dtype=np.int32).reshape(num_groups, 4, 8)
    batch = Batch(layout, np.zeros(layout.num_bytes, dtype=np.uint8))
    for num_new in ({9: 1, 6: 1, 21: 1}, {9: 2, 6: 1, 21: 4}):
        rows = {
            make_sequence(length, length - n, slot): n
            for slot, (length, n) in enumerate(num_new.items())
        }
        batch.pack(make_plan(rows), tables, block_size=4)
        used = batch.num_bytes_used(batch.header)
        before, wanted = batch.memory[:used].copy(), batch.input_ids[: sum(num_new.values())]
        step = batch.positions[: len(wanted)].copy(), batch.block_tables(3, 6).copy()
        output = device.run(batch, batch.header, last_token, computation.forward)
        assert len(output.hidden) == (4 if num_new[9] == 1 else 16)
        rest = batch.layout.offsets()["input_ids"]
        assert (batch.memory[:rest] == before[:rest]).all()
        assert (batch.positions[: len(wanted)] == step[0]).all()
        assert (batch.block_tables(3, 6) == step[1]).all()
        places = output.tensors.output_rows[:3]
        assert output.hidden[places].tolist() == [8, 5, 20]


@pytest.mark.parametrize(
    "options",
    [{}, {"capture_sampling": True}, {"speculative_config": IN_GRAPHS, "capture_sampling": True}],
    ids=str,
)
def test_a_model_with_windows_gets_what_the_cpu_gives(
    tmp_path: Path, no_worst_case: None, options: dict[str, Any]
) -> None:
    """Each group of layers has tables of its own, also of the rows that fill a graph up."""
    make_checkpoint(Gemma2ForCausalLM, tmp_path, **GEMMA2)
    asked = requests(6, [replace(kind, max_tokens=20) for kind in ALL_KINDS[:2]])
    common = {"max_num_seqs": 5, "num_kv_blocks": 120, "max_model_len": 128, "block_size": 4}
    with LLM(tmp_path, skip_tokenizer_init=True, device="cpu", **common) as reference:
        expected = tokens(run(reference.engine, asked))
        cuda = FakeCuda()
        groups = {"disable_hybrid_kv_cache_manager": False}  # by default, a GPU has none
        runner = make_runner(tmp_path, cuda, **common, **groups, **options)
        assert runner.layout.num_groups == 3
        engine = GuardedEngine(runner.config, runner.model_config, runner, None)
        if "speculative_config" in options:
            oracle = Oracle(reference)
            mixed = Mixed(random.Random(0), runner.model_config.vocab_size, [oracle])
            engine.add_extension(Speculation(engine, lambda executor, scheduler: mixed))
        poison_what_is_stale(runner)
        cuda.events.clear()
        assert tokens(run(engine, asked)) == expected
        assert any(event.startswith("replay") for event in cuda.events)
        engine.close()
    assert ("speculative_config" in options) is (engine.stats.num_accepted_tokens > 10)


def test_a_pool_in_which_windows_give_blocks_back_holds_longer_sequences(tmp_path: Path) -> None:
    """So what is refused before the weights are read goes by the windows, too."""
    make_checkpoint(MistralForCausalLM, tmp_path, sliding_window=9)
    options = {"num_kv_blocks": 20, "block_size": 4, "max_num_seqs": 2, "enforce_eager": True}
    options |= {"max_num_batched_tokens": 8, "max_model_len": 200}
    runner = make_runner(tmp_path, FakeCuda(), disable_hybrid_kv_cache_manager=False, **options)
    assert runner.max_model_len == 200 > 20 * 4
    for keeps_all in (True, None):  # None: it has not run on a GPU
        with pytest.raises(ValueError, match="max_model_len=200 does not fit"):
            keeps = {"disable_hybrid_kv_cache_manager": keeps_all}
            make_runner(tmp_path, FakeCuda(), **keeps, **options)
