"""Requests whose KV blocks do not fit into the pool, for tiers and connectors."""

import random
from typing import Any

from nanoserve import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    **{"skip_tokenizer_init": True, "dtype": "float32", "block_size": 4, "num_kv_blocks": 40},
    **{"max_num_seqs": 5, "max_num_batched_tokens": 48, "max_model_len": 120},
}
SIZE = 0.002  # GiB: more than the tests need
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "torch": {"attention_backend": "torch"},
    "async": {"async_scheduling": True},
    "int8": {"kv_cache_dtype": "int8"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "priority": {"scheduling_policy": "priority"},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


def workload(num_requests: int = 60) -> tuple[list[list[int]], list[SamplingParams]]:
    """Conversations with common prefixes, several times as long as the pool together."""
    rng = random.Random(num_requests)
    starts = [[rng.randrange(64) for _ in range(80)] for _ in range(5)]
    prompts = [
        rng.choice(starts)[: rng.randrange(5, 80)] + [rng.randrange(64)] * rng.randrange(3)
        for _ in range(num_requests)
    ]
    params = [
        SamplingParams(
            temperature=(temperature := rng.choice([0, 0.9])),
            seed=index,
            n=rng.choice([1, 2]) if temperature else 1,
            prompt_logprobs=rng.choice([None, None, None, 0]),
            max_tokens=rng.randrange(1, 16),
            ignore_eos=True,
        )
        for index in range(num_requests)
    ]
    return prompts, params


def answers(llm: LLM, num_requests: int = 60) -> list[list[list[int]]]:
    prompts, params = workload(num_requests)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.scheduler.check()
    return [[completion.token_ids for completion in output.outputs] for output in outputs]
