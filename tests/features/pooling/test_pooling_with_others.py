"""Pooling together with other features: ranks, fewer bits, sleep, other weights, observers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from pooling_models import TYPES, hidden_states, make_prompts, normalized, pooled
from tiny_checkpoints import DEEPSEEK_V2, DELTA, GPT_OSS, make_checkpoint, make_qwen3

from nanoserve import LLM, PoolingParams
from nanoserve.features.trace.reader import read_trace

OPTIONS: dict[str, Any] = {
    "runner": "pooling",
    "skip_tokenizer_init": True,
    "num_kv_blocks": 60,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
}
PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("tied")
    yield folder, make_qwen3(folder, tie_word_embeddings=True)


def results(llm: LLM, kind: str = "LAST") -> list[np.ndarray]:
    outputs = llm.encode(PROMPTS, PoolingParams(pooling_type=kind), use_tqdm=False)
    return [output.outputs.data.numpy() for output in outputs]


def largest_error(llm: LLM, reference: Any, kinds: tuple[str, ...] = TYPES) -> float:
    return max(
        float(np.abs(found - normalized(pooled(hidden_states(reference, prompt), kind))).max())
        for kind in kinds
        for prompt, found in zip(PROMPTS, results(llm, kind), strict=True)
    )


RANKS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]


@pytest.mark.small(options=RANKS[:1])
@pytest.mark.parametrize("options", RANKS, ids=str)
def test_ranks_pool_as_one(options: dict[str, Any], checkpoint: tuple[Path, Any]) -> None:
    folder, reference = checkpoint
    with LLM(str(folder), **OPTIONS | options) as llm:
        assert largest_error(llm, reference) < 1e-5


@pytest.mark.size("full")
def test_ranks_classify_as_one(tmp_path: Path) -> None:
    architecture = transformers.Qwen3ForSequenceClassification
    make_checkpoint(architecture, tmp_path, num_labels=3)
    options = OPTIONS | {"tensor_parallel_size": 2}
    with LLM(str(tmp_path), **OPTIONS) as alone, LLM(str(tmp_path), **options) as llm:
        for one, other in zip(results(alone), results(llm), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "latent attention": ("DeepseekV2ForCausalLM", DEEPSEEK_V2),
    "recurrent states": ("Qwen3_5ForCausalLM", DELTA),
    "sinks": ("GptOssForCausalLM", GPT_OSS),
}


@pytest.mark.small(name=["recurrent states"])
@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_layers_are_pooled(name: str, tmp_path: Path) -> None:
    architecture, settings = KINDS[name]
    reference = make_checkpoint(getattr(transformers, architecture), tmp_path, **settings)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert largest_error(llm, reference) < 1e-5


@pytest.mark.parametrize(
    ("options", "most"),
    [({"quantization": "int8"}, 0.1), ({"kv_cache_dtype": "int8"}, 0.03)],
    ids=str,
)
def test_fewer_bits_are_near(
    options: dict[str, Any], most: float, checkpoint: tuple[Path, Any]
) -> None:
    folder, reference = checkpoint
    with LLM(str(folder), **OPTIONS | options) as llm:
        assert 1e-4 < largest_error(llm, reference) < most


def test_bits_do_not_depend_on_the_batch_if_that_is_promised(
    checkpoint: tuple[Path, Any],
) -> None:
    pytest.importorskip("numba", reason="batch_invariant needs nanoserve[cpu]")
    folder, _ = checkpoint
    found = []
    for options in ({}, {"max_num_batched_tokens": 5}, {"max_num_seqs": 1}):
        with LLM(str(folder), **OPTIONS | {"batch_invariant": True} | options) as llm:
            found += [results(llm), results(llm)]  # the second time from the prefix cache
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert np.array_equal(one, same)


def test_it_sleeps_and_takes_other_weights(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """Under the names of a whole model, or of its layers alone."""
    folder, reference = checkpoint
    other = make_qwen3(tmp_path, seed=5, tie_word_embeddings=True)
    with LLM(str(folder), **OPTIONS) as llm:
        before = results(llm)
        llm.sleep(level=2)
        llm.wake_up()
        assert all(map(np.array_equal, before, results(llm)))
        llm.update_weights(other.state_dict())
        assert largest_error(llm, other) < 1e-5
        llm.update_weights(reference.model.state_dict())
        assert all(map(np.array_equal, before, results(llm)))


def test_observers_see_requests_without_tokens(
    checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client", reason="metrics need pip install 'nanoserve[serve]'")
    folder, _ = checkpoint
    trace = tmp_path / "trace.jsonl"
    with LLM(str(folder), **OPTIONS, trace=str(trace), disable_log_stats=False) as llm:
        results(llm, "MEAN")
        metrics = {(metric.name, str(metric.labels)): metric for metric in llm.get_metrics()}
        stats = llm.stats
    assert stats.num_output_tokens == 0 and stats.num_prompt_tokens == sum(map(len, PROMPTS))
    ended = [m.value for (name, labels), m in metrics.items()
             if name == "vllm:request_success" and "stop" in labels]  # fmt: skip
    assert ended == [len(PROMPTS)]
    by_name = {name: metric for (name, _), metric in metrics.items()}
    assert by_name["vllm:prompt_tokens"].value == sum(map(len, PROMPTS))
    assert by_name["vllm:generation_tokens"].value == 0
    assert by_name["vllm:e2e_request_latency_seconds"].count == len(PROMPTS)
    assert by_name["vllm:time_to_first_token_seconds"].count == 0
    assert sum(len(step["rows"]) for step in read_trace(trace).steps) >= len(PROMPTS)


def test_an_engine_that_generates_loads_nothing_of_it(checkpoint: tuple[Path, Any]) -> None:
    import subprocess
    import sys

    folder, _ = checkpoint
    code = (
        "import sys; from nanoserve import LLM, SamplingParams;"
        f"LLM({str(folder)!r}, skip_tokenizer_init=True).generate("
        "[[1, 2]], SamplingParams(prompt_logprobs=1), use_tqdm=False);"
        "print([name for name in sys.modules if 'features.pooling' in name])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
