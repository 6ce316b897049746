"""Sampling parameters that vLLM has, or had, or that others have, and nanoserve has not."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

LIKE = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "top_logprobs": "logprobs",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "eos_token_id": "stop_token_ids",
    **dict.fromkeys(
        (
            *("guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("grammar", "json_schema", "response_format"),
        ),
        "structured_outputs",
    ),
    "random_seed": "seed",
}
_BEAMS = "LLM.beam_search(prompts, BeamSearchParams(...)) searches"
# By name: what to do instead, and the values that ask for nothing.
FOREIGN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "best_of": ("ask for n completions with logprobs=0, and sort by cumulative_logprob", (1,)),
    "use_beam_search": (_BEAMS, (False,)),
    "length_penalty": (_BEAMS, (1.0,)),
    "early_stopping": (_BEAMS, (False,)),
    "truncate_prompt_tokens": (
        "generate(..., tokenization_kwargs={'truncate_prompt_tokens': ...}) cuts prompts",
        (),
    ),
    "num_beams": (_BEAMS, (1,)),
    "stream": ("llm.stream(prompt, params) yields text as it comes", (False,)),
    "no_repeat_ngram_size": ("repetition_penalty, or a logits processor, ends loops", (0,)),
    "repeat_last_n": ("penalties count the whole output, and the prompt", (-1,)),
    "do_sample": ("temperature=0 is greedy, and every other temperature samples", ()),
    "typical_p": ("top_p, top_k and min_p filter; or write a logits processor", (1.0,)),
    "mirostat": ("top_p, top_k and min_p filter; or write a logits processor", (0,)),
    "prompt_logprob_token_ids": ("prompt_logprobs=-1 has those of all tokens", ()),
    "prompt_logprob_start": ("prompt_logprobs has all positions: take those that you want", (0,)),
    "flat_logprobs": ("logprobs are dictionaries, one for each token", (False,)),
    "stream_interval": ("it is an option of AsyncLLM, for all requests", (1,)),
    "skip_reading_prefix_cache": (
        "give the prompt a 'cache_salt' of its own: it then reads nothing that others wrote",
        (False,),
    ),
    "thinking_token_budget": ("max_tokens bounds thoughts and answer together", (-1,)),
    "repetition_detection": ("stop strings or repetition_penalty end loops", ()),
    "skip_clone": ("parameters are always copied when a request is made", (False,)),
    "routed_experts_prompt_start": ("which experts ran is not told", (0,)),
    "trace_decode_token_ids": ("append the tokens to the prompt, with prompt_logprobs", ()),
}


def without_foreign(given: Mapping[str, Any], ours: Collection[str]) -> dict[str, Any]:
    """The parameters that are `ours`.

    Raises `ValueError` for others, unless they are vLLM's at values that ask for nothing.
    """
    known, told = {}, []
    for name, value in given.items():
        if name in ours:
            known[name] = value
        elif name == "best_of" and value == given.get("n", 1):
            continue
        elif name not in FOREIGN or (value is not None and value not in FOREIGN[name][1]):
            told.append(_told(name, ours))
    if told:
        raise ValueError("; ".join(sorted(told)))
    return known


def _told(name: str, ours: Collection[str]) -> str:
    if name in FOREIGN:
        return f"{name} is not implemented: {FOREIGN[name][0]}"
    near = [LIKE[name]] if name in LIKE else get_close_matches(name, sorted(ours), n=2)
    if near:
        return f"unknown sampling parameter {name!r}: did you mean {' or '.join(near)}?"
    return f"unknown sampling parameter {name!r}; known are {sorted(ours)}"
