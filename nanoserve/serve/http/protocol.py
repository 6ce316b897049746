"""Request bodies with OpenAI's fields and vLLM's additional fields.

Every field may be null, which is the same as omitting it, and an integer may be written as 5.0.
`nanoserve.serve.http.unknown_fields` handles the fields that are not declared here.
"""

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from nanoserve.features.structured.params import StructuredOutputsParams
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.response_format import constraint_of, field_of_constraint
from nanoserve.serve.http.tools.tool_choice import (
    check_arguments,
    with_all_names_of_reasoning,
    with_parsed_arguments,
)
from nanoserve.text.chat import text_of
from nanoserve.utils.parameter_table import PARAMETERS

# Fields of `GenerationBody` that `SamplingParams` takes as they are.
_SAME = tuple(name for name, parameter in PARAMETERS.items() if parameter.is_http)
# OpenAI's hints to a model, including the additional values of vLLM and llama.cpp.
_HINTS = {
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "verbosity": ("low", "medium", "high"),
}
# Variables by which chat templates turn reasoning on and off.
THINKING_SWITCHES = ("enable_thinking", "thinking")
# Arguments of transformers' `apply_chat_template` that are not variables of a template.
_NOT_FOR_CLIENTS = (
    *("chat_template", "tokenize", "return_dict", "mark_text", "messages", "conversation"),
    "self",
    *("padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs"),
    *("return_assistant_tokens_mask", "processor_kwargs"),
)
# OpenAI's roles and their names in chat templates.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool", "function")}
_ROLES["developer"] = "system"


_KINDS = {"list": core_schema.ListSchema, "dict": core_schema.DictSchema}
# Older versions of pydantic have `fail_fast` for lists only.
_STOPPING = [name for name, kind in _KINDS.items() if "fail_fast" in kind.__annotations__]


def stops_at_first_error(schema: Any) -> Any:
    """Set `fail_fast` in a core schema and all its parts, in place; return the schema."""
    if isinstance(schema, dict):
        if schema.get("type") in _STOPPING:
            schema["fail_fast"] = True
        for inner in schema.values():
            stops_at_first_error(inner)
    elif isinstance(schema, (list, tuple)):
        for inner in schema:
            stops_at_first_error(inner)
    return schema


def _whole(value: Any) -> Any:
    """Return a whole float as an int, and any other value unchanged: in JSON, 5.0 equals 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Validate a list, or a list of lists, of integers that may be written as 5.0.

    Nearly all lists hold integers already, so floats are converted only after a first failure.
    """
    try:
        return validate(value)
    except ValidationError:
        lists = value if isinstance(value, list) else []
        if not any(isinstance(one, float) for part in [lists, *lists] if isinstance(part, list)
                   for one in part):  # fmt: skip
            raise
    return validate(_whole_in(value))


def _whole_in(value: Any, depth: int = 2) -> Any:
    if depth and isinstance(value, list):
        return [_whole_in(one, depth - 1) for one in value]
    return _whole(value)


Int = Annotated[int, BeforeValidator(_whole)]
Ints = Annotated[list[int], WrapValidator(_all_whole)]
# One text or several, each a string or token ids.
Prompts = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_all_whole)]


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """Return a list of texts, of which `prompts` may be a single one."""
    is_one = isinstance(prompts, str) or isinstance(next(iter(prompts), None), int)
    return [prompts] if is_one else list(prompts)


class Body(BaseModel):
    """The base of all request bodies. Types are strict, so "5" is not accepted as 5."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None

    @cached_property
    def is_large(self) -> bool:
        """Return True if validating this body could block the event loop for too long."""
        return False

    def note_size(self, is_large: bool) -> None:
        """Set `is_large`, which the receiver of the body knows."""
        self.is_large = is_large

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return stops_at_first_error(handler(source))


class Rendering(NamedTuple):
    """The way in which a conversation becomes a prompt, and the ends of an answer besides EOS.

    template: None is the model's own. as_parts: True if the template gets each content as a list
    of parts, otherwise as a string. stop_token_ids, stop: ends of a message in the template.
    variables: the server's defaults for variables of the template.
    """

    template: str | None = None
    as_parts: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    variables: Mapping[str, Any] = {}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in every chunk


class GenerationBody(Body):
    """The fields that completions and chat completions have in common."""

    prompt_field: ClassVar[str]  # the field that holds the prompt

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Ints | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: Ints | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    num_speculative_tokens: Int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    prompt_logprobs: Int | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None  # vLLM's
    request_id: str | None = None  # vLLM's: the `id` of the response ends with it

    @cached_property
    def may_reach_end(self) -> bool:
        """Return True if `max_tokens` may exceed the context, whose end then ends the output."""
        return False

    def reach_end(self) -> None:
        """Set `may_reach_end`."""
        self.may_reach_end = True

    @cached_property  # in chat, tools and reasoning may replace it
    def constraint(self) -> StructuredOutputsParams | None:
        """The structured output constraint of the request; None if there is none."""
        return constraint_of(self)

    @cached_property  # tools replace it
    def constraint_parts(self) -> list[tuple[str, StructuredOutputsParams]]:
        """Return the parts of the structured output constraint, each with its request field."""
        return [] if self.constraint is None else [(field_of_constraint(self), self.constraint)]

    def constrain(
        self,
        constraint: StructuredOutputsParams | None,
        parts: list[tuple[str, StructuredOutputsParams]],
    ) -> None:
        """Replace the constraint on the output, and its parts with their request fields."""
        self.constraint = constraint
        self.constraint_parts = parts if constraint is not None else []

    @property
    def constraint_field(self) -> str:
        """Return the request field that an error about the whole constraint should name."""
        parts = self.constraint_parts
        return parts[0][0] if len(parts) == 1 else "tools"

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """Return the name and the value of the field that limits the output length."""
        return "max_tokens", self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        options = self.stream_options
        return options is not None and self.include_usage and bool(options.continuous_usage_stats)

    def sampling_params(
        self, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return the sampling parameters of the request.

        defaults: values for absent fields, from the checkpoint's `generation_config.json`.
        """
        given = {name: getattr(self, name) for name in _SAME if getattr(self, name) is not None}
        if self.logit_bias:
            given["logit_bias"] = _with_ids("logit_bias", self.logit_bias)
        given["structured_outputs"] = self.constraint
        self._check_n(given, defaults)
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        own = {"max_tokens": max_tokens, "logprobs": logprobs, "output_kind": kind}
        return SamplingParams(**{**defaults, **given, **own})

    def _check_n(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Raise `ApiError` for `n` > 1 when greedy sampling is only the checkpoint's default."""
        is_greedy = defaults.get("temperature", 1.0) < 1e-5
        if given.get("n", 1) > 1 and "temperature" not in given and is_greedy:
            message = (
                f"n={given['n']} completions would all be the same: this model's "
                f"generation_config.json sets temperature 0; set a temperature"
            )
            raise ApiError(400, message, "n")

    def prompt_of(self, content: Any) -> dict[str, Any]:
        """Return text or token ids as a prompt of the engine, with the cache salt if any."""
        prompt = {"prompt" if isinstance(content, str) else "prompt_token_ids": content}
        return prompt if self.cache_salt is None else prompt | {"cache_salt": self.cache_salt}


def _number_of_logprobs(value: Any) -> Any:
    """Convert false to None: in /v1/chat/completions, `logprobs` is a bool."""
    return None if value is False else _whole(value)


class CompletionBody(GenerationBody):
    """Request body of `POST /v1/completions`."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Prompts
    prompt_embeds: str | list[str] | None = None  # vLLM's: tensors, as base64 of torch.save
    logprobs: Annotated[int | None, BeforeValidator(_number_of_logprobs)] = None
    add_special_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_text(cls, fields: Any) -> Any:
        """Set `prompt` to no text if there are embeddings. Clients that need one send ""."""
        has_embeds = isinstance(fields, dict) and fields.get("prompt_embeds") is not None
        return fields | {"prompt": fields.get("prompt") or []} if has_embeds else fields

    def prompts(self) -> list[str | list[int]]:
        return as_prompts(self.prompt)

    def embeds(self) -> list[str]:
        """Return the prompts that are embeddings; their choices come before those of texts."""
        given = self.prompt_embeds
        return [given] if isinstance(given, str) else given or []

    def take_embeds(self) -> list[str]:
        """Return them, and forget them: they may be megabytes of base64."""
        embeds, self.prompt_embeds = self.embeds(), None
        return embeds


class ChatBody(GenerationBody):
    """Request body of `POST /v1/chat/completions`.

    The content of a message is a string or a list of text parts.
    """

    prompt_field: ClassVar[str] = "messages"

    messages: list[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Int | None = None  # vLLM's
    verbosity: str | None = None
    allow_special_tokens: bool | None = None  # nanoserve's: parse special tokens in messages

    @cached_property
    def rendering(self) -> Rendering:
        """The way in which the conversation is rendered; see `render_with`."""
        return Rendering()

    def render_with(self, rendering: Rendering) -> None:
        """Set how the conversation is rendered."""
        self.rendering = rendering

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for a template. Each role is known.

        Each content is a string, or a list of text parts if the template wants these.
        """
        check_arguments(self.messages)
        as_parts = self.rendering.as_parts
        return [_as_template_has_it(message, as_parts) for message in self.messages]

    @property
    def continued(self) -> str:
        """Return the text of the last message, which the output continues; "" if it does not."""
        if not self.continue_final_message or not self.messages:
            return ""
        return _text_of(self.messages[-1].get("content"))

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """Return the name and the value of the field that limits the output length."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def hints(self, template: str) -> dict[str, Any]:
        """Return the OpenAI hints that `template` uses, as vLLM does.

        A `reasoning_effort` of "none" disables thinking in templates that use `enable_thinking` or
        `thinking`, and any other value enables it. `chat_template_kwargs` take precedence.
        """
        hints: dict[str, Any] = {}
        for name, known in _HINTS.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                message = f"{name}={value!r:.50} must be one of {', '.join(known)}"
                raise ApiError(400, message, name)
            if value is not None:
                hints[name] = value
        if self.reasoning_effort is not None:
            is_on = self.reasoning_effort != "none"
            hints |= dict.fromkeys(THINKING_SWITCHES, is_on)
        return {name: value for name, value in hints.items() if looks_at(template, name)}

    def template_arguments(self, template: str = "") -> dict[str, Any]:
        """Return the template variables other than the messages; `template` is its source."""
        names = ("add_generation_prompt", "continue_final_message", "documents")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.tools and self.tool_choice != "none":
            given["tools"] = self.tools
        own = self.chat_template_kwargs or {}
        for name in _NOT_FOR_CLIENTS:
            if name in own:
                param = f"chat_template_kwargs.{name}"
                raise ApiError(400, f"{param} cannot be set by a client", param, "unsupported")
        if self.rendering.template is not None:
            given["chat_template"] = self.rendering.template
        if self.continue_final_message:
            given.setdefault("add_generation_prompt", False)
        return {**self.rendering.variables, **self.hints(template), **own, **given}


class TokenizeBody(ChatBody):
    """Request body of `POST /tokenize`, either a prompt or a list of messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None  # here optional
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Request body of `POST /detokenize`."""

    tokens: Ints


def looks_at(template: str, name: str) -> bool:
    """Return True if the source of a template mentions the variable `name`."""
    own = r"(?<![.'\"])" if name == "thinking" else ""  # messages have a member of this name, too
    return re.search(rf"{own}\b{re.escape(name)}\b", template) is not None


def looks_into(template: str, name: str) -> bool:
    """Return True if the source of a template accesses a member `name`, as in `message.name`."""
    return re.search(rf"""(\.|\[['"]|get\(['"]){re.escape(name)}\b""", template) is not None


def _as_template_has_it(message: dict[str, Any], as_parts: bool) -> dict[str, Any]:
    """Return a message in the form that templates expect.

    as_parts: keep a content that is a list of text parts.

    Raises `ApiError` for an unknown role, which templates would silently skip.
    """
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise ApiError(400, f"messages: role={role!r:.50} must be one of {known}", "messages")
    message = with_all_names_of_reasoning(with_parsed_arguments(message))
    content = _text_of(message.get("content"))
    if not content and isinstance(message.get("refusal"), str):
        content = message["refusal"]  # clients send OpenAI's refusals back
    if as_parts and isinstance(message.get("content"), list) and content:
        content = message["content"]  # its parts are text, as `_text_of` has checked
    return message | {"role": _ROLES[role], "content": content}


def _text_of(content: Any) -> str:
    """Return the text of a content: a string, or the joined text parts of a list."""
    if content is None:
        return ""
    try:
        return text_of(content)
    except ValueError as error:
        raise ApiError(400, str(error), "messages", "unsupported") from error


def _with_ids(name: str, by_text: dict[str, float]) -> dict[int, float]:
    """Convert the keys of a JSON object, which are strings, to token ids."""
    try:
        return {int(token_id): bias for token_id, bias in by_text.items()}
    except ValueError as error:
        raise ApiError(400, f"{name}: its keys must be token ids", name) from error
