"""Graphs of mixed steps: which there are, what is padded, and whose tokens come out.

On a GPU that is a CPU (`fake_cuda`): a replay sees what the device's buffer holds at that time, and
nothing else of the step.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import GIB, FakeCuda
from mixed_attention import MixedTorchAttention
from packed_batches import make_batch, make_plan, make_sequence
from proposers import Mixed, Oracle, Wrong
from stale_memory import poison_what_is_stale
from tiny_checkpoints import GEMMA2, make_checkpoint, make_qwen3
from toy_computation import toy_computation
from transformers import Gemma2ForCausalLM

import nanoserve.worker.mixed_program as mixed_program
from nanoserve import LLM, SamplingParams
from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.torch import TorchAttention
from nanoserve.attention.triton import TritonAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.parallel.tensor_parallel import options_of_workers
from nanoserve.features.speculative.extension import Speculation
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.triton_ops import TritonOps
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.draft_program import DraftProgram
from nanoserve.worker.kv_cache import kv_block_bytes
from nanoserve.worker.mixed_program import MixedProgram, mixed_sizes, pad_step
from nanoserve.worker.model_runner import ModelRunner

# ---------------------------------------------------------------- sizes, and what they cover


@pytest.mark.parametrize("budget", [2, 3, 63, 64, 65, 511, 512, 700, 2048, 5000, 8192, 16384])
def test_sizes_ascend_to_exactly_the_budget(budget: int) -> None:
    sizes = mixed_sizes(budget)
    assert sizes == sorted(set(sizes)) and sizes[-1] == budget
    assert len(sizes) <= 14
    for num_tokens in range(65, budget + 1):
        size = next(size for size in sizes if size >= num_tokens)
        assert size < 2 * num_tokens and (size < 1.5 * num_tokens or size <= 512)


def test_sizes_of_a_usual_budget() -> None:
    assert mixed_sizes(2048) == [64, 128, 256, 512, 768, 1024, 1536, 2048]
    assert mixed_sizes(1) == []  # no step has a row of two tokens


def make_program(sizes: list[int]) -> MixedProgram:
    layout = BatchLayout(sizes[-1], 4, 8)
    computation = toy_computation(lambda *step: torch.zeros(1), torch.zeros(5, dtype=torch.int32))
    return MixedProgram(FakeCuda(), CudaBuffers(FakeCuda(), layout), computation, sizes)


@pytest.mark.parametrize(
    ("num_new_tokens", "covered"),
    [([1], False), ([1, 1], False), ([1, 2], True), ([9], True), ([3, 9], True), ([8, 9], False)],
)
def test_it_covers_every_step_with_a_row_of_several_tokens(
    num_new_tokens: list[int], covered: bool
) -> None:
    batch = make_batch()
    rows = {make_sequence(9, 9 - n, slot): n for slot, n in enumerate(num_new_tokens)}
    batch.pack(make_plan(rows), np.ones((1, 4, 8), np.int32), block_size=4)
    assert make_program([8, 16]).covers(batch, batch.header) is covered


# ---------------------------------------------------------------- padding


def packed_step(num_groups: int = 1) -> Batch:
    """A decode row of ten tokens, and the last three tokens of a prompt of five; the rest 0xFF."""
    layout = BatchLayout(64, 4, 8, num_groups=num_groups)
    batch = Batch(layout, np.full(layout.num_bytes, 255, dtype=np.uint8))
    tables = np.arange(1, 32 * num_groups + 1, dtype=np.int32).reshape(num_groups, 4, 8)
    rows = {make_sequence(10, 9, slot=3): 1, make_sequence(5, 2, slot=1): 3}
    batch.pack(make_plan(rows), tables, block_size=4)
    return batch


@pytest.mark.parametrize("num_groups", [1, 2])
def test_padding_is_tokens_of_no_row(num_groups: int) -> None:
    batch = packed_step(num_groups)
    before, used = batch.header, batch.num_bytes_used(batch.header)
    tables, slots = batch.block_tables(2, 3).copy(), batch.slot_mapping[:, :4].copy()
    pad_step(batch, before, 10, block_size=4)
    assert batch.header == before and batch.num_bytes_used(batch.header) == used
    assert batch.input_ids[:11].tolist() == [9, 2, 3, 4, 0, 0, 0, 0, 0, 0, -1]
    assert batch.positions[:10].tolist() == [9, 2, 3, 4, 0, 0, 0, 0, 0, 0]
    assert (batch.slot_mapping[:, :4] == slots).all()
    assert batch.slot_mapping[:, 4:11].tolist() == [[0, 1, 2, 3, 0, 1, -1]] * num_groups
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, -1, -1]
    assert batch.context_lens.tolist() == [10, 5, -1, -1]
    assert (batch.block_tables(2, 3) == tables).all()  # of real rows only: they do not move


def test_ranks_that_share_a_batch_pad_it_alike() -> None:
    batch = packed_step()
    pad_step(batch, batch.header, 10, block_size=4)
    memory = batch.memory.copy()
    pad_step(batch, batch.header, 10, block_size=4)
    assert (batch.memory == memory).all()


# ---------------------------------------------------------------- tokens

COMMON: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
KINDS = [
    SamplingParams(temperature=0, **COMMON),
    SamplingParams(temperature=0.8, seed=2**40 + 7, **COMMON),
    SamplingParams(temperature=1.3, seed=5, top_k=20, top_p=0.9, **COMMON),
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2, **COMMON),
    SamplingParams(temperature=0.7, seed=1, n=3, prompt_logprobs=1, **COMMON),
]
Asked = list[tuple[list[int], SamplingParams]]


def requests(count: int, longest: int) -> Asked:
    """Prompts of 1 to `longest` tokens, some of which share their beginning."""
    return [
        ([(7 * j + i % 3) % 300 for j in range(1 + 29 * i % longest)], KINDS[i % len(KINDS)])
        for i in range(count)
    ]


def run(engine: GuardedEngine, asked: Asked, aborts: tuple[int, ...] = ()) -> list[list[int]]:
    """The tokens of each request but those that are aborted, each three steps after the other."""
    for i, (prompt, params) in enumerate(asked):
        engine.add_request(str(i), prompt, params)
    done, step = {}, 0
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
        if step % 3 == 0 and step // 3 <= len(aborts):
            engine.abort_request(str(aborts[step // 3 - 1]))
    kept = [i for i in range(len(asked)) if i not in aborts]
    return [c.token_ids for i in kept for c in done[str(i)].outputs]


def make_engine(path: Path, cuda: FakeCuda, **options: Any) -> GuardedEngine:
    options = {"capture_mixed_steps": True} | options
    config = EngineConfig(str(path), **options).for_device("cuda")
    model_config = ModelConfig.from_checkpoint(path)
    context = LayerContext(attention=MixedTorchAttention())
    if config.attention_backend == "triton":
        context = LayerContext(attention=TritonAttention(), ops=TritonOps())
    attention = context.attention
    capturable = attention.capturable, attention.captures_mixed_steps
    device = CudaDevice(config, cuda, *capturable)
    runner = ModelRunner.load(config, model_config, path, context, device)
    return GuardedEngine(config, model_config, runner, tokenizer=None)


@pytest.fixture
def no_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, runner: None)


LIMITS = {"max_num_seqs": 9, "max_num_batched_tokens": 150}
POOL = {"num_kv_blocks": 20, "max_model_len": 200}
ABORTS = (3, 5, 8)


@pytest.fixture(scope="module")
def asked(by_size: Callable[..., Any]) -> Asked:
    return requests(by_size(12, 30), longest=170)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, asked: Asked) -> list[list[int]]:
    with LLM(checkpoint, skip_tokenizer_init=True, device="cpu", max_num_seqs=9) as llm:
        return run(llm.engine, asked, ABORTS)


@pytest.mark.usefixtures("no_worst_case")
@pytest.mark.small(options=[POOL])
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [64, 128, 150]),
        (POOL, [64, 128, 150]),
        (POOL | {"async_scheduling": False}, [64, 128, 150]),
        (POOL | {"capture_sampling": True}, [64, 128, 150]),
        (POOL | {"block_size": 1, "num_kv_blocks": 300}, [64, 128, 150]),
        ({"long_prefill_token_threshold": 7}, [64]),
        ({"enable_prefix_caching": False, "max_num_batched_tokens": 20}, [20]),
    ],
    ids=str,
)
def test_every_kind_of_request_gets_what_the_cpu_gives(
    checkpoint: Path,
    asked: Asked,
    expected: list[list[int]],
    options: dict[str, Any],
    sizes: list[int],
) -> None:
    """Decode rows beside chunks, whole prompts, hits, preemption, aborts; each step is replayed."""
    cuda = FakeCuda()
    engine = make_engine(checkpoint, cuda, **LIMITS | options)
    poison_what_is_stale(engine.executor)
    steps: list[tuple[int, ...]] = []
    engine.observers.append(
        lambda plan, batch, result, times: steps.append(batch.header[1:8])  # all that is counted
    )
    cuda.events.clear()
    assert run(engine, asked, ABORTS) == expected
    replayed = [e for e in cuda.events if e in {f"replay {size}" for size in sizes}]
    assert set(replayed) == {f"replay {size}" for size in sizes}
    assert not any(e.startswith("capture ") for e in cuda.events)  # while it serves
    # Every step with a row of several tokens was replayed, whatever beside it there was.
    mixed = [step for step in steps if step[1] < step[0]]
    assert len(replayed) == len(mixed) > 5 and len({step[2] for step in mixed}) > 3
    assert any(step[3] for step in mixed) is options.get("async_scheduling", True)
    assert bool(engine.stats.num_preemptions) is ("num_kv_blocks" in options)
    assert "enable_prefix_caching" in options or engine.stats.prefix_cache_hits > 0
    engine.scheduler.check()


def reads_the_header_of_the_step_before(runner: ModelRunner) -> None:
    buffers = runner.device.buffers
    copy_in, header = buffers.copy_in, buffers.tensors.header
    buffers.tensors.header = stale = header.clone()

    def copy(*step: Any) -> torch.Tensor:
        stale.copy_(header)
        return copy_in(*step)

    buffers.copy_in = copy


def pads(change: Callable[[Batch, BatchHeader], None]) -> Callable[[ModelRunner], None]:
    """A fault in padding: what `change` does to a step that is padded."""

    def plant(runner: ModelRunner) -> None:
        def padded(batch: Batch, header: BatchHeader, *rest: int) -> None:
            pad_step(batch, header, *rest)
            change(batch, header)

        mixed_program.pad_step = padded

    return plant


def into_a_real_block(batch: Batch, header: BatchHeader) -> None:
    batch.slot_mapping[:, header.num_tokens :] += 16


def into_the_last_token(batch: Batch, header: BatchHeader) -> None:
    last = batch.slot_mapping[:, header.num_tokens - 1 : header.num_tokens]
    batch.slot_mapping[:, header.num_tokens :] = last


def as_tokens_of_the_last_row(batch: Batch, header: BatchHeader) -> None:
    batch.cu_seqlens_q[header.num_rows] += 1


def leaves_pending_tokens_out(runner: ModelRunner) -> None:
    runner.device.buffers.tensors.fill_in_pending = lambda header, last_token: None


def takes_a_graph_that_is_too_small(runner: ModelRunner) -> None:
    (program,) = (p for p in runner.device.programs if isinstance(p, MixedProgram))
    sizes = program.graphs.sizes
    program.graphs.size_for = lambda n: sizes[sum(size < n for size in sizes[:-1]) - (n > 128)]


@pytest.mark.usefixtures("no_worst_case")
@pytest.mark.small(plant=["stale header", "a real block"])
@pytest.mark.parametrize(
    "plant",
    PLANTS := {
        "stale header": reads_the_header_of_the_step_before,
        "a real block": pads(into_a_real_block),
        "the last token": pads(into_the_last_token),
        "tokens of the last row": pads(as_tokens_of_the_last_row),
        "pending tokens": leaves_pending_tokens_out,
        "a small graph": takes_a_graph_that_is_too_small,
    },
)
def test_a_planted_fault_comes_out_as_other_tokens(
    checkpoint: Path,
    asked: Asked,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    plant: str,
) -> None:
    """Or as an error, where what is read is no number of a row, or of a token."""
    monkeypatch.setattr(mixed_program, "pad_step", pad_step)
    engine = make_engine(checkpoint, FakeCuda(), **LIMITS | POOL)
    PLANTS[plant](engine.executor)
    try:
        tokens = run(engine, asked, ABORTS)
    except (LookupError, OverflowError, RuntimeError, ValueError) as error:
        tokens = repr(error)
    assert tokens != expected


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within, torch.empty gives NaN: so is what attention leaves out, whatever lay there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1000).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_with_its_own_kernels_it_gives_what_the_cpu_gives(
    tmp_path: Path, by_size: Callable[..., Any]
) -> None:
    """Decode rows and chunks beside padding, where kernels read the header: interpreted."""
    make_qwen3(tmp_path, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    options: dict[str, Any] = {"num_kv_blocks": 5, "max_model_len": 32, "block_size": 8}
    options |= {"max_num_seqs": 3, "max_num_batched_tokens": 12}
    shared, (greedy, seeded) = list(range(100, 114)), KINDS[:2]
    few = by_size(2, 9)
    greedy, seeded = replace(greedy, max_tokens=few), replace(seeded, max_tokens=few)
    asked = [([*shared, 0], greedy), (list(range(21)), greedy), ([*shared, 0, 9], seeded)]
    asked += [([7], seeded)]
    cuda = FakeCuda()
    with poisoned_memory():
        engine = make_engine(tmp_path, cuda, attention_backend="triton", **options)
        cuda.events.clear()
        outputs = run(engine, asked)
    with LLM(tmp_path, skip_tokenizer_init=True, device="cpu", **options) as llm:
        assert outputs == run(llm.engine, asked)
    assert cuda.events.count("replay 12") >= 4
    assert engine.stats.num_preemptions > 0 and engine.stats.prefix_cache_hits > 0


@pytest.mark.usefixtures("no_worst_case")
@pytest.mark.small(drafts_in_graphs=[False])
@pytest.mark.parametrize("drafts_in_graphs", [False, True])
def test_steps_with_draft_tokens_are_steps_with_rows_of_several(
    checkpoint: Path, drafts_in_graphs: bool
) -> None:
    """Those that a graph of draft rows covers, if there is one, are replayed there."""
    asked = [(prompt[:60], params) for prompt, params in requests(8, 70)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    drafts |= {"enforce_eager": not drafts_in_graphs}
    with LLM(checkpoint, skip_tokenizer_init=True, device="cpu") as reference:
        expected = run(reference.engine, asked)
        cuda = FakeCuda()
        engine = make_engine(checkpoint, cuda, speculative_config=drafts, **LIMITS)
        proposers = [Oracle(reference), Wrong(engine.model_config.vocab_size)]
        mixed = Mixed(random.Random(0), engine.model_config.vocab_size, proposers)
        engine.add_extension(Speculation(engine, lambda executor, scheduler: mixed))
        cuda.events.clear()
        assert run(engine, asked) == expected
    assert engine.stats.num_accepted_tokens > 10
    replays = [event for event in cuda.events if event.startswith("replay ")]
    assert len(replays) == engine.stats.num_steps
    (program,) = (p for p in engine.executor.device.programs if isinstance(p, MixedProgram))
    of_drafts = [p for p in engine.executor.device.programs if isinstance(p, DraftProgram)]
    assert bool(of_drafts) is drafts_in_graphs and program.graphs.outputs.keys() == {64, 128, 150}


@pytest.mark.usefixtures("no_worst_case")
def test_groups_of_layers_have_tables_and_slots_of_their_own(tmp_path: Path) -> None:
    make_checkpoint(Gemma2ForCausalLM, tmp_path, **GEMMA2)
    asked = [(prompt[:60], replace(KINDS[0], max_tokens=20)) for prompt, _ in requests(8, 70)]
    options = {"max_num_seqs": 4, "disable_hybrid_kv_cache_manager": False}
    options |= {"num_kv_blocks": 90, "max_num_batched_tokens": 80, "block_size": 4}
    options |= {"max_model_len": 96}
    cuda = FakeCuda()
    engine = make_engine(tmp_path, cuda, **options)
    assert engine.executor.layout.num_groups > 1
    outputs = run(engine, asked)
    with LLM(tmp_path, skip_tokenizer_init=True, device="cpu", max_num_seqs=4) as llm:
        assert outputs == run(llm.engine, asked)
    assert {"replay 64", "replay 80"} <= set(cuda.events)


# ---------------------------------------------------------------- memory, life and refusals


@pytest.mark.parametrize(
    ("budget", "measured", "num_sizes"),
    [(32, [32], 1), (100, [100, 100, 64], 2), (600, [600, 600, 512, 64], 5)],
)
def test_the_pool_leaves_room_for_all_of_them(
    checkpoint: Path, budget: int, measured: list[int], num_sizes: int
) -> None:
    """The largest graph, and what the smallest and the second largest add to it."""
    took = {"pool_bytes": 40 * 2**20, "graph_bytes": 2**20}
    cuda = FakeCuda(total=GIB, free=GIB, **took)
    options = {"max_num_seqs": 2, "enable_prefix_caching": False}
    engine = make_engine(checkpoint, cuda, max_num_batched_tokens=budget, **options)
    sizes = engine.executor.device.mixed_sizes
    assert len(sizes) == num_sizes
    captured = [int(e.split()[1]) for e in cuda.events if e.startswith("capture ")]
    assert [size for size in captured if size > 2] == measured + sizes[::-1]
    decode, mixed = 40 + 2, 40 + num_sizes
    left = int(0.9 * GIB) - (decode + mixed) * 2**20
    block_bytes = kv_block_bytes(engine.config, engine.model_config)
    assert engine.executor.num_kv_blocks == left // block_bytes - 1
    # All of them take what was set aside, and no more while they are replayed.
    assert cuda.free == GIB - (decode + mixed) * 2**20
    for size in sizes:
        half = [3] * (size // 2 - 1)  # in two rows, since 600 tokens are no context
        run(engine, [(half, SamplingParams(max_tokens=1)), (half, SamplingParams(max_tokens=1))])
    assert cuda.free == GIB - (decode + mixed) * 2**20


@pytest.mark.usefixtures("no_worst_case")
def test_their_outputs_lie_in_one_place(checkpoint: Path) -> None:
    """Kept apart, those of ten sizes would take as much as the activations of the largest."""
    engine = make_engine(checkpoint, FakeCuda(), num_kv_blocks=90, **LIMITS)
    (program,) = (p for p in engine.executor.device.programs if isinstance(p, MixedProgram))
    outputs = program.graphs.outputs
    assert outputs.keys() == {64, 128, 150} and all(len(out) == n for n, out in outputs.items())
    (memory,) = {out.untyped_storage().data_ptr() for out in outputs.values()}
    assert outputs[150].data_ptr() == memory


@pytest.mark.usefixtures("no_worst_case")
def test_they_are_captured_anew_after_a_sleep(checkpoint: Path) -> None:
    cuda = FakeCuda()
    engine = make_engine(checkpoint, cuda, num_kv_blocks=40, **LIMITS)
    asked, runner = requests(6, 100), engine.executor
    before = run(engine, asked)
    runner.release_kv_caches()
    assert not runner.device.programs
    runner.restore_kv_caches()
    engine.reset_prefix_cache()
    cuda.events.clear()
    runner.resume()
    assert {f"capture {size}" for size in (64, 128, 150)} <= set(cuda.events)
    cuda.events.clear()
    assert run(engine, asked) == before
    assert "replay 64" in cuda.events and "capture 64" not in cuda.events


def test_what_cannot_be_captured_is_refused(checkpoint: Path) -> None:
    wanted = {"capture_mixed_steps": True}
    with pytest.raises(ValueError, match="enforce_eager=True disables them: remove one of them"):
        EngineConfig(str(checkpoint), enforce_eager=True, **wanted)
    with pytest.raises(ValueError, match="pipeline_parallel_size=2 captures no CUDA graphs"):
        EngineConfig(str(checkpoint), pipeline_parallel_size=2, **wanted)
    config = EngineConfig(str(checkpoint), attention_backend="torch", **wanted)
    told = r"attention_backend='torch' cannot be part of a CUDA graph of mixed steps"
    with pytest.raises(ValueError, match=told):
        CudaDevice(config.for_device("cuda"), FakeCuda(), is_capturable=True)


CAN, CANNOT = (True, True), (True, False)  # Triton's attention, and torch's or FlashAttention


@pytest.mark.parametrize(
    ("options", "attention", "captured"),
    [
        ({}, CAN, True),
        ({}, CANNOT, False),
        ({}, (False, False), False),
        ({"enforce_eager": True}, CAN, False),
        ({"pipeline_parallel_size": 2}, CAN, False),
        # What has not run on a GPU together with them has to ask for them.
        ({"tensor_parallel_size": 2}, CAN, False),
        ({"speculative_config": {"method": "ngram"}}, CAN, False),
        ({"quantization": "int8"}, CAN, False),
        ({"quantization": "int8", "capture_mixed_steps": True}, CAN, True),
        ({"tensor_parallel_size": 2, "capture_mixed_steps": True}, CAN, True),
        ({"capture_mixed_steps": False}, CAN, False),
        ({"capture_mixed_steps": True}, CAN, True),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 1}, CAN, False),
    ],
    ids=str,
)
def test_by_default_they_are_where_they_have_run(
    checkpoint: Path, options: dict[str, Any], attention: tuple[bool, bool], captured: bool
) -> None:
    """One GPU, Triton's attention. Other ranks come to the same, by the options they are given."""
    config = EngineConfig(str(checkpoint), **LIMITS | options).for_device("cuda")
    theirs = EngineConfig(**json.loads(json.dumps(options_of_workers(config))))
    assert theirs.capture_mixed_steps == options.get("capture_mixed_steps")
    for own in (config, theirs):
        sizes = CudaDevice(own, FakeCuda(), *attention).mixed_sizes
        assert sizes == ([64, 128, 150] if captured else [])


def test_triton_s_attention_can_be_part_of_them_and_no_other_says_so() -> None:
    assert TritonAttention.captures_mixed_steps and not AttentionBackend.captures_mixed_steps
    assert not TorchAttention.captures_mixed_steps


def test_a_cpu_is_silent_about_them(checkpoint: Path) -> None:
    for chosen in (None, True, False):
        options: dict[str, Any] = {"num_kv_blocks": 8, "capture_mixed_steps": chosen}
        with LLM(checkpoint, skip_tokenizer_init=True, device="cpu", **options) as llm:
            assert llm.engine.config.capture_mixed_steps is chosen


@pytest.mark.usefixtures("no_worst_case")
@pytest.mark.parametrize("chosen", [None, False])
def test_a_runner_has_them_by_default_and_not_if_they_are_off(
    checkpoint: Path, chosen: bool | None
) -> None:
    cuda = FakeCuda()
    engine = make_engine(checkpoint, cuda, capture_mixed_steps=chosen, **LIMITS)
    programs = [p for p in engine.executor.device.programs if isinstance(p, MixedProgram)]
    assert len(programs) == (0 if chosen is False else 1)
    run(engine, requests(5, 100))
    of_mixed = [event for event in cuda.events if event.endswith((" 64", " 128", " 150"))]
    assert bool(of_mixed) is (chosen is None)
