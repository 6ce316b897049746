"""Requests of all kinds that arrive, and are aborted, as steps go by; do two lives agree?"""

import random
from typing import Any

from nanoserve import LLM, SamplingParams

# Too small for those that run in it.
TINY_POOL = {"num_kv_blocks": 26, "block_size": 4, "max_model_len": 96, "max_num_seqs": 12}


def random_params(rng: random.Random) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": rng.randint(3, 24), "ignore_eos": True}
    kind = rng.randrange(6)
    if kind == 0:
        settings |= {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}
    elif kind == 1:
        settings |= {"temperature": 0.9, "seed": rng.randrange(99), "n": 2, "top_p": 0.9}
    elif kind == 2:
        settings |= {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}}
    elif kind == 3:
        settings |= {"temperature": 0.0, "stop_token_ids": [*range(0, 2048, 9)]}
        settings["ignore_eos"] = False
    elif kind == 4:
        settings |= {"temperature": 1.0, "seed": 7, "min_tokens": 3, "stop": ["e"]}
    else:
        settings |= {"temperature": 0.0}
    return SamplingParams(**settings)


def mixed_life(llm: LLM, num_requests: int) -> dict[str, list[tuple[list[int], str | None]]]:
    """Tokens and finish reasons of requests that arrive, and are aborted, as steps go by.

    Which are aborted is fixed, when is not: it depends on how many steps there are.
    """
    rng, engine, found = random.Random(3), llm.engine, {}
    beginnings = [[rng.randrange(2048) for _ in range(40)] for _ in range(3)]
    requests = []
    for number in range(num_requests):
        prompt = rng.choice(beginnings)[: rng.randint(0, 40)] + [
            rng.randrange(2048) for _ in range(rng.randint(1, 30))
        ]
        requests.append((f"r{number}", prompt, random_params(rng), rng.random() < 0.1))
    doomed: dict[str, int] = {}

    def take(outputs: list[Any]) -> None:
        for output in outputs:
            if output.finished:
                found[output.request_id] = [
                    (completion.token_ids, completion.finish_reason)
                    for completion in output.outputs
                ]

    while requests or engine.has_unfinished_requests():
        for name, prompt, params, is_doomed in requests[:2]:
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
            if is_doomed:
                doomed[name] = rng.randint(0, 9)
        del requests[:2]
        take(engine.step())
        for name in [name for name, steps in doomed.items() if steps == 0]:
            output = engine.abort_request(name)
            take([] if output is None else [output])
        doomed = {name: steps - 1 for name, steps in doomed.items() if steps > 0}
    return found


def assert_same_life(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal tokens; of those that were aborted, perhaps at another token, as far as both go."""
    assert ours.keys() == theirs.keys()
    num_aborted = 0
    for name, completions in theirs.items():
        for (a, why_a), (b, why_b) in zip(ours[name], completions, strict=True):
            if "abort" in (why_a, why_b):
                num_aborted += 1
                shorter = min(len(a), len(b))
                assert a[:shorter] == b[:shorter]
            else:
                assert (a, why_a) == (b, why_b), name
    assert num_aborted > len(theirs) / 30
