"""Mixed steps in CUDA graphs on an NVIDIA GPU: `capture_mixed_steps`, which is on by itself.

    pytest -m gpu tests/gpu/test_mixed_gpu.py

In float32 tokens must be the same whatever computes them.
"""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from count_replays import count_replays

pytest.importorskip("triton")

from no_waiting import no_waiting
from tiny_checkpoints import make_checkpoint, make_qwen3
from transformers import Qwen3MoeForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs
from nanoserve.kernels.triton.paged_attention import paged_attention
from nanoserve.worker import cuda_device
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.gpu_memory import measure_mixed_graphs
from nanoserve.worker.mixed_program import MixedProgram
from nanoserve.worker.model_runner import Handle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = "cuda"
Prompts = list[list[int]]


# ---------------------------------------------------------------- attention alone


def rows_of(seed: int, max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    """(tokens, context) of some decode rows and some chunks, of which there may be none at all."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    num_decodes = 0 if seed % 5 == 0 else draw(1, max_rows - 2)
    rows = [(1, draw(1, 3000)) for _ in range(num_decodes)]
    left = max_tokens - num_decodes
    for _ in range(draw(1, max_rows - num_decodes)):
        tokens = draw(2, max(2, left // 2))
        if tokens > left:
            break
        rows.append((tokens, tokens + draw(0, 1) * draw(1, 2000)))
        left -= tokens
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sees", [{}, {"sliding_window": 700, "soft_cap": 30.0}], ids=str)
def test_one_graph_of_attention_is_right_for_every_mix_of_rows(
    dtype: torch.dtype, sees: dict[str, float]
) -> None:
    """Against the same kernels launched for each step; padding holds NaN and far-off blocks."""
    max_rows, max_tokens, width, block_size = 40, 1024, 256, 16
    torch.manual_seed(0)
    cache = torch.randn(2, 3000, 2, block_size, 128, device=DEVICE, dtype=dtype)
    q = torch.empty(max_tokens, 4, 128, device=DEVICE, dtype=dtype)
    tables = torch.empty(max_rows, width, device=DEVICE, dtype=torch.int32)
    header = torch.zeros(10, device=DEVICE, dtype=torch.int32)
    starts = torch.zeros(max_rows + 1, device=DEVICE, dtype=torch.int32)
    lens = torch.zeros(max_rows, device=DEVICE, dtype=torch.int32)
    common = {"scale": 128**-0.5, "max_context_len": width * block_size} | sees

    def fill(rows: list[tuple[int, int]]) -> int:
        tokens = sum(n for n, _ in rows)
        q.fill_(torch.nan)
        q[:tokens] = torch.randn_like(q[:tokens])
        tables.fill_(2**30)
        for row, (_, context) in enumerate(rows):
            blocks = -(-context // block_size)
            tables[row, :blocks] = torch.randint(1, 3000, (blocks,), device=DEVICE)
        ends = torch.tensor([0, *[n for n, _ in rows]], device=DEVICE).cumsum(0)
        starts.fill_(2**30)
        starts[: len(rows) + 1] = ends
        lens.fill_(2**30)
        lens[: len(rows)] = torch.tensor([context for _, context in rows], device=DEVICE)
        header[2], header[3] = len(rows), sum(n == 1 for n, _ in rows)
        return tokens

    def launch() -> torch.Tensor:
        step = q, cache, starts, lens, tables
        return paged_attention(*step, num_decode_rows=0, row_counts=header[2:4], **common)

    fill([(2, 2)])
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 2e-5}[dtype]
    for seed in range(40):
        rows = rows_of(seed, max_rows, max_tokens)
        tokens, num_rows = fill(rows), len(rows)
        out.fill_(torch.nan)
        graph.replay()
        expected = paged_attention(
            q[:tokens],
            cache,
            starts[: num_rows + 1],
            lens[:num_rows],
            tables[:num_rows],
            num_decode_rows=int(header[3]),
            **common,
        )
        error = (out[:tokens].float() - expected.float()).abs().max().item()
        assert error < tolerance, (seed, rows)  # false for NaN
        assert out[tokens:].isnan().all()  # nobody has written there


# ---------------------------------------------------------------- the engine


def open_float32(path: str | Path, **options: Any) -> LLM:
    options = {"num_kv_blocks": 2000, "max_num_seqs": 40, "max_num_batched_tokens": 700} | options
    return LLM(path, dtype="float32", device="cuda", skip_tokenizer_init=True, **options)


@pytest.fixture(scope="module", params=["plain", "windowed", "experts"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "experts":
        moe = {"num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        make_checkpoint(Qwen3MoeForCausalLM, path, **moe)
    elif request.param == "windowed":
        make_qwen3(path, use_sliding_window=True, sliding_window=50, max_window_layers=1)
    else:
        make_qwen3(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Of 1 to 300 tokens, of which some share their beginnings."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 200, (70,), generator=generator).tolist()
    drawn = [torch.randint(300, (n,), generator=generator).tolist() for n in lengths]
    return [drawn[0][: i % 3 * 50] + prompt for i, prompt in enumerate(drawn)]


def tokens(llm: LLM, prompts: Prompts) -> Prompts:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.95},
        {"temperature": 0, "repetition_penalty": 1.1, "logprobs": 2},
    ]
    params = [
        SamplingParams(max_tokens=24 - i % 17, ignore_eos=True, seed=i, **kinds[i % 4])
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def mixed_program(llm: LLM) -> MixedProgram:
    (program,) = (p for p in llm.engine.executor.device.programs if isinstance(p, MixedProgram))
    return program


OPTIONS: dict[str, dict[str, Any]] = {
    "mixed steps in graphs": {},
    "and sampling": {"capture_sampling": True},
    "in turn": {"async_scheduling": False},
    "a pool for few": {"num_kv_blocks": 40, "max_model_len": 400},
    "chunks of 16": {"long_prefill_token_threshold": 16},
    "a small budget": {"max_num_batched_tokens": 90},
    "blocks of 256": {"block_size": 256, "num_kv_blocks": 200},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_eager_steps(name: str, path: Path, prompts: Prompts) -> None:
    """Every step with a prompt is replayed, at several sizes; what is padded changes nothing."""
    with open_float32(path, enforce_eager=True) as eager:
        expected = tokens(eager, prompts)
    with open_float32(path, **OPTIONS[name]) as llm:
        replayed, steps = count_replays(mixed_program(llm).graphs), []
        llm.engine.observers.append(
            lambda plan, batch, result, times: steps.append(batch.header.max_query_len > 1)
        )
        assert tokens(llm, prompts) == expected
        assert len(replayed) == sum(steps) > 5, Counter(replayed)
        assert len(set(replayed)) >= 2, Counter(replayed)
        assert (llm.stats.num_preemptions > 0) == (name == "a pool for few")


def test_codes_of_8_bits_are_stored_and_read(tmp_path: Path, prompts: Prompts) -> None:
    make_qwen3(tmp_path)
    answers = []
    for options in ({"enforce_eager": True}, {}):
        with open_float32(tmp_path, kv_cache_dtype="int8", **options) as llm:
            answers.append(tokens(llm, prompts))
    assert answers[0] == answers[1]


def test_a_mixed_step_is_launched_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: Prompts
) -> None:
    """And no graph is captured while it serves, for which all would wait."""
    make_qwen3(tmp_path)
    with open_float32(tmp_path, enable_prefix_caching=False) as llm:
        executor, captured = llm.engine.executor, []
        monkeypatch.setattr(executor.device.cuda, "capture", lambda *args: captured.append(args))
        tokens(llm, prompts)  # what is set up on first use
        forward, replayed = executor.forward, count_replays(mixed_program(llm).graphs)

        def watched_forward(batch: Batch, inputs: ForwardInputs) -> Handle:
            with no_waiting() if batch.header.max_query_len > 1 else nullcontext():
                return forward(batch, inputs)

        monkeypatch.setattr(executor, "forward", watched_forward)
        tokens(llm, prompts)
        assert len(replayed) > 5 and not captured


def test_they_take_what_was_set_aside_and_no_more_while_they_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path, hidden_size=512, intermediate_size=2048)
    measured: list[int] = []
    taken: list[int] = []
    capture = CudaDevice._capture_mixed

    def measure(*args: Any) -> int:
        measured.append(measure_mixed_graphs(*args))
        return measured[-1]

    def watched_capture(device: CudaDevice, sizes: list[int], **options: Any) -> Any:
        if "shows_progress" not in options:  # while it is measured
            return capture(device, sizes, **options)
        before = free_bytes()
        programs = capture(device, sizes, **options)
        taken.append(before - free_bytes())
        return programs

    monkeypatch.setattr(cuda_device, "measure_mixed_graphs", measure)
    monkeypatch.setattr(CudaDevice, "_capture_mixed", watched_capture)
    with LLM(
        tmp_path,
        device="cuda",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.1,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
    ) as llm:
        graphs = mixed_program(llm).graphs
        assert len(graphs.outputs) == len(graphs.sizes) == 10
        print(f"{measured} bytes measured, {taken} taken")
        assert 0 < taken[0] < measured[0] + 32 * 2**20  # kernels are loaded meanwhile, too
        tokens(llm, [[7] * 400] * 10)  # the caches of libraries
        before, replayed = free_bytes(), count_replays(graphs)
        for size in graphs.sizes:
            tokens(llm, [[7] * (size // 16)] * 16)
        assert set(replayed) == {*graphs.sizes}
        assert before - free_bytes() < 32 * 2**20


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
