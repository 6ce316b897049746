"""Endpoint /v1/completions, which continues a prompt of text or token ids."""

import json
from collections.abc import Iterator
from typing import Any

from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.request import Request
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.serve.engine_process import EngineFront
from nanoserve.serve.http import logprobs
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import CompletionBody
from nanoserve.serve.http.response_builder import Answer, as_json, members
from nanoserve.serve.http.tensor_field import tensor_of

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint


def completion_requests(
    body: CompletionBody, engine: GuardedEngine | EngineFront, new_id: Any
) -> Iterator[Request]:
    """Yield a request for each prompt. It tokenizes, so call it off the event loop.

    `max_tokens=0` together with `echo` requests only the prompt and its log-probabilities.
    """
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1  # the response omits this token
    params = body.sampling_params(
        engine.input_processor.default_sampling, max_tokens, body.logprobs
    )
    if body.echo and body.logprobs is not None:
        params.prompt_logprobs = body.logprobs
    for embeds in _embeds(body, engine):
        yield engine.input_processor.process(new_id(), embeds, params, body.priority or 0)
    for prompt in body.prompts():
        if isinstance(prompt, str) and body.add_special_tokens is False:
            engine.input_processor.text_limit.check(prompt)
            prompt = engine.tokenizer.encode(prompt, add_special_tokens=False)
        process = engine.input_processor.process
        yield process(new_id(), body.prompt_of(prompt), params, body.priority or 0)


def _embeds(body: CompletionBody, engine: GuardedEngine | EngineFront) -> Iterator[dict[str, Any]]:
    """Yield the prompts that are embeddings."""
    salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    most = engine.input_processor.max_prompt_len * engine.model_config.hidden_size
    for encoded in body.take_embeds():
        yield {"prompt_embeds": tensor_of("prompt_embeds", encoded, most), **salt}


class CompletionAnswer(Answer):
    """A response of /v1/completions, with `n` continuations of each prompt."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    _body: CompletionBody

    def __init__(self, body: CompletionBody, *args: Any) -> None:
        super().__init__(body, *args)
        self._lengths: dict[int, int] = {}  # characters of each choice so far
        self._names = logprobs.TokenNames(
            self._tokenizer.token_bytes, bool(body.return_tokens_as_token_ids), "bytes:"
        )
        self._has_output = body.max_tokens != 0

    def _choice_events(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> list[str]:
        reason, begins = completion.finish_reason, index not in self._lengths
        text, shown = self._news(index, completion, output)
        ids = self._token_ids(completion, output.prompt_token_ids if begins else None)
        if not text and not shown and not ids and reason is None:
            return []
        if reason == "abort" or output.error is not None:
            reason = None
        return [
            self._event(
                f'{{"index": {index}, "text": {json.dumps(text)}, "logprobs": {as_json(shown)}, '
                f'"finish_reason": {as_json(reason)}, '
                f'"stop_reason": {as_json(completion.stop_reason)}{members(ids)}}}'
            )
        ]

    def _choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        text, shown = self._news(index, completion, output)
        choice = {"index": index, "text": text, "logprobs": shown}
        choice |= {"finish_reason": completion.finish_reason}
        choice |= {"stop_reason": completion.stop_reason}
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.of_prompt(output.prompt_logprobs or [])
        return choice | self._token_ids(completion, output.prompt_token_ids)

    def _token_ids(
        self, completion: CompletionOutput, prompt_token_ids: list[int] | None
    ) -> dict[str, Any]:
        """Return vLLM's `token_ids`, and `prompt_token_ids` unless they are None."""
        if not self._body.return_token_ids:
            return {}
        ids = {"token_ids": list(completion.token_ids) if self._has_output else []}
        return ids if prompt_token_ids is None else ids | {"prompt_token_ids": prompt_token_ids}

    def _news(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> tuple[str, dict[str, Any] | None]:
        """Return the unsent text and log-probabilities of a choice."""
        begins = index not in self._lengths
        if not self._body.echo and self._body.logprobs is None:
            self._lengths[index] = 0
            return completion.text, None
        text, token_ids, entries = "", [], []
        offsets, contents = [], []
        if self._body.echo and begins:
            text, token_ids = self._prompt_text(output), list(output.prompt_token_ids)
            entries = list(output.prompt_logprobs or ())
            if self._body.logprobs is not None:
                offsets = logprobs.offsets_in_prompt(self._tokenizer, text, token_ids)
                contents = [self._names.token_bytes.of(token_id) for token_id in token_ids]
        length = self._lengths.get(index, 0) + len(text)
        self._lengths[index] = length + (len(completion.text) if self._has_output else 0)
        if self._has_output:
            text += completion.text
        if self._body.logprobs is None:
            return text, None
        if self._has_output:
            token_ids += completion.token_ids
            entries += completion.logprobs or ()
            positions = self._positions_of(index, start=length)
            for token_id in completion.token_ids:
                contents.append(positions.content(token_id))
                offsets.append(positions.advance(token_id))
        if completion.finish_reason is not None:  # a stop string may have cut the text
            offsets = [min(offset, self._lengths[index]) for offset in offsets]
        shown = logprobs.of_completion(token_ids, entries, self._names, contents, offsets)
        return text, shown

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, False)

    def _count(self, output: RequestOutput) -> None:
        super()._count(output)
        if not self._has_output:
            self._num_output_tokens = 0


def check_completion(body: CompletionBody, max_prompts: int, max_n: int) -> None:
    """Raise `ApiError` for fields that contradict each other or request too many completions.

    Without the limit, one body of 1.4 kB could request 16,384 completions.
    """
    num_prompts = len(body.prompts()) + len(body.embeds())
    if not 1 <= num_prompts <= max_prompts:
        message = f"prompt has {num_prompts} prompts; it must have 1 to {max_prompts}"
        raise ApiError(400, message, "prompt")
    num_completions, most = num_prompts * (body.n or 1), max(max_prompts, max_n)
    if num_completions > most:
        message = f"{num_prompts} prompts with n={body.n} are {num_completions} completions; a "
        raise ApiError(400, f"{message}request may have at most {most}", "n")
    if body.embeds() and body.echo:
        raise ApiError(400, "echo=true needs prompts of text: prompt_embeds have none", "echo")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 requires echo=true", "max_tokens")
