"""A pipeline of real processes gives the tokens of one process, whatever else is asked of it.

On a CPU with gloo; it has not run on GPUs.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_life import TINY_POOL, assert_same_life, mixed_life
from model_fuzz import VOCAB_SIZE, ModelRun, reference_engine
from quantized_checkpoints import CASES, make_quantized
from shared_engine import SharedEngine
from tiny_checkpoints import GEMMA2, GEMMA3, make_checkpoint, make_qwen3
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.trace import summary
from nanoserve.config import EngineConfig
from nanoserve.features.parallel.pipeline_stage import share_layers, split_layers
from nanoserve.features.trace.phases import chrome_trace, stage_uses
from nanoserve.features.trace.reader import read_trace

LAYERS = {"num_hidden_layers": 3, "vocab_size": 2048}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 2,
}


def make_llm(path: Path | str, stages: int, tp: int = 1, **options: Any) -> LLM:
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": tp}
    common = {"dtype": "float32", "device": "cpu", "tokenizer": "tiny-qwen3"}
    return LLM(path, **common | sizes | options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three_layers")
    make_qwen3(folder, **LAYERS)
    return folder


# For three stages of four sequences each, and too small for all the tokens that these may have.
SMALL_POOL: dict[str, Any] = {
    "num_kv_blocks": 50,
    "block_size": 4,
    "max_model_len": 96,
    "max_num_seqs": 12,
}
SMALL_POOL |= {"attention_backend": "torch"}  # which leaves the weights' names as they are


@pytest.fixture(scope="module")
def three_stages(
    path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], LLM]]:
    """What gives the engine that tests share; it writes a trace."""
    shared = SharedEngine(make_llm)
    trace = tmp_path_factory.mktemp("trace") / "run.jsonl"
    yield lambda: shared(path, 3, trace=trace, **SMALL_POOL)
    shared.close()


@pytest.mark.small(sizes=[(3, 1)])
@pytest.mark.parametrize("sizes", [(2, 1), (3, 1), (2, 2)], ids=str)
def test_stages_answer_mixed_requests_as_one_process_does(
    path: Path,
    three_stages: Callable[[], LLM],
    sizes: tuple[int, int],
    by_size: Callable[..., int],
) -> None:
    """In a pool that is too small, with aborts: hundreds of requests with --soak.

    On two cores, four processes take a while.
    """
    num_requests = by_size(40, 120 if sizes[1] == 1 else 60, 300)
    pool = SMALL_POOL if sizes == (3, 1) else TINY_POOL
    with make_llm(path, 1, **pool) as llm:
        expected = mixed_life(llm, num_requests)
        assert llm.stats.num_preemptions > 5
    llm = three_stages() if sizes == (3, 1) else make_llm(path, *sizes, **pool)
    before, rows = llm.stats.num_preemptions, []
    llm.engine.observers.append(lambda plan, batch, result, times: rows.append(len(plan.rows)))
    found = mixed_life(llm, num_requests)
    num_preemptions = llm.stats.num_preemptions - before
    assert num_preemptions > 5
    assert len(llm.engine.executor.worker_pids) == sizes[0] * sizes[1] - 1
    print("steps", len(rows), "preemptions", num_preemptions)
    scheduler = llm.engine.scheduler
    assert scheduler.block_manager.num_free_blocks == pool["num_kv_blocks"]
    assert not (scheduler.held or scheduler.running or scheduler.waiting)
    if sizes != (3, 1):
        llm.close()
    assert_same_life(found, expected)


CHECKPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "untied": (Qwen3ForCausalLM, LAYERS),
    "tied": (Qwen3ForCausalLM, LAYERS | {"tie_word_embeddings": True}),
    "gemma2": (Gemma2ForCausalLM, LAYERS | GEMMA2),
    "gemma3": (Gemma3ForCausalLM, LAYERS | GEMMA3),
    "experts": (Qwen3MoeForCausalLM, LAYERS | MOE),
}


@pytest.mark.size("full")
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_models_of_all_kinds(tmp_path: Path, kind: str) -> None:
    architecture, overrides = CHECKPOINTS[kind]
    make_checkpoint(architecture, tmp_path, **overrides)
    asked = [[5 * i + j for j in range(1 + 7 * i)] for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    with make_llm(tmp_path, 1) as llm:
        expected = llm.generate(asked, params, use_tqdm=False)
    with make_llm(tmp_path, 3) as llm:
        found = llm.generate(asked, params, use_tqdm=False)
    for a, b in zip(found, expected, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert abs(a.outputs[0].cumulative_logprob - b.outputs[0].cumulative_logprob) < 1e-4


@pytest.mark.size("full")
@pytest.mark.parametrize(
    "options",
    [
        # In 16 bits what a token becomes depends on who is computed beside it: here nobody is.
        {"dtype": "bfloat16", "max_num_seqs": 1},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"attention_backend": "torch", "max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"scheduling_policy": "priority", "long_prefill_token_threshold": 5},
    ],
    ids=str,
)
def test_beside_other_options(path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("numba")
    # A prompt of less than 32 tokens is one chunk in either case.
    asked = [[5 * i + j for j in range(1 + 7 * i)] for i in range(5 if "dtype" in options else 9)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for stages in (1, 2):
        with make_llm(path, stages, **options) as llm:
            outputs = llm.generate(asked, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.size("full")
@pytest.mark.parametrize("case", ["gptq, 8 bits", "awq"])
def test_quantized_checkpoints(tmp_path: Path, case: str) -> None:
    pytest.importorskip("numba", reason="pip install 'nanoserve[cpu]'")
    make_quantized(tmp_path, *CASES[case], seed=1)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = []
    for stages in (1, 2):
        with make_llm(tmp_path, stages, skip_tokenizer_init=True) as llm:
            outputs = llm.generate([[5, 6, 7], [9] * 20], params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.size("full")
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_stages_verify_guesses(path: Path, method: str) -> None:
    """Of a sequence that is in one step at a time, all tokens are known to who guesses."""
    guesses: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    if method == "draft_model":
        guesses |= {"model": str(path)}
    else:
        guesses |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    asked = [[i, i + 1, i + 2] * 6 for i in range(1, 11)]
    kinds = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=5, max_tokens=40, repetition_penalty=1.2),
    ]
    with make_llm(path, 1) as llm:
        expected = llm.generate(asked, kinds * 5, use_tqdm=False)
    with make_llm(path, 3, speculative_config=guesses) as llm:
        found = llm.generate(asked, kinds * 5, use_tqdm=False)
        stats = llm.stats
    for a, b in zip(found, expected, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
    assert stats.num_draft_tokens > 50
    assert method == "ngram" or stats.num_accepted_tokens > 100


def test_stages_obey_grammars(path: Path, three_stages: Callable[[], LLM]) -> None:
    pytest.importorskip("llguidance")
    guide = StructuredOutputsParams(regex="[0-9]{3} is a number, and so is [0-9]{3}")
    params = [
        SamplingParams(temperature=temperature, seed=1, max_tokens=40, structured_outputs=guided)
        for temperature in (0, 1)
        for guided in (guide, None)
    ]
    found = []
    with make_llm(path, 1) as alone:
        for llm in (alone, three_stages()):
            before = getattr(llm.stats, "num_accepted_tokens", 0)  # nobody has asked before
            outputs = llm.generate([[5, 6]] * len(params) * 2, params * 2, use_tqdm=False)
            assert all(output.error is None for output in outputs)
            found.append([output.outputs[0].token_ids for output in outputs])
            assert llm.stats.num_accepted_tokens > before + 10  # forced runs
    assert found[0] == found[1]


@pytest.mark.size("full")
def test_random_lives(
    path: Path, by_size: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    """Arrivals, aborts, streams, code that raises, a device that fails: as for one process."""
    caplog.set_level(logging.CRITICAL, logger="nanoserve")
    counts: Counter[str] = Counter()
    with reference_engine(path) as reference:
        for seed in range(by_size(2, 4, 60)):
            pipeline = {"pipeline_parallel_size": 2 + seed % 2, "async_scheduling": False}
            run = ModelRun(seed, path, reference, **pipeline)
            run.run()
            counts += run.counts
    assert LAYERS["vocab_size"] == VOCAB_SIZE
    assert counts["requests"] and counts["streams"]


def test_a_stage_has_its_layers_and_no_others(three_stages: Callable[[], LLM]) -> None:
    runner = three_stages().engine.executor.runner
    names = [name for name, _ in runner.model.named_parameters()]
    assert len(runner.kv_caches) == 1
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"2"}
    assert not any("embed_tokens" in name for name in names)
    assert "lm_head.weight" in names and "model.norm.weight" in names


def config_of(path: Path) -> ModelConfig:
    return ModelConfig.from_checkpoint(path)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_layers_are_shared_out(path: Path, num_stages: int) -> None:
    shares = share_layers(config_of(path), num_stages)
    assert [index for share in shares for index in share] == [0, 1, 2]
    assert all(shares)


@pytest.mark.parametrize("seed", range(8))
def test_of_the_fastest_splits_the_one_with_the_largest_pool_is_taken(seed: int) -> None:
    """Found by trying all."""
    rng = random.Random(seed)
    for _ in range(40):
        layers = [rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
        embedding, head = rng.randint(0, 20), rng.randint(0, 20)
        num_stages = rng.randint(1, min(4, len(layers)))
        split = split_layers(layers, embedding, head, num_stages)
        every = [
            [range(a, b) for a, b in pairwise([0, *inner, len(layers)])]
            for inner in combinations(range(1, len(layers)), num_stages - 1)
        ]
        assert split in every
        least = min(_slowest_read(parts, layers, head) for parts in every)
        fastest = [parts for parts in every if _slowest_read(parts, layers, head) == least]
        assert split in fastest
        most = max(_num_blocks(parts, layers, embedding, head) for parts in fastest)
        assert _num_blocks(split, layers, embedding, head) == most


def _slowest_read(parts: list[range], layers: list[int], head: int) -> int:
    reads = [sum(layers[i] for i in part) for part in parts]
    return max([*reads[:-1], reads[-1] + head])


def _num_blocks(parts: list[range], layers: list[int], embedding: int, head: int) -> int:
    """In memory that is ample; 840 is a multiple of all numbers of layers, so nothing is lost."""
    kept = [sum(layers[i] for i in part) for part in parts]
    kept[0] += embedding
    kept[-1] += head
    memory = 1000 * (sum(layers) + embedding + head)
    return min((memory - kept[i]) * 840 // len(part) for i, part in enumerate(parts))


EMBEDDING = 151_936 * 1024  # of Qwen3-0.6B, tied to its head
LAYER = 15_730_944


@pytest.mark.parametrize(
    ("num_layers", "layer", "embedding", "expected"),
    [
        (28, LAYER, EMBEDDING, [9, 9, 9, 1]),  # not 7, 10, 10, 1, as fast
        (28, LAYER, EMBEDDING, [19, 9]),
        (4, LAYER, EMBEDDING, [1, 1, 1, 1]),  # a layer for each, whatever the head takes
        (36, 192_946_432, 622_329_856, [10, 10, 10, 6]),  # Qwen3-8B
        (
            80,
            855_654_400,
            1_050_673_152,
            [19, 21, 21, 19],
        ),  # Llama-3.3-70B
        (32, 1, 0, [8, 8, 8, 8]),
    ],
)
def test_known_models_are_split(
    num_layers: int, layer: int, embedding: int, expected: list[int]
) -> None:
    split = split_layers([layer] * num_layers, embedding, embedding, len(expected))
    assert [len(part) for part in split] == expected


def test_what_does_not_go_together_is_refused(path: Path) -> None:
    for options, told in (
        (
            {"pipeline_parallel_size": 4},
            "pipeline_parallel_size=4 must be at most the model's 3 layers",
        ),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0"),
        ({"pipeline_parallel_size": 2, "async_scheduling": True}, "async_scheduling"),
        ({"pipeline_parallel_size": 2, "capture_sampling": True}, "capture_sampling"),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"method": "hidden_head"}},
            "hidden_head",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            LLM(path, device="cpu", tokenizer="tiny-qwen3", **options)


def test_steps_are_shared_out(path: Path, three_stages: Callable[[], LLM]) -> None:
    """Nobody is in two steps, and no step takes more than its share."""
    llm = three_stages()
    engine, rows = llm.engine, []

    def observe(plan: Any, batch: Any, result: Any, times: Any) -> None:
        assert batch.header.num_pending == 0
        under_way = [row.seq for plan in engine.plans_under_way for row in plan.sampled]
        assert len(under_way) == len(set(under_way))
        rows.append(len(plan.rows))

    engine.observers.append(observe)
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    llm.generate([[7, 8, 9 + i] for i in range(12)], params, use_tqdm=False)
    steady = rows[12:-12]
    assert len(steady) > 12 and set(steady) == {4}, rows
    assert EngineConfig(str(path), pipeline_parallel_size=3).num_steps_ahead == 2
    assert torch.get_num_threads() >= 1


@pytest.mark.size("full")
def test_a_trace_tells_how_busy_the_stages_were(three_stages: Callable[[], LLM]) -> None:
    asked = [[7, 8, 9 + i] * 5 for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm = three_stages()
    before = llm.stats
    llm.generate(asked, params, use_tqdm=False)
    assert llm.stats.num_preemptions > before.num_preemptions
    trace = read_trace(llm.engine.config.trace)
    assert len(trace.steps) == llm.stats.num_steps
    trace = replace(trace, steps=trace.steps[before.num_steps :])  # this test's
    assert not any(step["undone"] for step in trace.steps)
    for step in trace.steps:
        spans = step["stages"]
        assert len(spans) == 3
        # A stage begins when the one before has sent; clocks of processes agree on one machine.
        for (begin, end), (next_begin, _) in zip(spans, [*spans[1:], [1e9, 1e9]], strict=True):
            assert 0 < begin <= end <= next_begin + 0.01
    uses = stage_uses(trace)
    assert len(uses) == 3 and all(0 <= use.ideal <= use.bubble < 1 for use in uses)
    assert summary(trace).count("bubble") == 3
    chrome = chrome_trace(trace)["traceEvents"]
    tracks = {event["tid"] for event in chrome if event["pid"] == 3 and event["ph"] == "X"}
    assert tracks == {0, 1, 2}
    assert "stage" not in summary(replace(trace, steps=[]))


@pytest.mark.size("full")
def test_stages_sleep_and_wake(path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with make_llm(path, 2) as llm:
        expected = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs
        with pytest.raises(ValueError, match="use level=2"):
            llm.sleep(level=1)
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs == expected
