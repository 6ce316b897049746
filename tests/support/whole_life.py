"""Requests of every kind, alone and together, few and many: what an engine may meet in its life."""

from typing import Any

from nanoserve import SamplingParams, StructuredOutputsParams
from nanoserve.engine.guard import GuardedEngine

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "min_p": 0.1, "top_k": 7},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0, "logit_bias": {5: 2.0}, "logprobs": 2},
    {"temperature": 0.7, "seed": 5, "n": 2, "prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 0.7, "seed": 6, "min_tokens": 2, "bad_words": ["no"]},
]
_GRAMMAR = {"structured_outputs": StructuredOutputsParams(regex="[ -~]{1,9}")}
GUIDED: list[dict[str, Any]] = [
    {"temperature": 0} | _GRAMMAR,
    {"temperature": 0.9, "seed": 7, "top_p": 0.9} | _GRAMMAR,
    {"temperature": 0, "presence_penalty": 0.5} | _GRAMMAR,
]
LONGEST = 300  # tokens of a prompt


def live(engine: GuardedEngine, most_rows: int, has_grammars: bool) -> None:
    """Run waves of requests, each to its end: each kind alone, and then all kinds together.

    Of many, all but one are plain; so steps are of many sizes, up to `most_rows` rows.
    """
    kinds = KINDS + (GUIDED if has_grammars else [])
    waves = [[kind] for kind in kinds] + [kinds, kinds[::-1] * 2]
    waves += [[kinds[index % 2]] * many + [kinds[-1]] for index, many in enumerate((30, 90))]
    waves += [[kinds[0]] * most_rows]
    for number, wave in enumerate(waves):
        for index, kind in enumerate(wave):
            length = LONGEST if index == 3 else 1 + 7 * index % 40
            prompt = [(number + token % 5) % 200 for token in range(length)]
            params = SamplingParams(**kind, max_tokens=4 + index % 3 * 4, ignore_eos=True)
            engine.add_request(f"{number} {index}", prompt, params)
            if index % 4 == 3 and len(wave) < most_rows:  # others come while these are under way
                engine.step()
        while engine.has_unfinished_requests():
            engine.step()
