"""Keywords of vLLM's methods. Unsupported keywords are rejected with advice."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from difflib import get_close_matches
from typing import Any

from nanoserve.compat.sampling import LIKE
from nanoserve.engine.embeds_reader import PIECES, WHOLE
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.input_processor import Prompt
from nanoserve.sampling_params import SamplingParams
from nanoserve.text.prompt_types import ChatOptions
from nanoserve.text.truncation import encoded_within
from nanoserve.utils.checks import check_bool, check_int, require, shown

_TOKENIZATION = {"add_special_tokens", "truncate_prompt_tokens", "truncation", "max_length"}
_KEPT = "the number of tokens in tokenization_kwargs"
_ELSEWHERE = {
    "stream": "llm.stream() yields the answer as it is generated",
    "prompt_token_ids": "pass {'prompt_token_ids': [...]}, or the list, as the prompt",
    "prompt": "use prompts, which may be a single prompt",
    "mm_processor_kwargs": "nanoserve runs text models only",
    "documents": "pass chat_template_kwargs={'documents': ...}",
    "use_tqdm": "a stream has no progress bar",
    "sampling_param": "did you mean sampling_params?",
}


def refuse_keywords(unknown: Mapping[str, Any]) -> None:
    """Raise `ValueError` for unknown keywords of `generate` that are not None, with advice."""
    for name, value in _given(unknown):
        if name in ChatOptions.__annotations__:
            raise ValueError(f"{name}={shown(value)} is a keyword of chat(), which takes messages")
        near = get_close_matches(name, ["prompts", "sampling_params", "use_tqdm", "priority"])
        advice = f"did you mean {near[0]}?" if near else "generate() has no such keyword"
        raise ValueError(f"{name}={shown(value)}: {advice}")


def refuse_chat_keywords(unknown: Mapping[str, Any]) -> None:
    """Raise `ValueError` for unknown keywords of `chat`, or of a stream of messages."""
    for name, value in _given(unknown):
        known = {*ChatOptions.__annotations__, "sampling_params", "priority"} - {name}
        near = get_close_matches(name, sorted(known))
        advice = f"if the template uses it, pass chat_template_kwargs={{{name!r}: {shown(value)}}}"
        if near:
            advice = f"did you mean {' or '.join(near)}?"
        raise ValueError(f"{name}={shown(value)} is an unknown keyword: {advice}")


def _given(unknown: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keywords that are not None; raise `ValueError` for those with special advice."""
    for name, value in unknown.items():
        if value is None:
            continue
        ours = LIKE.get(name, name)
        if name in _ELSEWHERE:
            raise ValueError(f"{name}={shown(value)} is not supported here: {_ELSEWHERE[name]}")
        if ours in SamplingParams.__dataclass_fields__:
            advice = f"it is a sampling parameter: SamplingParams({ours}={shown(value)})"
            raise ValueError(f"{name}={shown(value)} is not a keyword: {advice}")
        yield name, value


def tokenized(
    engine: GuardedEngine, prompts: AbstractSequence[Prompt], kwargs: Mapping[str, Any]
) -> list[Prompt]:
    """Return the prompts as token ids, as `tokenization_kwargs` specifies.

    add_special_tokens: add the tokenizer's special tokens to strings. truncate_prompt_tokens: keep
    only this number of tokens, the last ones, as vLLM does; -1 leaves room for one output token.
    truncation=True with max_length: keep this number, cut on the tokenizer's truncation_side.
    Special tokens that the tokenizer adds to a string are among those that are kept.
    Raises `ValueError` for unknown or invalid keywords.
    """
    unknown = sorted(map(str, kwargs.keys() - _TOKENIZATION))
    require(not unknown, f"tokenization_kwargs: {unknown} are not among {sorted(_TOKENIZATION)}")
    adds = kwargs.get("add_special_tokens", True)
    check_bool("add_special_tokens", adds)
    most, from_left = _limit(engine, kwargs)
    return [_tokenized(engine, prompt, adds, most, from_left) for prompt in prompts]


def _limit(engine: GuardedEngine, kwargs: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Return the maximum number of tokens, and whether the first tokens are cut off."""
    truncation = kwargs.get("truncation", False)
    check_bool("truncation", truncation)
    last = kwargs.get("truncate_prompt_tokens")
    if last is not None:
        last = check_int("truncate_prompt_tokens", last, -1)
        require(last != 0, "truncate_prompt_tokens=0 leaves no token to continue from")
        return engine.input_processor.max_prompt_len if last == -1 else last, True
    if not truncation:
        require("max_length" not in kwargs, "max_length needs truncation=True")
        return None, False
    most = check_int("max_length", kwargs.get("max_length"), 1)
    tokenizer: Any = engine.tokenizer
    side = "right" if tokenizer is None else tokenizer.hugging_face.truncation_side
    return most, side == "left"


def _tokenized(
    engine: GuardedEngine, prompt: Prompt, adds: bool, most: int | None, from_left: bool
) -> Prompt:
    given: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {}
    if isinstance(prompt, str):
        given = {"prompt": prompt}
    elif not isinstance(prompt, Mapping):
        given = {"prompt_token_ids": prompt}
    embeds = [name for name in (WHOLE, PIECES) if given.get(name) is not None]
    if embeds and most is None:
        return prompt
    require(not embeds, f"a prompt with {embeds[0]!r} cannot be truncated" if embeds else "")
    text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
    if token_ids is None and isinstance(text, str):
        require(
            engine.tokenizer is not None,
            "a string prompt needs a tokenizer, and the engine has none",
        )
        if most is None:  # a string that will be truncated may be too long
            engine.input_processor.text_limit.check(text)
        if most is None or not adds:
            token_ids = engine.tokenizer.encode(text, adds)
        else:
            token_ids = encoded_within(engine.tokenizer, text, most, _KEPT, from_left)
    if token_ids is None:
        return prompt  # invalid, and rejected by the check of all prompts
    if most is not None:
        token_ids = token_ids[-most:] if from_left else token_ids[:most]
    return {**given, "prompt_token_ids": token_ids}
