"""Evicted blocks go to the host's memory and come back: the same tokens, and fewer computed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_workload import KINDS, OPTIONS, SIZE, answers, workload
from tiny_checkpoints import make_qwen3
from windowed_models import make_windowed

from nanoserve import LLM, SamplingParams
from nanoserve.attention.kv_cache import KVCache, KVCacheSpec
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.executor import ForwardInputs
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence
from nanoserve.features.kv_transfer.host_places import HostPlaces
from nanoserve.features.kv_transfer.host_tier import HostTier
from nanoserve.worker.host_pool import HostPool
from nanoserve.worker.model_runner import ModelRunner


def tier_of(llm: LLM) -> HostTier:
    (tier,) = [each for each in llm.engine.extensions if isinstance(each, HostTier)]
    tier.places.check()
    return tier


@pytest.mark.small(kind=["plain", "async", "int8", "drafts"])
@pytest.mark.parametrize("size", [SIZE, 0.00006])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_without_it(kind: str, size: float, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    options = {**OPTIONS, **KINDS[kind]}
    with LLM(tmp_path, **options) as llm:
        expected, hits = answers(llm), llm.stats.prefix_cache_hits
    with LLM(tmp_path, kv_offloading_size=size, **options) as llm:
        assert answers(llm) == expected
        stats = tier_of(llm).stats
        assert stats.num_stored and stats.num_loaded and stats.hits
        assert llm.stats.prefix_cache_hits > hits
        if size < SIZE:
            assert stats.num_evicted


@pytest.mark.small(name=["gemma2"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_groups_of_layers(name: str, tmp_path: Path) -> None:
    """Each group's block has a place of its own."""
    make_windowed(name, tmp_path)
    options = OPTIONS | {"num_kv_blocks": 130}
    with LLM(tmp_path, **options) as llm:
        expected = answers(llm)
    with LLM(tmp_path, kv_offloading_size=SIZE, **options) as llm:
        assert answers(llm) == expected
        assert tier_of(llm).stats.num_loaded


def test_a_prompt_comes_back_from_the_host(tmp_path: Path) -> None:
    """All of its full blocks but the one with the last token, and none is computed again."""
    make_qwen3(tmp_path)
    prompt, one = [*range(61)], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    others = [[100 + i] * 80 for i in range(3)]
    with LLM(tmp_path, kv_offloading_size=SIZE, **OPTIONS) as llm:
        (first,) = llm.generate(prompt, one, use_tqdm=False)
        llm.generate(others, one, use_tqdm=False)  # 60 blocks: the pool has 40
        before = llm.stats.num_computed_tokens
        (second,) = llm.generate(prompt, one, use_tqdm=False)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 60)
        assert llm.stats.num_computed_tokens == before + 1
        assert first.outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize("method", ["reset", "sleep", "weights"])
def test_what_the_prefix_cache_forgets_the_host_forgets(method: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    with LLM(tmp_path, kv_offloading_size=SIZE, **OPTIONS) as llm:
        expected = answers(llm)
        assert len(tier_of(llm).places)
        if method == "reset":
            llm.reset_prefix_cache()
        elif method == "sleep":
            llm.sleep(1)
            llm.wake_up()
        else:
            llm.update_weights(tmp_path)
        assert len(tier_of(llm).places) == 0
        assert answers(llm) == expected
        assert len(tier_of(llm).places)


@pytest.mark.parametrize("when", ["before the copies", "after the copies"])
def test_a_step_that_fails_among_its_copies(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        expected = answers(llm)
    copy, num_copies = HostPool.copy, 0

    def fail(self: HostPool, kv_caches: Any, transfers: KVTransfers) -> None:
        nonlocal num_copies
        num_copies += 1
        if when == "after the copies":
            copy(self, kv_caches, transfers)
        if num_copies % 7 == 3:
            raise RuntimeError("planted")
        if when == "before the copies":
            copy(self, kv_caches, transfers)

    monkeypatch.setattr(HostPool, "copy", fail)
    prompts, params = workload()
    with LLM(tmp_path, kv_offloading_size=SIZE, **OPTIONS) as llm:
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            llm.engine.add_request(str(index), prompt, each)
        found: dict[str, list[list[int]]] = {}
        while llm.engine.has_unfinished_requests():
            try:
                outputs = llm.engine.step()
            except RuntimeError as error:
                assert "planted" in str(error)
                continue
            for output in outputs:
                if output.finished:
                    found[output.request_id] = [o.token_ids for o in output.outputs]
        assert num_copies > 10
        assert [found[str(index)] for index in range(len(prompts))] == expected
        assert tier_of(llm).stats.num_loaded


def test_tails_are_evicted_before_heads() -> None:
    """After any number of evictions, what the host has of a chain is its beginning."""
    manager = BlockManager(10, 2)
    tier = HostTier(manager, HostPlaces(manager.prefix_cache, 3))

    def run(token_ids: list[int]) -> int:
        seq = Sequence("a", token_ids, SamplingParams(), 100)
        tier.may_admit(seq, Plan(0))
        manager.allocate(seq, len(token_ids), manager.lookup(seq))
        seq.num_computed_tokens = manager.block_size * seq.num_cached_blocks
        num_cached = seq.num_computed_tokens + tier.on_admit(seq)
        manager.cache(seq, len(token_ids))
        tier.forward_inputs(Plan(0), ForwardInputs())
        manager.free(seq)
        return num_cached

    assert run([*range(17)]) == 0
    assert run([50] * 20) == 0
    assert (len(tier.places), tier.stats.num_evicted) == (3, 5)
    assert run([*range(17)]) == 6  # the head of the first chain


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_places_hold_what_blocks_held(dtype: str) -> None:
    spec = KVCacheSpec.of_format(4, 2, 8, torch.bfloat16, dtype)
    caches: list[Any] = spec.allocate(3, 6)
    shared = [KVCache(cache.values, cache.scales, group=1) for cache in caches[:2]]
    for cache in caches:
        cache.values.copy_(torch.randint(0, 100, cache.values.shape))
        if cache.scales is not None:
            cache.scales.copy_(torch.rand(cache.scales.shape))
    kept = [(c.values.clone(), None if c.scales is None else c.scales.clone()) for c in caches]
    pool = HostPool([*caches, *shared], 4, lambda n: np.zeros(n, dtype=np.uint8))
    assert pool.memory.shape == (4, 3 * spec.block_bytes)
    # Block 5 leaves, and gets at once what block 2 had: out before in.
    pool.copy(caches, KVTransfers([(2, 3)], []))
    pool.copy(caches, KVTransfers([(5, 0)], [(3, 5)]))
    pool.copy(caches, KVTransfers([], [(0, 1)]))
    for cache, (values, scales) in zip(caches, kept, strict=True):
        order = [0, 5, 2, 3, 4, 2]
        assert torch.equal(cache.values, values[:, order])
        if scales is not None:
            assert torch.equal(cache.scales, scales[:, order])


def test_transfers_travel_as_bytes() -> None:
    for transfers in (
        KVTransfers([], []),
        KVTransfers([(1, 2), (3, 4)], [(5, 6)]),
        KVTransfers([], [(7, 8)]),
    ):
        found = KVTransfers.from_bytes(transfers.to_bytes())
        assert [[*map(tuple, pairs)] for pairs in found] == [*transfers]


def test_bad_sizes_are_rejected_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path)
    monkeypatch.setattr(ModelRunner, "load", lambda *args: pytest.fail("weights are read"))
    for size, message in (
        (-1, "kv_offloading_size=-1"),
        (True, "kv_offloading_size=True"),
        ("2", "kv_offloading_size='2'"),
        (float("nan"), "kv_offloading_size=nan"),
        (1e-9, "holds no KV block, which takes"),
        (1e6, "more than this machine's memory"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(tmp_path, kv_offloading_size=size, **OPTIONS)
    with pytest.raises(ValueError, match="needs enable_prefix_caching=True"):
        LLM(tmp_path, kv_offloading_size=1, enable_prefix_caching=False, **OPTIONS)


def test_a_size_of_zero_is_no_tier(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    with LLM(tmp_path, kv_offloading_size=0, enable_prefix_caching=False, **OPTIONS) as llm:
        assert not any(isinstance(each, HostTier) for each in llm.engine.extensions)
