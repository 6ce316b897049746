"""Turns a prompt and pooling parameters into a `Request`, or raises `ValueError`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Union

from nanoserve.engine.input_processor import Prompt
from nanoserve.engine.request import Request
from nanoserve.engine.sequence import Sequence
from nanoserve.features.pooling.heads import HEAD_OF
from nanoserve.features.pooling.pooler import resolved
from nanoserve.lora_request import LoRARequest
from nanoserve.outputs import RequestMetrics, RequestOutputKind
from nanoserve.pooling_params import PoolingParams
from nanoserve.sampling_params import SamplingParams
from nanoserve.text.truncation import encoded_within
from nanoserve.utils.checks import require

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine

# A `GuardedEngine`, or the `EngineFront` of one in another process.
Engine = Union["GuardedEngine", Any]

# No token is sampled; the engine reads a few fields of these.
_NO_SAMPLING = SamplingParams(
    temperature=0.0,
    max_tokens=None,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
)


def pooling_request(
    engine: Engine,
    request_id: str,
    prompt: Prompt,
    params: PoolingParams | None = None,
    priority: int = 0,
    lora_request: LoRARequest | None = None,
) -> Request:
    """Check a pooling request and make its sequence, which is not queued yet.

    The sequence may have no more tokens than its prompt, so it ends with the prompt. Raises
    `ValueError` for anything invalid, and for an engine that generates text.
    """
    check_pools(engine)
    processor = engine.input_processor
    metrics = RequestMetrics(engine.clock(), num_cached_prompt_tokens=processor.num_cached)
    params = PoolingParams() if params is None else params
    is_right = isinstance(params, PoolingParams)
    require(is_right, f"pooling_params must be PoolingParams, not {type(params).__name__}")
    params = resolved(params, engine.model_config)
    processor.check_request(request_id, priority, lora_request)
    if params.truncate_prompt_tokens is not None:
        prompt = truncated(engine, prompt, params.truncate_prompt_tokens)
    text, token_ids, cache_key = processor.read_prompt(prompt)
    sequence = Sequence(
        request_id,
        list(token_ids),
        _NO_SAMPLING,
        max_model_len=len(token_ids),
        priority=int(priority),
        metrics=metrics,
        cache_key=cache_key,
        prompt_head=HEAD_OF[params.pooling_type],
        reads_last=params.pooling_type == "LAST",
    )
    request = Request(request_id, text, token_ids, _NO_SAMPLING, [sequence], pooling_params=params)
    if lora_request is not None:
        request.use_lora(lora_request)
    return request


def check_pools(engine: Engine) -> None:
    """Raise `ValueError` for an engine that generates text."""
    require(
        engine.model_config.pooling is not None,
        "this engine generates text: create another one with runner='pooling' for embeddings, "
        "classes and scores",
    )


def truncated(engine: Engine, prompt: Prompt, most: int) -> Prompt:
    """Return a prompt of at most `most` tokens: the first ones; -1 is as many as the model takes.

    Special tokens that the tokenizer adds after a string, such as EOS, are kept.
    """
    limit = engine.input_processor.max_prompt_len
    require(most <= limit, f"truncate_prompt_tokens={most} exceeds max_model_len={limit}")
    most = limit if most == -1 else most
    given: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {}
    own: Any = given.get("prompt_token_ids")
    if own is None:
        own = given.get("prompt") if given else prompt
    if isinstance(own, str) and engine.tokenizer is not None:
        own = encoded_within(engine.tokenizer, own, most, "truncate_prompt_tokens")
    elif not isinstance(own, str) and hasattr(own, "__len__"):
        own = own[:most]
    return prompt if own is None or isinstance(own, str) else {**given, "prompt_token_ids": own}


def with_task(params: PoolingParams | None, task: str | None) -> PoolingParams:
    """Return the parameters with a task, if they have none."""
    params = PoolingParams() if params is None else params
    return params if task is None or params.task is not None else replace(params, task=task)
