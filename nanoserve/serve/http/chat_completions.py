"""Endpoint /v1/chat/completions, which answers a conversation with a message."""

import json
from typing import Any

from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.request import Request
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.serve.engine_process import EngineFront
from nanoserve.serve.http import logprobs
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.response_builder import Answer, as_json, members
from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.grammar import behind_analysis, behind_reasoning
from nanoserve.serve.http.tools.reasoning import REASONING, Thought, thought_at_end
from nanoserve.serve.http.tools.thought_budget import budget_of, check_budget
from nanoserve.text.chat import chat_prompts


def chat_requests(
    body: ChatBody,
    engine: GuardedEngine | EngineFront,
    new_id: Any,
    kept_specials: tuple[str, ...] = (),
    reasoning_parser: str | None = None,
) -> list[Request]:
    """Return the request for a conversation. It tokenizes, so call it off the event loop.

    kept_specials: special tokens to keep in the output text, if the model has them.
    reasoning_parser: name of the reasoning format, so that a structured output constraint applies
    only after the reasoning; None: the model does not reason.
    """
    if body.echo:
        message = "echo=true is supported by /v1/completions only"
        raise ApiError(400, message, "echo", "unsupported")
    if body.top_logprobs and not body.logprobs:  # 0 is the same as omitting it
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    most = engine.input_processor.max_logprobs
    if not -1 <= (body.top_logprobs or 0) <= most:
        message = f"top_logprobs={body.top_logprobs} must be an integer in [-1, {most}]; -1 means "
        raise ApiError(
            400, f"{message}all, and the engine option max_logprobs is the limit", "top_logprobs"
        )
    check_budget(body.thinking_token_budget, reasoning_parser)
    if not body.messages:
        raise ApiError(400, "messages is empty; pass at least one message", "messages")
    prompt, special_id = chat_prompt(body, engine), engine.tokenizer.special_tokens.id_of
    thought, budget = Thought.CLOSED, body.thinking_token_budget
    if reasoning_parser in REASONING:
        thought = thought_at_end(prompt["prompt"], reasoning_parser, body.continued)
    if reasoning_parser is not None and body.constraint is not None:
        config, field = engine.config.structured_outputs_config, body.constraint_field
        options = body.constraint, special_id, config, field
        if reasoning_parser == harmony.NAME:
            body.constraint = behind_analysis(*options, begun=harmony.begun_in(prompt["prompt"]))
        else:
            form = REASONING[reasoning_parser]
            body.constraint = behind_reasoning(options[0], thought, *options[1:], form)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    defaults = engine.input_processor.default_sampling
    params = body.sampling_params(defaults, body.most_tokens[1], num_logprobs)
    is_kept = any(special_id(text) is not None for text in kept_specials)
    is_harmony = reasoning_parser == harmony.NAME  # of whose special tokens a message has none
    if is_kept and (is_harmony or body.skip_special_tokens is None):
        params.skip_special_tokens = False
    rendering = body.rendering
    if not params.ignore_eos and (rendering.stop_token_ids or rendering.stop):
        params.stop_token_ids = [*(params.stop_token_ids or ()), *rendering.stop_token_ids]
        params.stop = [*params.stop_strings, *rendering.stop]
    if is_harmony and not params.ignore_eos:
        stops = [i for i in map(special_id, harmony.STOPS) if i is not None]
        params.stop_token_ids = [*(params.stop_token_ids or ()), *stops]
    if budget is not None and reasoning_parser is not None:
        processor = budget_of(budget, reasoning_parser, thought, engine.tokenizer)
        params.logits_processors = None if processor is None else [processor]
    request_id, priority = new_id(), body.priority or 0
    return [engine.input_processor.process(request_id, prompt, params, priority)]


def chat_prompt(body: ChatBody, engine: GuardedEngine | EngineFront) -> dict[str, Any]:
    """Return the prompt that the template makes of a conversation, as text and token ids."""
    template = body.rendering.template or engine.tokenizer.chat_template or ""
    arguments = body.template_arguments(template)
    special, as_text = bool(body.allow_special_tokens), not body.rendering.as_parts
    (prompt,) = chat_prompts(engine, [body.conversation()], arguments, special, as_text)
    return prompt if body.cache_salt is None else prompt | {"cache_salt": body.cache_salt}


class ChatAnswer(Answer):
    """A response of /v1/chat/completions, with `n` messages to choose from."""

    id_prefix, whole_object = "chatcmpl", "chat.completion"
    chunk_object = "chat.completion.chunk"
    _body: ChatBody

    def __init__(self, body: ChatBody, *args: Any) -> None:
        super().__init__(body, *args)
        self._begun: set[int] = set()  # choices whose first event was sent
        self._has_sent_prompt = False
        as_ids = bool(body.return_tokens_as_token_ids)
        self._names = logprobs.TokenNames(self._tokenizer.token_bytes, as_ids)

    def _logprobs(self, index: int, completion: CompletionOutput) -> dict[str, Any] | None:
        """Return the log-probabilities of the new tokens; None if they were not requested."""
        if completion.logprobs is None:
            return None
        num_top, positions = self._body.top_logprobs or 0, self._positions_of(index)
        if num_top == -1:
            num_top = self._tokenizer.backend.get_vocab_size()
        ids, entries = completion.token_ids, completion.logprobs
        return logprobs.of_chat(ids, entries, num_top, self._names, positions)

    def whole(self, outputs: dict[str, RequestOutput]) -> dict[str, Any]:
        (output,) = outputs.values()
        prompt = output.prompt_logprobs
        extra: dict[str, Any] = {}
        if prompt is not None:
            extra["prompt_logprobs"] = logprobs.of_prompt(prompt)
        if self._body.return_token_ids:
            extra["prompt_token_ids"] = output.prompt_token_ids
        return super().whole(outputs) | extra

    def _choice_events(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> list[str]:
        """Return the new events of a choice: first its role, then text, then its finish reason."""
        events = []
        if index not in self._begun:
            self._begun.add(index)
            prompt_token_ids = None if self._has_sent_prompt else output.prompt_token_ids
            self._has_sent_prompt = True
            first = '{"role": "assistant", "content": ""}'
            events.append(self._delta(index, first, prompt_token_ids=prompt_token_ids))
        news, ids = self._news(index, completion), self._token_ids(completion)
        if news or completion.logprobs or ids.get("token_ids"):
            shown = as_json(self._logprobs(index, completion))
            events.append(self._delta(index, news or "{}", shown, more=members(ids)))
        if completion.finish_reason in ("stop", "length"):
            end = json.dumps(self._reason(index, completion))
            end += f', "stop_reason": {json.dumps(completion.stop_reason)}'
            events.append(self._delta(index, "{}", finish_reason=end))
        return events

    def _news(self, index: int, completion: CompletionOutput) -> str:
        """Return the delta of a choice as JSON; "" if it is empty."""
        return f'{{"content": {json.dumps(completion.text)}}}' if completion.text else ""

    def _message(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        return {"role": "assistant", "content": completion.text, "refusal": None}

    def _reason(self, index: int, completion: CompletionOutput) -> str | None:
        return completion.finish_reason

    def _token_ids(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return vLLM's `token_ids` if they were requested, else an empty dictionary."""
        return {"token_ids": completion.token_ids} if self._body.return_token_ids else {}

    def _delta(
        self,
        index: int,
        delta: str,
        shown: str = "null",
        finish_reason: str = "null",
        more: str = "",
        prompt_token_ids: list[int] | None = None,
    ) -> str:
        event = self._event(
            f'{{"index": {index}, "delta": {delta}, "logprobs": {shown}, '
            f'"finish_reason": {finish_reason}{more}}}'
        )
        if prompt_token_ids is None or not self._body.return_token_ids:
            return event
        ids = json.dumps({"prompt_token_ids": prompt_token_ids})[1:-1]
        return event.replace("data: {", f"data: {{{ids}, ", 1)

    def _choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(index, completion),
            "logprobs": self._logprobs(index, completion),
            "finish_reason": self._reason(index, completion),
            "stop_reason": completion.stop_reason,
        } | self._token_ids(completion)
