"""/v1/chat/completions: a conversation in, a message out."""

import json
from functools import partial
from typing import Any

from nanoserve.chat import chat_prompts
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.request import Request
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.server import logprobs
from nanoserve.server.answers import Answer
from nanoserve.server.errors import ApiError
from nanoserve.server.protocol import ChatBody
from nanoserve.server.tools.grammar import behind_reasoning
from nanoserve.server.tools.reasoning import thought_at_end


def chat_requests(
    body: ChatBody,
    engine: LLMEngine,
    new_id: Any,
    kept_specials: tuple[str, ...] = (),
    reasoning_parser: str | None = None,
) -> list[Request]:
    """The one request of a conversation. It tokenises, so it is called off the event loop.

    kept_specials: special tokens that the text of the answer must keep, if the model has them.
    reasoning_parser: how a model thinks before it begins with the format that is asked for.
    """
    if body.echo:
        raise ApiError(400, "echo=true is for /v1/completions", "echo", "unsupported")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    if not body.messages:
        raise ApiError(400, "messages is empty: there is nothing to answer", "messages")
    prompt, special_id = chat_prompt(body, engine), engine.tokenizer.special_tokens.id_of
    if reasoning_parser is not None and body.guide is not None:
        thought = thought_at_end(prompt["prompt"], reasoning_parser, body.continued)
        config, field = engine.config.structured_outputs_config, body.guide_field
        body.guide = behind_reasoning(body.guide, thought, special_id, config, field)
    newer, older = body.max_completion_tokens, body.max_tokens
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    defaults = engine.input_processor.default_sampling
    params = body.sampling_params(defaults, older if newer is None else newer, num_logprobs)
    is_kept = any(special_id(text) is not None for text in kept_specials)
    if is_kept and body.skip_special_tokens is None:
        params.skip_special_tokens = False
    request_id, priority = new_id(), body.priority or 0
    return [engine.input_processor.process(request_id, prompt, params, priority)]


def chat_prompt(body: ChatBody, engine: LLMEngine) -> dict[str, Any]:
    """A conversation as the template writes it, text and token ids."""
    arguments = body.template_arguments()
    special = bool(body.allow_special_tokens)
    (prompt,) = chat_prompts(engine, [body.conversation()], arguments, special)
    return prompt if body.cache_salt is None else prompt | {"cache_salt": body.cache_salt}


class ChatAnswer(Answer):
    """A message, or `n` of them to choose from."""

    id_prefix, whole_object = "chatcmpl", "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, *args: Any) -> None:
        super().__init__(body, *args)
        self._begun: set[int] = set()  # choices
        self._logprobs = partial(logprobs.of_chat, num_top=body.top_logprobs or 0, name=self._name)

    def whole(self, outputs: dict[str, RequestOutput]) -> dict[str, Any]:
        (output,) = outputs.values()
        prompt = output.prompt_logprobs
        extra = {} if prompt is None else {"prompt_logprobs": logprobs.of_prompt(prompt)}
        return super().whole(outputs) | extra

    def _choice_events(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> list[str]:
        """The role, before anything else; text; and why it ended, behind all else."""
        events = []
        if index not in self._begun:
            self._begun.add(index)
            events.append(self._delta(index, '{"role": "assistant", "content": ""}'))
        news = self._news(index, completion)
        if news or completion.logprobs:
            shown = "null"
            if completion.logprobs is not None:
                shown = json.dumps(self._logprobs(completion.token_ids, completion.logprobs))
            events.append(self._delta(index, news or "{}", shown))
        if completion.finish_reason in ("stop", "length"):
            end = json.dumps(self._reason(index, completion))
            end += f', "stop_reason": {json.dumps(completion.stop_reason)}'
            events.append(self._delta(index, "{}", finish_reason=end))
        return events

    def _news(self, index: int, completion: CompletionOutput) -> str:
        """The delta of a choice, as JSON; "" if there is nothing in it."""
        return f'{{"content": {json.dumps(completion.text)}}}' if completion.text else ""

    def _message(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        return {"role": "assistant", "content": completion.text, "refusal": None}

    def _reason(self, index: int, completion: CompletionOutput) -> str | None:
        return completion.finish_reason

    def _delta(
        self, index: int, delta: str, shown: str = "null", finish_reason: str = "null"
    ) -> str:
        return self._event(
            f'{{"index": {index}, "delta": {delta}, "logprobs": {shown}, '
            f'"finish_reason": {finish_reason}}}'
        )

    def _choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        shown = None
        if completion.logprobs is not None:
            shown = self._logprobs(completion.token_ids, completion.logprobs)
        return {
            "index": index,
            "message": self._message(index, completion),
            "logprobs": shown,
            "finish_reason": self._reason(index, completion),
            "stop_reason": completion.stop_reason,
        }
