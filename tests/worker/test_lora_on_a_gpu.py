"""Adapters on a GPU that is a CPU: no graph of steps without adapters computes a step with some.

With `adapter_kernels`, steps with adapters have graphs of their own, which see what their memory
holds when they are replayed (`fake_cuda`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import late_engine
import numpy as np
import pytest
import torch
from fake_cuda import GIB, FakeCuda
from late_cuda import LateCuda
from launched_kernels import LaunchedKernels, of_kernel
from lora_models import ALL, ATTENTION, MLP, request_for, write_adapter
from simulated_gpu_ranks import TileKernel, make_gpu_runner, start_ranks_here, tiled_adapters
from stale_memory import poison_what_is_stale
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.sequence import Sequence
from nanoserve.features.lora.prepare import prepare_lora
from nanoserve.features.parallel.pipeline_schedule import prepare_pipeline
from nanoserve.features.speculative.extension import Speculation
from nanoserve.features.speculative.proposer import TextProposer
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.low_rank import StepRows
from nanoserve.worker import model_runner
from nanoserve.worker.adapted_graphs import AdaptedComputation, AdaptedGraphs
from nanoserve.worker.adapters import make_adapters
from nanoserve.worker.build_executor import EXECUTORS
from nanoserve.worker.cpu_device import Computation
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.kv_cache import kv_block_bytes
from nanoserve.worker.model_runner import ModelRunner

CPU = torch.device("cpu")
LIMITS: dict[str, Any] = {
    **{"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
    **{"max_cpu_loras": 4, "block_size": 4, "num_kv_blocks": 60, "max_num_seqs": 5},
    **{"max_num_batched_tokens": 20, "max_model_len": 80},
}
RUN_WORST_CASE = CudaDevice._run_worst_case
COMMON: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
KINDS = [
    SamplingParams(temperature=0, **COMMON),
    SamplingParams(temperature=0.8, seed=7, **COMMON),
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=1, **COMMON),
    SamplingParams(temperature=0.7, seed=1, n=2, **COMMON),
]


class Asked(NamedTuple):
    """A base, and requests with one of three adapters or none."""

    base: Path
    requests: list[tuple[list[int], SamplingParams, LoRARequest | None]]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, by_size: Callable[..., Any]) -> Asked:
    base = tmp_path_factory.mktemp("base")
    model, adapters = make_qwen3(base).eval(), [None]
    for index, targets in enumerate((ALL, ATTENTION, (*MLP, "q_proj"))):
        folder = base / f"adapter{index}"
        write_adapter(model, folder, index, targets, (8, 4, 3)[index], size=0.15)
        adapters.append(request_for(folder, folder.name, index + 1))
    rng, requests = np.random.default_rng(0), []
    for index in range(by_size(10, 20)):
        # The first requests have no adapter; later, adapters join and leave.
        adapter = None if index < 3 else adapters[index % 4]
        prompt = rng.integers(0, 300, 1 + 13 * index % 37).tolist()
        requests.append((prompt, KINDS[index % len(KINDS)], adapter))
    return Asked(base, requests)


def answers(engine: GuardedEngine, asked: Asked) -> list[list[int]]:
    """Return the tokens of each request, of which two more are added in every third step."""
    waiting = list(enumerate(asked.requests))
    done: dict[str, Any] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        if step % 3 == 0:
            for index, (prompt, params, adapter) in waiting[:2]:
                engine.add_request(str(index), prompt, params, lora_request=adapter)
            del waiting[:2]
        done |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
    assert [output.error for output in done.values()] == [None] * len(asked.requests)
    indices = map(str, range(len(asked.requests)))
    return [list(one.token_ids) for index in indices for one in done[index].outputs]


@pytest.fixture(scope="module")
def expected(asked: Asked) -> list[list[int]]:
    options = LIMITS | {"device": "cpu", "attention_backend": "torch"}
    with LLM(str(asked.base), skip_tokenizer_init=True, **options) as llm:
        return answers(llm.engine, asked)


def make_engine(
    path: Path, cuda: FakeCuda, kernel: TileKernel | None = None, **options: Any
) -> GuardedEngine:
    if kernel is not None:
        options["kernel_config"] = {"adapter_kernels": True}
    options = LIMITS | {"capture_mixed_steps": True} | options
    config = EngineConfig(str(path), **options).for_device("cuda")
    model_config = ModelConfig.from_checkpoint(path)
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    make = partial(make_gpu_runner, config, model_config, path, cuda=cuda, kernel=kernel)
    if num_ranks == 1:
        executor = make(ParallelContext())
    else:
        kind = "pipeline" if config.pipeline_parallel_size > 1 else "tensor_parallel"
        executor = EXECUTORS.get(kind)(config, model_config, path, CPU, make)
    engine = GuardedEngine(config, model_config, executor, tokenizer=None)
    if config.pipeline_parallel_size > 1:
        prepare_pipeline(config, model_config).add_to(engine)
    prepare_lora(config, model_config).add_to(engine)
    return engine


@pytest.fixture(autouse=True)
def no_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, runner: None)


class Known(TextProposer):
    """Drafts what each sequence gets, but for every third draft, whose last token is wrong."""

    def __init__(self, asked: Asked, expected: list[list[int]], vocab_size: int) -> None:
        names = ((i, j) for i, one in enumerate(asked.requests) for j in range(one[1].n))
        self._answers = dict(zip(names, expected, strict=True))
        self._vocab_size, self._num_drafts = vocab_size, 0

    def draft(self, seq: Sequence, most: int) -> list[int]:
        answer = self._answers[int(seq.request_id), seq.index]
        tokens = answer[seq.num_output_tokens :][:most]
        self._num_drafts += 1
        if tokens and self._num_drafts % 3 == 0:
            tokens[-1] = (tokens[-1] + 1) % self._vocab_size
        return tokens


class Steps:
    """By step of a runner: whether it has adapters, and whether a graph was replayed."""

    def __init__(self, runner: ModelRunner, cuda: FakeCuda, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[bool, bool, int]] = []  # and its longest row
        forward = runner.forward

        def watched(batch: Any, inputs: ForwardInputs) -> Any:
            before = len(cuda.events)
            handle = forward(batch, inputs)
            replays = any(event.startswith("replay ") for event in cuda.events[before:])
            longest = batch.header.max_query_len
            self.seen.append((inputs.adapters is not None, replays, longest))
            return handle

        patch.setattr(runner, "forward", watched)


def add_drafts(engine: GuardedEngine, asked: Asked, expected: list[list[int]]) -> bool:
    """Let a proposer draft tokens, most of which are right, if the engine has options for it."""
    if engine.config.speculative_config is None:
        return False
    proposer = Known(asked, expected, engine.model_config.vocab_size)
    engine.add_extension(Speculation(engine, lambda executor, scheduler: proposer))
    return True


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "ahead": {"async_scheduling": True},
    "in turn": {"async_scheduling": False},
    "sampling too": {"capture_sampling": True},
    "drafts": {"speculative_config": DRAFTS | {"enforce_eager": False}},
    "drafts in turn": {
        "speculative_config": DRAFTS | {"enforce_eager": False},
        "async_scheduling": False,
    },
    "a tiny pool": {"num_kv_blocks": 20},
}


@pytest.mark.small(name=["ahead", "drafts"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_a_cpu_and_steps_with_adapters_are_launched(
    name: str, asked: Asked, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without adapters are replayed as ever, whatever ran before them."""
    cuda = FakeCuda()
    engine = make_engine(asked.base, cuda, **OPTIONS[name])
    has_drafts = add_drafts(engine, asked, expected)
    steps = Steps(engine.executor, cuda, monkeypatch)
    assert answers(engine, asked) == expected
    for has_adapters in (False, True):
        longest = {row for adapters, _, row in steps.seen if adapters is has_adapters}
        assert len(longest) > 2 and (4 if has_drafts else 1) in longest
    assert all(replayed is not adapters for adapters, replayed, _ in steps.seen)
    if has_drafts:
        assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens > 20
    assert (engine.stats.num_preemptions > 0) is (name == "a tiny pool")
    engine.close()


def test_a_graph_that_was_captured_without_adapters_would_give_other_tokens(
    asked: Asked, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: the device takes the step for one that its graphs have recorded."""
    own = model_runner.forward_with_adapters

    def as_recorded(rows: Any, starts: Any, forward: Any, adapters: Any) -> Any:
        own(rows, starts, forward, adapters)
        return forward

    monkeypatch.setattr(model_runner, "forward_with_adapters", as_recorded)
    assert answers(make_engine(asked.base, FakeCuda()), asked) != expected


@pytest.mark.parametrize("kernel", [None, TileKernel()], ids=["launched", "in graphs"])
def test_graphs_are_captured_again(
    kernel: TileKernel | None,
    asked: Asked,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After sleep, when adapters are in their places, and the last step's tiles are written."""
    cuda = FakeCuda(total=GIB, free=GIB, pool_bytes=2**20, graph_bytes=2**20)
    engine = make_engine(asked.base, cuda, kernel)
    assert cuda.free < GIB
    assert answers(engine, asked) == expected
    runner = engine.executor
    runner.release_kv_caches()
    assert cuda.free == GIB  # both sets are gone
    runner.restore_kv_caches()
    engine.reset_prefix_cache()
    cuda.events.clear()
    runner.resume()
    assert "capture 4" in cuda.events and runner.context.adapters.rows is None
    steps = Steps(runner, cuda, monkeypatch)
    assert answers(engine, asked) == expected
    in_graphs = kernel is not None
    assert all(replayed is (in_graphs or not adapters) for adapters, replayed, _ in steps.seen)


@pytest.mark.small(name=["ahead", "drafts"])
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_with_adapters_have_graphs_of_their_own(
    name: str, asked: Asked, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode rows, chunks, drafts: each step is replayed, and only these compute adapters."""
    cuda, kernel = FakeCuda(), TileKernel()
    engine = make_engine(asked.base, cuda, kernel, **OPTIONS[name])
    poison_what_is_stale(engine.executor)
    has_drafts = add_drafts(engine, asked, expected)
    steps, calls = Steps(engine.executor, cuda, monkeypatch), []
    engine.observers.append(lambda plan, batch, result, times: calls.append(kernel.num_calls))
    num_captured = kernel.num_calls
    cuda.events.clear()
    assert answers(engine, asked) == expected
    assert num_captured > 0 and not any(event.startswith("capture ") for event in cuda.events)
    for has_adapters in (False, True):
        longest = {row for adapters, _, row in steps.seen if adapters is has_adapters}
        assert len(longest) > 2 and (4 if has_drafts else 1) in longest
    assert all(replayed for _, replayed, _ in steps.seen)
    num_layers = 4 * engine.model_config.num_hidden_layers
    num_adapted = sum(adapters for adapters, _, _ in steps.seen)
    assert kernel.num_calls - num_captured == num_layers * num_adapted > 0
    engine.close()


RANKS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2, "capture_mixed_steps": False},
]


@pytest.mark.small(ranks=RANKS[:1], has_kernels=[True])
@pytest.mark.parametrize("has_kernels", [False, True], ids=["products of torch", "kernels"])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_ranks(
    ranks: dict[str, Any],
    has_kernels: bool,
    asked: Asked,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank has tiles and graphs of its own; stages launch all steps kernel by kernel."""
    start_ranks_here(monkeypatch)
    cuda, kernel = FakeCuda(), TileKernel() if has_kernels else None
    engine = make_engine(asked.base, cuda, kernel, **ranks)
    steps = Steps(engine.executor.runner, cuda, monkeypatch)
    assert answers(engine, asked) == expected
    has_graphs = "pipeline_parallel_size" not in ranks
    for has_adapters, replayed, _ in steps.seen:
        assert replayed is (has_graphs and (has_kernels or not has_adapters))
    assert {adapted for adapted, _, _ in steps.seen} == {False, True}
    engine.close()


def writes_no_tiles(runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaBuffers, "sending", lambda buffers, send: nullcontext())


def has_recorded_no_adapters(runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdaptedComputation, "forward", Computation.forward)


def has_one_tile(runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    tiles = runner.context.adapters.tiles
    patch.setattr(tiles, "views_of_graph", lambda num_tokens: tiles.views(1))


def writes_the_tiles_of_rows_that_are_not_padded(
    runner: ModelRunner, patch: pytest.MonkeyPatch
) -> None:
    replay = AdaptedGraphs.replay

    def replay_unpadded(graphs: Any, batch: Batch, *rest: Any) -> Any:
        unpadded = batch.cu_seqlens_q.copy()
        rows_of = runner.context.adapters.rows_of
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                runner.context.adapters, "rows_of", lambda places, padded: rows_of(places, unpadded)
            )
            return replay(graphs, batch, *rest)

    patch.setattr(AdaptedGraphs, "replay", replay_unpadded)


def replays_graphs_without_adapters(runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    run = runner.device.run

    def run_inner(batch: Batch, header: Any, last_token: Any, forward: Any) -> Any:
        return run(batch, header, last_token, getattr(forward, "inner", forward))

    patch.setattr(runner.device, "run", run_inner)


FAULTS = {
    "stale tiles": (writes_no_tiles, "ahead"),
    "no adapters recorded": (has_recorded_no_adapters, "ahead"),
    "one tile": (has_one_tile, "ahead"),
    "graphs without adapters": (replays_graphs_without_adapters, "ahead"),
    "tiles of rows before padding": (writes_the_tiles_of_rows_that_are_not_padded, "drafts"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_comes_out_as_other_tokens(
    name: str, asked: Asked, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, options = FAULTS[name]
    if plant is has_recorded_no_adapters:  # before the graphs are captured
        plant(None, monkeypatch)
    engine = make_engine(asked.base, FakeCuda(), TileKernel(), **OPTIONS[options])
    add_drafts(engine, asked, expected)
    if plant is not has_recorded_no_adapters:
        plant(engine.executor, monkeypatch)
    assert answers(engine, asked) != expected


def test_the_pool_leaves_room_for_both_sets(asked: Asked) -> None:
    """As graphs are the same, it leaves twice the room that it leaves without adapters."""
    took: dict[str, Any] = {"pool_bytes": 40 * 2**20, "graph_bytes": 2**20}
    taken, blocks = [], []
    for kernel in (None, TileKernel()):
        cuda = FakeCuda(total=GIB, free=GIB, **took)
        engine = make_engine(asked.base, cuda, kernel, num_kv_blocks=None)
        taken.append(GIB - cuda.free)
        blocks.append(engine.executor.num_kv_blocks)
    assert taken[1] == 2 * taken[0] > 80 * 2**20
    block_bytes = kv_block_bytes(engine.config, engine.model_config)
    assert abs((blocks[0] - blocks[1]) * block_bytes - taken[0]) <= block_bytes


class Sized(TileKernel):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __call__(self, x: torch.Tensor, *args: torch.Tensor) -> None:
        self.sizes.append(len(x))
        super().__call__(x, *args)


@pytest.mark.parametrize("num_kv_blocks", [60, None])
def test_the_worst_case_has_adapters(
    num_kv_blocks: int | None, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its kernels take is measured, or missing before it serves. Then no tile is left."""
    monkeypatch.setattr(CudaDevice, "_run_worst_case", RUN_WORST_CASE)
    cuda, kernel = FakeCuda(total=GIB, free=GIB), Sized()
    engine = make_engine(asked.base, cuda, kernel, num_kv_blocks=num_kv_blocks)
    layers = 4 * engine.model_config.num_hidden_layers
    assert kernel.sizes[:layers] == [LIMITS["max_num_batched_tokens"]] * layers


@pytest.mark.small(ahead=[True])
@pytest.mark.parametrize("has_graphs", [False, True], ids=["launched", "in graphs"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])
def test_however_late_a_gpu_is_its_tokens_are_those_of_a_cpu(
    ahead: bool,
    has_graphs: bool,
    asked: Asked,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens of an adapter are sent, and adapters are copied to their places, in turn."""
    cuda, options = LateCuda(), LIMITS | {"async_scheduling": ahead, "capture_mixed_steps": True}
    config = EngineConfig(str(asked.base), **LIMITS)
    adapters = make_adapters(config, torch.float32, CPU, "torch")
    if has_graphs:
        adapters = tiled_adapters(config, TileKernel(cuda))
    monkeypatch.setattr(late_engine, "LayerContext", partial(LayerContext, adapters=adapters))
    engine = late_engine.make_engine(asked.base, cuda, monkeypatch, **options)
    prepare_lora(engine.config, engine.model_config).add_to(engine)
    assert answers(engine, asked) == expected
    assert cuda.longest > 100
    engine.close()
    assert not cuda.queue


INTERPRETED: dict[str, Any] = {
    **{"attention_backend": "triton", "kernel_config": {"adapter_kernels": True}},
    **{"max_num_batched_tokens": 12, "max_model_len": 32, "num_kv_blocks": 8, "block_size": 8},
}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """A tiny base, and requests of a few tokens."""
    base = tmp_path_factory.mktemp("few")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model, requests = make_qwen3(base, **sizes).eval(), []
    for index, (targets, rank) in enumerate(((ALL, 8), (("q_proj", "down_proj"), 3))):
        write_adapter(model, base / f"adapter{index}", index, targets, rank, size=0.2)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for index, length in enumerate((5, 14, 1, 3)):
        adapter = request_for(base / f"adapter{index % 3}") if index % 3 < 2 else None
        requests.append((list(range(7 * index, 7 * index + length)), params, adapter))
    return Asked(base, requests)


@pytest.mark.parametrize("has_graphs", [True, False], ids=["in graphs", "enforce_eager"])
def test_with_its_own_kernels_it_gives_what_a_cpu_gives(
    has_graphs: bool, few: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are interpreted; while it serves, there is no variant that was not compiled before."""
    with LLM(str(few.base), skip_tokenizer_init=True, device="cpu", **LIMITS) as llm:
        expected = answers(llm.engine, few)
    launched = LaunchedKernels(monkeypatch)
    options = {} if has_graphs else {"enforce_eager": True, "capture_mixed_steps": False}
    with launched.noted() as compiled:
        engine = make_engine(few.base, cuda := FakeCuda(), **INTERPRETED | options)
    steps = Steps(engine.executor, cuda, monkeypatch)
    with launched.noted() as life:
        assert answers(engine, few) == expected
    assert all(adapters and replayed is has_graphs for adapters, replayed, _ in steps.seen)
    for name in ("_shrink", "_expand"):
        variants = of_kernel(life, name)
        assert variants == of_kernel(compiled, name) and len(variants) > 2  # of shapes of layers
    engine.close()


def test_torch_copies_a_part_of_the_tokens_at_a_time() -> None:
    """The memory of copies is not measured: with all tokens of a step, it could be gigabytes."""
    places = np.repeat(np.array([1, -1, 0], dtype=np.int32), [3000, 7, 5])
    parts = StepRows.of(places, has_kernel=False, device=CPU).by_adapter
    assert [(place, len(tokens)) for place, tokens in parts] == [
        (0, 5),
        (1, 1024),
        (1, 1024),
        (1, 952),
    ]
    tokens = torch.cat([own for place, own in parts if place == 1])
    assert tokens.tolist() == list(range(3000))
    (one,) = StepRows.of(places[:3000], has_kernel=False, device=CPU).by_adapter
    assert one == (1, slice(0, 3000))  # of which views are taken


def test_codes_of_activations_are_refused(asked: Asked) -> None:
    options = LIMITS | {"quantization": "fp8", "kernel_config": {"fused_quantization": True}}
    config = EngineConfig(str(asked.base), **options).for_device("cuda")
    with pytest.raises(ValueError, match="enable_lora=True does not support kernel_config with"):
        prepare_lora(config, ModelConfig.from_checkpoint(asked.base))
