"""The input processor turns a prompt and parameters into a `Request`, or raises `ValueError`.

All checks are made before anything is queued.
"""

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from functools import cached_property
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.bad_words import BadWords
from nanoserve.engine.embeds_reader import PIECES, WHOLE, PromptEmbedsReader
from nanoserve.engine.request import Request
from nanoserve.engine.sequence import CacheKey, Sequence
from nanoserve.engine.text_limit import TextLimit, prompt_too_long
from nanoserve.lora_request import LoRARequest
from nanoserve.outputs import Logprob, RequestMetrics
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.utils.checks import is_int, shown

if TYPE_CHECKING:
    from nanoserve.text.detokenizer import Tokenizer

_TOKENIZERS_OUTPUT = (
    ": for the output of a tokenizer, pass prompt['input_ids'], or call apply_chat_template with "
    "return_dict=False"
)
_POOLS = (
    "this engine pools (runner='pooling') and generates no text: call embed(), classify(), score() "
    "or encode(), or create the engine with runner='generate'"
)
_NEEDS_OPTION = ": embeddings need an engine with enable_prompt_embeds=True and runner='generate'"
Prompt = str | AbstractSequence[int] | Mapping[str, Any]


def as_prompt_list(prompts: Prompt | AbstractSequence[Prompt] | None) -> list[Prompt]:
    """Return a list of prompts; a string, a dictionary and a list of integers are one prompt."""
    is_array = isinstance(prompts, np.ndarray) and np.ndim(prompts) > 0
    if not isinstance(prompts, (str, Mapping, AbstractSequence)) and not is_array:
        raise ValueError(f"prompts must be a list of prompts, not {type(prompts).__name__}")
    several: Any = prompts
    if isinstance(prompts, (str, Mapping)) or (len(several) > 0 and is_int(several[0])):
        return [several]
    return list(several)


def one_per_prompt(name: str, value: Any, kind: type, num_prompts: int) -> list[Any]:
    """Return a list with one value per prompt; None or a single `kind` stands for all prompts."""
    if value is None or isinstance(value, kind):
        return [value] * num_prompts
    if not isinstance(value, AbstractSequence) or isinstance(value, str):
        raise ValueError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
    if len(value) != num_prompts:
        raise ValueError(f"{num_prompts} prompts, but {len(value)} {name}: pass one per prompt")
    return list(value)


class InputProcessor:
    """Tokenizes and checks requests. It keeps no state, so a rejected request has no effect."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: "Tokenizer | None",
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self.clock, self._structured_config = clock, config.structured_outputs_config
        self._has_adapters = config.enable_lora
        # Each raises `ValueError` for a bad adapter. Another process than the engine's has none.
        self.adapter_checks: list[Callable[[LoRARequest], None]] = []
        self.by_priority = config.scheduling_policy == "priority"
        dtype = config.kv_cache_dtype  # KV in different data types must not share hashes
        self.cache_root = () if dtype == "auto" else ("kv_cache_dtype", dtype)
        self.num_cached = 0 if config.enable_prompt_tokens_details else None  # None stays None
        most = model_config.vocab_size
        self.max_logprobs = most if config.max_logprobs == -1 else min(config.max_logprobs, most)
        self.default_sampling = dict(model_config.default_sampling)
        self.vocab_size, self.max_model_len = model_config.vocab_size, max_model_len
        self.pools = model_config.pooling is not None
        # A generated token needs a position after the prompt.
        self.max_prompt_len = max_model_len if self.pools else max_model_len - 1
        self._embeds: PromptEmbedsReader | None = None
        if config.enable_prompt_embeds:
            of_model = model_config.dtype, model_config.hidden_size
            self._embeds = PromptEmbedsReader(*of_model, config.block_size, max_model_len)
        # Engine-wide logits processors may validate a request before it is queued, as in vLLM.
        processors = [p for p in config.logits_processors if hasattr(p, "validate_params")]
        self._validators = [processor.validate_params for processor in processors]
        # Checkpoints store their EOS in different files, so a token that any file names is EOS.
        self.eos_token_ids = model_config.eos_token_ids
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            self.eos_token_ids |= {tokenizer.eos_token_id}
        self._tokenizer = tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters recommended by the checkpoint's generation_config.json."""
        return SamplingParams(**self.default_sampling)

    @cached_property
    def text_limit(self) -> "TextLimit":
        """Limit on the length of a string prompt."""
        return TextLimit(self._tokenizer.backend, self.max_model_len)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        output_kind: RequestOutputKind | None = None,
        max_logprobs: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """Check a request and make its sequences, which are not queued yet.

        `output_kind` overrides the one in the parameters, and `max_logprobs` the engine's limit,
        which applies to clients and not to requests of the engine's own features. Raises
        `ValueError` for anything invalid.
        """
        metrics = RequestMetrics(self.clock(), num_cached_prompt_tokens=self.num_cached)
        if self.pools:
            raise ValueError(_POOLS)
        self.check_request(request_id, priority, lora_request)
        params = self.default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        embeds = None
        if self._embeds is not None:
            prompt, embeds = self._embeds.take(prompt, params)
        text, token_ids, cache_key = self.read_prompt(prompt, params.max_tokens)
        # A copy is validated again, and later assignments to the caller's object do not affect it.
        params = replace(params, output_kind=output_kind or params.output_kind)
        self._check_params(params, self.max_logprobs if max_logprobs is None else max_logprobs)
        bad_words = self._bad_words.sequences(params.bad_words) if params.bad_words else []
        for word in bad_words:
            self._check_token_ids(word, "bad_words: token id")
        sequences = [
            Sequence(
                request_id,
                list(token_ids),
                params,
                max_model_len=self.max_model_len,
                eos_token_ids=self.eos_token_ids,
                priority=int(priority),
                metrics=metrics,
                index=index,
                bad_words_token_ids=bad_words,
                cache_key=cache_key,
                prompt_embeds=embeds,
            )
            for index in range(params.n)
        ]
        sequences[0].siblings = sequences[1:]
        # The first entry is None: no logits predict the first token.
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None]
        extensions = () if params.structured_outputs is None else ("structured_outputs",)
        request = Request(
            request_id, text, token_ids, params, sequences, prompt_logprobs, extensions
        )
        if lora_request is not None:
            request.use_lora(lora_request)
        return request

    def check_request(self, request_id: Any, priority: Any, lora_request: Any = None) -> None:
        """Raise `ValueError` for an id, a priority or an adapter that no request can have here."""
        if lora_request is not None:
            if not isinstance(lora_request, LoRARequest):
                raise ValueError(f"lora_request={shown(lora_request)} must be a LoRARequest")
            if not self._has_adapters:
                raise ValueError("lora_request needs an engine with enable_lora=True")
            for check in self.adapter_checks:
                check(lora_request)
        if not isinstance(request_id, str):
            raise ValueError(f"request_id={request_id!r} must be a string")
        if not is_int(priority):
            raise ValueError(f"priority={priority!r} must be an integer")
        if priority != 0 and not self.by_priority:
            raise ValueError(f"priority={priority} needs scheduling_policy='priority'")

    def read_prompt(
        self, prompt: Prompt, max_tokens: int | None = None
    ) -> tuple[str | None, list[int], CacheKey]:
        """Return the prompt's text, None if there is none, its token ids and its cache key.

        max_tokens: of the output, for messages. Raises `ValueError` for a prompt that is invalid or
        too long.
        """
        text, token_ids = self._tokenize(prompt, max_tokens)
        cache_key: CacheKey = self.cache_root
        if isinstance(prompt, Mapping) and prompt.get("cache_salt") is not None:
            cache_key += key_of_salt(prompt["cache_salt"])
        self._check_prompt_length(len(token_ids), max_tokens)
        cause = "" if text is None else "the tokenizer has more tokens than the model: "
        self._check_token_ids(token_ids, f"{cause}token id")
        return text, [int(token_id) for token_id in token_ids], cache_key

    def check_constraint(self, constraint: Any) -> None:
        """Raise `ValueError` for a grammar that is invalid or not supported by this engine."""
        constraint.check(self._structured_config, self._tokenizer)

    def _tokenize(self, prompt: Prompt, max_tokens: int | None) -> tuple[str | None, list[int]]:
        """Return the prompt's text, None if there is none, and its token ids."""
        text = None
        if isinstance(prompt, Mapping):
            known = ("prompt", "prompt_token_ids", "cache_salt")
            unknown = [name for name, v in prompt.items() if name not in known and v is not None]
            if unknown or not prompt:
                raise ValueError(
                    f"a prompt dictionary has 'prompt', 'prompt_token_ids' or both, and optionally "
                    f"'cache_salt' (pass messages to chat); {unknown=}"
                    + _TOKENIZERS_OUTPUT * ("input_ids" in unknown)
                    + _NEEDS_OPTION * (WHOLE in unknown or PIECES in unknown)
                )
            text = prompt.get("prompt")  # with token ids, it is only copied to the output
            token_ids = prompt.get("prompt_token_ids")
            if not isinstance(text, (str, NoneType)) or isinstance(token_ids, str):
                raise ValueError("'prompt' must be a string and 'prompt_token_ids' token ids")
            prompt = text if token_ids is None else token_ids
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("a string prompt needs a tokenizer, and this engine has none")
            self.text_limit.check(prompt, max_tokens)
            return prompt, self._tokenizer.encode(prompt)
        is_array = isinstance(prompt, np.ndarray) and prompt.ndim == 1
        if not is_array and (not isinstance(prompt, AbstractSequence) or isinstance(prompt, bytes)):
            raise ValueError(f"a prompt is a string or token ids, not {type(prompt).__name__}")
        self._check_prompt_length(len(prompt), max_tokens)  # before the loops over all tokens
        numbers: Any = prompt
        return text, numbers.tolist() if is_array else list(numbers)

    @cached_property
    def _bad_words(self) -> "BadWords":
        return BadWords(self._tokenizer)

    def _check_params(self, params: SamplingParams, max_logprobs: int) -> None:
        if self._tokenizer is None and (params.stop or params.bad_words):
            raise ValueError(
                "stop and bad_words are strings and need a tokenizer; this engine has none"
            )
        if params.structured_outputs is not None:
            self.check_constraint(params.structured_outputs)
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number == -1:  # the whole vocabulary
                number = self.vocab_size
                setattr(params, name, number)
            if (number or 0) > max_logprobs:
                raise ValueError(
                    f"{name}={number} exceeds max_logprobs={max_logprobs}, which is an option of "
                    f"the engine (-1: the whole vocabulary)"
                )
        if params.logprob_token_ids is not None:  # selected from the whole vocabulary
            params.logprobs = self.vocab_size
        for check in self._validators:
            check(params)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            self._check_token_ids(getattr(params, name) or (), f"{name}: token id")

    def _check_token_ids(self, token_ids: Collection[int], what: str) -> None:
        are_ints = {*map(type, token_ids)} == {int}
        if are_ints and min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return  # the most common case, three times as fast as the loop below
        for token_id in token_ids:
            if not is_int(token_id) or not 0 <= token_id < self.vocab_size:
                raise ValueError(f"{what} {token_id!r} is not an integer in [0, {self.vocab_size})")

    def _check_prompt_length(self, num_tokens: int, max_tokens: int | None) -> None:
        if num_tokens == 0:
            use = "pool" if self.pools else "continue from"
            raise ValueError(f"the prompt is empty: there is no token to {use}")
        if num_tokens > self.max_prompt_len:
            if self.pools:
                max_tokens = 0
            raise prompt_too_long(self.max_model_len, num_tokens, max_tokens)


def key_of_salt(salt: Any) -> tuple[str, ...]:
    """Return the part of the cache key that `cache_salt` adds.

    Only requests with the same salt share KV blocks. Raises `ValueError` unless it is a non-empty
    string.
    """
    if not isinstance(salt, str) or not salt:
        raise ValueError(f"cache_salt={salt!r} must be a non-empty string")
    return ("cache_salt", salt)
