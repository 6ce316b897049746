"""The result of a pooling request depends on nothing that happens to it in the engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooling_models import TYPES, hidden_states, make_prompts, normalized, pooled
from tiny_checkpoints import GEMMA2, make_checkpoint, make_qwen3
from transformers import Gemma2ForCausalLM

from nanoserve import LLM, PoolingParams
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.pooling.requests import pooling_request

MOST = 1e-5
OPTIONS: dict[str, Any] = {
    "runner": "pooling",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_num_seqs": 4,
    "num_kv_blocks": 60,
    "max_model_len": 64,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("qwen3")
    yield folder, make_qwen3(folder)


def mixed_requests(seed: int, count: int = 24) -> list[tuple[list[int], PoolingParams]]:
    """Return requests of all pooling types; many of them share prefixes."""
    rng = np.random.default_rng(seed)
    lengths = tuple(map(int, rng.integers(1, 50, count)))
    prompts = make_prompts(lengths, seed)
    kinds = rng.choice(TYPES, count)
    return [
        (prompt, PoolingParams(pooling_type=str(kind), normalize=bool(rng.integers(2))))
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]


def run(llm: LLM, requests: list[tuple[list[int], PoolingParams]]) -> list[np.ndarray]:
    prompts, params = zip(*requests, strict=True)
    outputs = llm.encode([*prompts], [*params], use_tqdm=False)
    llm.engine.scheduler.check()
    assert not llm.engine.scheduler.has_unfinished()
    return [output.outputs.data.numpy() for output in outputs]


def expected_of(model: Any, prompt: list[int], params: PoolingParams) -> np.ndarray:
    rows = pooled(hidden_states(model, prompt), params.pooling_type)
    return normalized(rows) if params.normalize else rows


VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {"max_num_batched_tokens": 2048},
    "chunks": {"max_num_batched_tokens": 7},
    "chunks of one": {"max_num_batched_tokens": 4, "long_prefill_token_threshold": 1},
    "alone": {"max_num_seqs": 1, "max_num_batched_tokens": 11},
    "ahead": {"async_scheduling": True, "max_num_batched_tokens": 9},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    "few blocks": {"num_kv_blocks": 16, "max_num_batched_tokens": 12, "max_num_seqs": 6},
    "few blocks, ahead": {
        "num_kv_blocks": 17,
        "max_num_batched_tokens": 12,
        "max_num_seqs": 6,
        "async_scheduling": True,
    },
    "priority": {"scheduling_policy": "priority", "max_num_batched_tokens": 12},
}


@pytest.mark.small(backend=["numba"], name=["chunks", "ahead", "few blocks"])
@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_batches_hits_and_preemptions_change_nothing(
    name: str, backend: str, checkpoint: tuple[Path, Any]
) -> None:
    folder, reference = checkpoint
    options = OPTIONS | {"attention_backend": backend} | VARIANTS[name]
    requests = mixed_requests(seed=3)
    with LLM(str(folder), **options) as llm:
        for _ in range(2):  # the second time with cached prefixes
            for request, found in zip(requests, run(llm, requests), strict=True):
                np.testing.assert_allclose(found, expected_of(reference, *request), atol=MOST)
        hits = llm.stats.prefix_cache_hits
        assert (hits > 0) == options.get("enable_prefix_caching", True)


def test_what_is_read_decides_whether_a_prefix_may_be_cached(
    checkpoint: tuple[Path, Any],
) -> None:
    """The last token's state needs no other, so a prefix is found; all other types need all."""
    folder, reference = checkpoint
    prompt = make_prompts()[-1]
    with LLM(str(folder), **OPTIONS) as llm:
        for kind in TYPES:
            params = PoolingParams(pooling_type=kind, normalize=False)
            for turn in range(2):
                before = llm.stats.num_computed_tokens
                (output,) = llm.encode([prompt], params, use_tqdm=False)
                computed = llm.stats.num_computed_tokens - before
                is_hit = kind == "LAST" and turn == 1
                assert output.num_cached_tokens == (36 if is_hit else 0)
                assert computed == len(prompt) - (36 if is_hit else 0)
                expected = expected_of(reference, prompt, params)
                np.testing.assert_allclose(output.outputs.data, expected, atol=MOST)
            if kind == "LAST":
                llm.reset_prefix_cache()


def test_preemptions_happen_in_a_small_pool(checkpoint: tuple[Path, Any]) -> None:
    """Long prompts that all start at once: blocks are given for whole prompts, so only priority
    and prefixes leave room for one that comes later; it preempts while they are in chunks."""
    folder, reference = checkpoint
    options = OPTIONS | {"num_kv_blocks": 16, "max_num_batched_tokens": 4, "max_num_seqs": 4}
    params = PoolingParams(pooling_type="MEAN", normalize=False)
    prompts = make_prompts((30, 30, 30))
    with LLM(str(folder), **options) as llm:
        engine, found = llm.engine, {}
        for index, prompt in enumerate(prompts):
            engine.add(pooling_request(engine, str(index), prompt, params))
        for turn in range(1000):
            if turn == 5:  # whatever runs has computed a part of its prompt
                engine.reset_prefix_cache(reset_running_requests=True)
            found |= {output.request_id: output.pooled for output in engine.step()}
            if not engine.has_unfinished_requests():
                break
        assert engine.stats.num_preemptions > 0
    for index, prompt in enumerate(prompts):
        expected = expected_of(reference, prompt, params)
        np.testing.assert_allclose(found[str(index)], expected, atol=MOST)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("where", ["collect", "report", "put", "forward"])
def test_a_step_that_raises_is_computed_again(
    where: str, ahead: bool, checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a request has got its result, and before that was handed out."""
    folder, reference = checkpoint
    options = OPTIONS | {"max_num_batched_tokens": 9, "async_scheduling": ahead}
    requests = mixed_requests(seed=5, count=12)
    with LLM(str(folder), **options) as llm:
        engine, found = llm.engine, {}
        owner, name = {
            "collect": (engine.executor, "collect"),
            "forward": (engine.executor, "forward"),
            "report": (engine.output_processor, "_output"),
            "put": (engine.loop.outputs, "put"),
        }[where]
        original, calls = getattr(owner, name), 0

        def failing(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (2, 5, 6, 9):  # all prompts then begin again, so not for ever
                raise ZeroDivisionError("as planned")
            return original(*args)

        monkeypatch.setattr(owner, name, failing)
        for index, (prompt, params) in enumerate(requests):
            engine.add(pooling_request(engine, str(index), prompt, params))
        num_failed = 0
        while engine.has_unfinished_requests():
            try:
                outputs = engine.step()
            except ZeroDivisionError:
                num_failed += 1
                continue
            for output in outputs:
                assert output.request_id not in found and output.outputs[0].finish_reason == "stop"
                found[output.request_id] = output.pooled
        engine.scheduler.check()
    assert num_failed > 2
    for index, request in enumerate(requests):
        np.testing.assert_allclose(found[str(index)], expected_of(reference, *request), atol=MOST)


def test_an_aborted_request_leaves_nothing(checkpoint: tuple[Path, Any]) -> None:
    folder, reference = checkpoint
    params = PoolingParams(pooling_type="ALL", normalize=False)
    prompt = make_prompts()[-1]
    with LLM(str(folder), **OPTIONS | {"max_num_batched_tokens": 5}) as llm:
        engine: GuardedEngine = llm.engine
        engine.add(pooling_request(engine, "a", prompt, params))
        engine.step()
        output = engine.abort_request("a")
        assert output is not None and output.pooled is None
        assert output.outputs[0].finish_reason == "abort"
        assert engine.scheduler.block_manager.num_free_blocks == OPTIONS["num_kv_blocks"]
        engine.add(pooling_request(engine, "a", prompt, params))  # under the same id
        while engine.has_unfinished_requests():
            found = engine.step()
        expected = expected_of(reference, prompt, params)
        np.testing.assert_allclose(found[0].pooled, expected, atol=MOST)


def test_windows_give_blocks_back_while_a_prompt_is_pooled(tmp_path: Path) -> None:
    reference = make_checkpoint(Gemma2ForCausalLM, tmp_path, **GEMMA2)
    requests = mixed_requests(seed=8, count=10)
    with LLM(str(tmp_path), **OPTIONS | {"max_num_batched_tokens": 6}) as llm:
        for request, found in zip(requests, run(llm, requests), strict=True):
            np.testing.assert_allclose(found, expected_of(reference, *request), atol=MOST)


def test_nan_is_the_error_of_its_request(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    with LLM(str(folder), **OPTIONS) as llm:
        llm.engine.executor.model.model.embed_tokens.weight[7] = np.nan
        with pytest.raises(FloatingPointError, match="NaN"):
            llm.embed([[1, 7, 2]], use_tqdm=False)
        assert len(llm.embed([[1, 2]], use_tqdm=False)[0].outputs.embedding) == 48
        engine = llm.engine
        for name, prompt in (("bad", [7, 1]), ("good", [1, 2])):
            engine.add(pooling_request(engine, name, prompt))
        outputs = {output.request_id: output for output in engine.step()}
        assert outputs["bad"].outputs[0].finish_reason == "error" and outputs["good"].error is None
