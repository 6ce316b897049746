"""In float32 a request's tokens do not depend on what the engine makes of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanoserve import LLM, SamplingParams

GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 7}
OPTIONS = {
    "plain": {},
    "chunks of 1": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "chunks of 16": {"long_prefill_token_threshold": 16},
    "chunks of 256": {"max_num_batched_tokens": 256},
    "blocks of 1": {"block_size": 1},
    "blocks of 256": {"block_size": 256},
    "no prefix cache": {"enable_prefix_caching": False},
    "a pool for one": {"num_kv_blocks": 20, "max_model_len": 320},
    "priority": {"scheduling_policy": "priority"},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The first is the one that is watched; a third of the others share a beginning with it."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 200, (50,), generator=generator).tolist()
    watched = torch.randint(300, (260,), generator=generator).tolist()
    others = [torch.randint(300, (n,), generator=generator).tolist() for n in lengths]
    others = [
        watched[: 4 * len(o) // 5] + o[:20] if i % 3 == 0 else o for i, o in enumerate(others)
    ]
    return [watched, *others]


def generate(checkpoint: Path, prompts, sampling: dict, num_requests: int, **options):
    params = [SamplingParams(max_tokens=24, **sampling)]
    params += [SamplingParams(max_tokens=24, temperature=0.5 * (i % 2)) for i in range(50)]
    with LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate(prompts[:num_requests], params[:num_requests], use_tqdm=False)
        again = llm.generate(prompts[0], params[0], use_tqdm=False)
        return outputs, again[0], llm.stats


@pytest.fixture(scope="module", params=["greedy", "seeded"])
def sampling(request: pytest.FixtureRequest, checkpoint: Path, prompts):
    settings = GREEDY if request.param == "greedy" else SEEDED
    outputs, _, _ = generate(checkpoint, prompts, settings, num_requests=1)
    expected = outputs[0].outputs[0].token_ids
    assert len(expected) == 24 and len(set(expected)) > 4
    return settings, expected


# A seeded request needs the same logits as a greedy one, and the same noise; among others it is in
# every danger that it is in alone.
@pytest.mark.small(sampling=["seeded"], num_requests=[51])
@pytest.mark.small(
    name=["chunks of 7", "blocks of 1", "no prefix cache", "a pool for one", "priority"]
)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("num_requests", [1, 51])
def test_tokens_do_not_depend_on(
    name, num_requests, checkpoint, prompts, sampling, by_size: Callable[..., int]
) -> None:
    if name == "chunks of 1" and num_requests > 1:
        num_requests = 3  # one token a step: 51 requests would take 6,000 steps
    num_requests = min(num_requests, by_size(11, 51))
    settings, expected = sampling
    outputs, again, stats = generate(checkpoint, prompts, settings, num_requests, **OPTIONS[name])
    assert outputs[0].outputs[0].token_ids == expected
    assert again.outputs[0].token_ids == expected  # a second time, out of the prefix cache
    assert (again.metrics.num_cached_prompt_tokens > 0) == (name != "no prefix cache")
    if name == "a pool for one" and num_requests > 1:
        assert stats.num_preemptions > 0


def test_the_watched_request_itself_survives_preemption(checkpoint, prompts, sampling) -> None:
    """Under the priority policy, make it the victim: others are more urgent and need its blocks."""
    settings, expected = sampling
    options = {"num_kv_blocks": 24, "max_model_len": 320, "scheduling_policy": "priority"}
    with LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, **options) as llm:
        engine = llm.engine
        engine.add_request("watched", prompts[0], SamplingParams(max_tokens=24, **settings), 9)
        for _ in range(6):
            engine.step()
        for i in range(8):  # one block each, and soon a second
            engine.add_request(
                str(i), prompts[1 + i][:14], SamplingParams(max_tokens=60, temperature=0), 1
            )
        finished = {}
        while engine.has_unfinished_requests():
            finished |= {o.request_id: o for o in engine.step() if o.finished}
    assert finished["watched"].metrics.num_preemptions > 0
    assert finished["watched"].outputs[0].token_ids == expected
