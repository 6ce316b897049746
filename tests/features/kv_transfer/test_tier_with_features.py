"""The host tier beside other features: draft models, grammars, several completions, aborts."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.engine.prefix_cache import PrefixCache
from nanoserve.features.kv_transfer.host_tier import HostTier

MANY_PLACES, FEW_PLACES = 0.002, 0.00006  # GiB
OPTIONS: dict[str, Any] = {
    **{"skip_tokenizer_init": True, "dtype": "float32", "block_size": 4, "max_model_len": 120},
    **{"max_num_seqs": 5, "max_num_batched_tokens": 48},
}
Request = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tier")
    make_qwen3(path)
    return path


def mixed(num_requests: int, seed: int) -> list[Request]:
    """Prompts with common beginnings, and parameters of every kind that may change KV blocks."""
    rng = random.Random(seed)
    starts = [[rng.randrange(64) for _ in range(80)] for _ in range(6)]
    requests = []
    for number in range(num_requests):
        prompt = rng.choice(starts)[: rng.randrange(5, 80)] + [rng.randrange(64)] * rng.randrange(3)
        temperature = rng.choice([0, 0.9])
        params = SamplingParams(
            temperature=temperature,
            seed=number,
            n=rng.choice([1, 1, 1, 3]) if temperature else 1,
            repetition_penalty=rng.choice([1, 1, 1.3]),
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, None, None, 0]),
            max_tokens=rng.randrange(1, 24),
            ignore_eos=True,
        )
        requests.append((prompt, params))
    return requests


def tier_of(llm: LLM) -> HostTier:
    (tier,) = [each for each in llm.engine.extensions if isinstance(each, HostTier)]
    return tier


def run(llm: LLM, requests: list[Request], seed: int) -> dict[str, list[list[int]]]:
    """Return the tokens of all requests, which arrive over time; one in twelve is aborted."""
    rng, engine = random.Random(seed), llm.engine
    found: dict[str, list[list[int]]] = {}
    aborted: list[str] = []
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
        if rng.random() < 1 / 12:
            aborted.append(str(number))
        while engine.has_unfinished_requests() and len(engine.scheduler.waiting) > rng.randrange(8):
            for output in engine.step():
                found[output.request_id] = [each.token_ids for each in output.outputs]
            if aborted and rng.random() < 0.2 and (last := engine.abort_request(aborted.pop(0))):
                found[last.request_id] = [each.token_ids for each in last.outputs]
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = [each.token_ids for each in output.outputs]
    engine.scheduler.check()
    return found


def agree(found: list[list[int]], expected: list[list[int]]) -> bool:
    """Return True if completions are the same as far as both got: aborts come at any time."""
    pairs = zip(found, expected, strict=True)
    return all(a[: len(b)] == b[: len(a)] for a, b in pairs)


def test_mixed_requests_get_the_same_tokens(path: Path, by_size: Callable[..., int]) -> None:
    """With pools and tiers of different sizes; each request runs with and without a tier."""
    num_requests = by_size(160, 2000, 20_000)
    totals = dict.fromkeys(("preempted", "loaded", "evicted", "ended"), 0)
    settings = [
        (num_kv_blocks, size, num_kv_blocks == 40)
        for num_kv_blocks in (30, 40, 70, 110)
        for size in (MANY_PLACES, FEW_PLACES)
    ]
    for seed, (num_kv_blocks, size, is_async) in enumerate(settings):
        requests = mixed(num_requests // len(settings), seed)
        options = OPTIONS | {"num_kv_blocks": num_kv_blocks, "async_scheduling": is_async}
        with LLM(path, **options) as llm:
            expected = run(llm, requests, seed)
        with LLM(path, kv_offloading_size=size, **options) as llm:
            found = run(llm, requests, seed)
            tier = tier_of(llm)
            tier.places.check()
            totals["loaded"] += tier.stats.num_loaded
            totals["evicted"] += tier.stats.num_evicted
            totals["preempted"] += llm.stats.num_preemptions
        wrong = [key for key in found.keys() & expected if not agree(found[key], expected[key])]
        assert not wrong, (seed, wrong)
        whole = [
            key
            for key, tokens in found.items()
            if len(tokens[0]) == requests[int(key)][1].max_tokens
        ]
        totals["ended"] += len(whole)
    assert totals["ended"] > 0.8 * num_requests, totals
    del totals["ended"]
    assert min(totals.values()) > 0.05 * num_requests, totals


def draft_of_itself(path: Path, **more: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Run an engine whose draft model is its own checkpoint: no draft token can be rejected."""
    draft = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 4}
    options = OPTIONS | {"num_kv_blocks": 40, "speculative_config": draft | {"adaptive": False}}
    rng = random.Random(3)
    starts = [[rng.randrange(64) for _ in range(70)] for _ in range(5)]
    prompts = [starts[number % 5][: rng.randrange(20, 70)] for number in range(40)]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=20, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM(path, **options, **more) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats
        counts = {
            "drafts": stats.num_draft_tokens,
            "rejected": stats.num_draft_tokens - stats.num_accepted_tokens,
            "loaded": tier_of(llm).stats.num_loaded if more else 0,
        }
    return [output.outputs[0].token_ids for output in outputs], counts


def test_a_block_from_the_host_is_none_of_the_draft_models(path: Path) -> None:
    """It has the model's K and V only, so the draft model has to compute its own."""
    expected, without = draft_of_itself(path)
    found, counts = draft_of_itself(path, kv_offloading_size=MANY_PLACES)
    assert found == expected
    assert without["rejected"] == counts["rejected"] == 0
    assert counts["drafts"] > 300 and counts["loaded"] > 50, counts


def test_taking_it_for_one_of_theirs_would_be_seen(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a block that is cached again had the number of its entry before."""
    monkeypatch.setattr(PrefixCache, "number_of", lambda self, block: int(self.has(block)))
    _, counts = draft_of_itself(path, kv_offloading_size=MANY_PLACES)
    assert counts["rejected"] > 0


def test_grammars_get_the_same_tokens(tmp_path: Path) -> None:
    """Jump-forward tokens lie in blocks that leave and come back like any others."""
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    make_qwen3(tmp_path, vocab_size=2048)
    schema = {
        "type": "object",
        "properties": {
            "the name of the city": {"enum": ["Vienna", "Graz"]},
            "inhabitants": {"type": "boolean"},
        },
        "required": ["the name of the city", "inhabitants"],
    }
    starts = ["The KV cache keeps keys. ", "A block table maps blocks. ", "A slot holds a token. "]
    prompts = [starts[number % 3] * (2 + number % 4) + str(number % 5) for number in range(36)]
    params = [
        SamplingParams(
            temperature=0.9 * (number % 2),
            seed=number,
            max_tokens=60,
            structured_outputs={"json": schema} if number % 3 else None,
        )
        for number in range(len(prompts))
    ]
    options: dict[str, Any] = OPTIONS | {"tokenizer": "tiny-qwen3", "num_kv_blocks": 60}
    options |= {"skip_tokenizer_init": False, "max_model_len": 200}
    with LLM(tmp_path, **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM(tmp_path, kv_offloading_size=MANY_PLACES, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert tier_of(llm).stats.num_loaded > 20 and llm.stats.num_accepted_tokens > 0
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert any('"Graz"' in o.outputs[0].text or '"Vienna"' in o.outputs[0].text for o in outputs)
