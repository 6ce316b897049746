"""What clients send: OpenAI's fields, and vLLM's beside them.

Every field may be null, which is as if it was not there. Fields that nobody here knows are ignored:
clients send many that say nothing about the answer (`user`, `metadata`, `store`, ...). Those that
would change the answer, and cannot be honoured, are refused by name.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from nanoserve.chat import text_of
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.server.errors import ApiError
from nanoserve.server.first_error import stops_at_first_error
from nanoserve.server.guides import guide_of
from nanoserve.server.tools.asked import check_arguments, with_parsed_arguments
from nanoserve.structured.params import StructuredOutputsParams

# Fields of `SamplingParams` that have the same name here.
_SAME = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature"),
    *("top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "bad_words", "ignore_eos"),
    *("include_stop_str_in_output", "max_tokens", "min_tokens", "prompt_logprobs"),
    *("allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
    "num_speculative_tokens",
)
# What cannot be honoured, and at which values it asks for nothing. The last are vLLM's.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "guided_decoding_backend": ("auto",),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    "chat_template": (),  # a template is a program: only the checkpoint's own runs
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "kv_transfer_params": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
}
_ADVICE = {
    "best_of": "ask for n completions, with logprobs to choose by",
    "chat_template": "templates come from the checkpoint; chat_template_kwargs go to it",
    "guided_decoding_backend": "whoever starts the server chooses structured_outputs_config",
    "use_beam_search": "LLM.beam_search() searches offline",
}
# Of what renders a template, what is not a template's argument.
_OWN_ARGUMENTS = ("chat_template", "tokenize", "return_dict", "mark_text", "messages", "self")
# OpenAI's roles, and what templates call them.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool", "function")}
_ROLES["developer"] = "system"


class Body(BaseModel):
    """JSON of the right types. Numbers and texts stay what they are: "5" is no 5."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None

    @cached_property
    def is_large(self) -> bool:
        """Whether to look through it may take longer than the event loop can be kept waiting.

        Set by whoever has received it.
        """
        return False

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return stops_at_first_error(handler(source))

    def check_extra(self) -> None:
        """Raise `ApiError` for a field that would change the answer, if it could be honoured."""
        for name, neutral in _REFUSED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in neutral:
                advice = f": {_ADVICE[name]}" if name in _ADVICE else ""
                raise ApiError(400, f"{name} is not supported{advice}", name, "unsupported")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in every chunk


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    num_speculative_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @cached_property  # of a conversation, tools may set another one
    def guide(self) -> StructuredOutputsParams | None:
        """What the answer must look like."""
        return guide_of(self)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        return self.include_usage and bool(self.stream_options.continuous_usage_stats)

    def sampling_params(
        self, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """`defaults` are the checkpoint's own recommendations, for what is not given."""
        given = {name: getattr(self, name) for name in _SAME if getattr(self, name) is not None}
        if self.logit_bias:
            given["logit_bias"] = _with_ids("logit_bias", self.logit_bias)
        given["structured_outputs"] = self.guide
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        own = {"max_tokens": max_tokens, "logprobs": logprobs, "output_kind": kind}
        return SamplingParams(**{**defaults, **given, **own})

    def prompt_of(self, content: Any) -> dict[str, Any]:
        """`content`, a text or token ids, as the engine takes it."""
        prompt = {"prompt" if isinstance(content, str) else "prompt_token_ids": content}
        return prompt if self.cache_salt is None else prompt | {"cache_salt": self.cache_salt}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int)
        return [self.prompt] if is_one else list(self.prompt)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. A message's content may be text, or a list of parts of text."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    allow_special_tokens: bool | None = None  # ours: typed special tokens are control tokens

    def conversation(self) -> list[dict[str, Any]]:
        """Messages as templates know them: every content is a text, every role one of theirs."""
        check_arguments(self.messages)
        return [_as_template_has_it(message) for message in self.messages]

    def template_arguments(self) -> dict[str, Any]:
        names = ("add_generation_prompt", "continue_final_message", "documents")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.tools and self.tool_choice != "none":
            given["tools"] = self.tools
        own = self.chat_template_kwargs or {}
        for name in _OWN_ARGUMENTS:
            if name in own:
                param = f"chat_template_kwargs.{name}"
                raise ApiError(400, f"{param} is not for a client to say", param, "unsupported")
        if self.continue_final_message:
            given.setdefault("add_generation_prompt", False)
        return own | given


class TokenizeBody(ChatBody):
    """POST /tokenize: a prompt, or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]


def _as_template_has_it(message: dict[str, Any]) -> dict[str, Any]:
    """Templates pass over a role that they do not know, without a word."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise ApiError(400, f"messages: role={role!r:.50} must be one of {known}", "messages")
    message = with_parsed_arguments(message)
    return message | {"role": _ROLES[role], "content": _text_of(message.get("content"))}


def _text_of(content: Any) -> str:
    """A text as it is; of a list of parts their texts."""
    if content is None:
        return ""
    try:
        return text_of(content)
    except ValueError as error:
        raise ApiError(400, str(error), "messages", "unsupported") from error


def _with_ids(name: str, by_text: dict[str, float]) -> dict[int, float]:
    """JSON's keys are texts: these are token ids."""
    try:
        return {int(token_id): bias for token_id, bias in by_text.items()}
    except ValueError as error:
        raise ApiError(400, f"{name}: its keys must be token ids", name) from error
