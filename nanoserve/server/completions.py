"""/v1/completions: text or token ids in, their continuation out."""

import json
from collections.abc import Iterator
from typing import Any

from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.request import Request
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.server import logprobs
from nanoserve.server.answers import Answer, as_json
from nanoserve.server.errors import ApiError
from nanoserve.server.protocol import CompletionBody

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, of this endpoint


def completion_requests(body: CompletionBody, engine: LLMEngine, new_id: Any) -> Iterator[Request]:
    """Yield a request for each prompt. It tokenises, so it is called off the event loop.

    `max_tokens=0` asks, with `echo`, for the log-probabilities of the prompt alone.
    """
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1  # which the answer leaves out
    params = body.sampling_params(
        engine.input_processor.default_sampling, max_tokens, body.logprobs
    )
    if body.echo and body.logprobs is not None:
        params.prompt_logprobs = body.logprobs
    for prompt in body.prompts():
        if isinstance(prompt, str) and body.add_special_tokens is False:
            engine.input_processor.text_limit.check(prompt)
            prompt = engine.tokenizer.encode(prompt, add_special_tokens=False)
        process = engine.input_processor.process
        yield process(new_id(), body.prompt_of(prompt), params, body.priority or 0)


class CompletionAnswer(Answer):
    """`n` continuations of each prompt."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, *args: Any) -> None:
        super().__init__(body, *args)
        self._lengths: dict[int, int] = {}  # characters of each choice up to now
        self._has_output = body.max_tokens != 0

    def _choice_events(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> list[str]:
        reason = completion.finish_reason
        text, shown = self._news(index, completion, output)
        if not text and not shown and reason is None:
            return []
        if reason == "abort" or output.error is not None:
            reason = None
        return [
            self._event(
                f'{{"index": {index}, "text": {json.dumps(text)}, "logprobs": {as_json(shown)}, '
                f'"finish_reason": {as_json(reason)}, '
                f'"stop_reason": {as_json(completion.stop_reason)}}}'
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
            choice["prompt_logprobs"] = logprobs.of_prompt(output.prompt_logprobs)
        return choice

    def _news(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities of a choice that were not told yet."""
        if not self._body.echo and self._body.logprobs is None:
            return completion.text, None
        text, token_ids, entries = "", [], []
        if self._body.echo and index not in self._lengths:
            text, token_ids = self._prompt_text(output), list(output.prompt_token_ids)
            entries = list(output.prompt_logprobs or ())
        if self._has_output:
            text += completion.text
            token_ids += completion.token_ids
            entries += completion.logprobs or ()
        before = self._lengths.get(index, 0)
        self._lengths[index] = before + len(text)
        if self._body.logprobs is None:
            return text, None
        return text, logprobs.of_completion(token_ids, entries, before, self._name)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, False)

    def _count(self, output: RequestOutput) -> None:
        super()._count(output)
        if not self._has_output:
            self._num_output_tokens = 0


def check_completion(body: CompletionBody, max_prompts: int, max_n: int) -> None:
    """`ApiError` for what two fields must agree on.

    One body of 1.4 kB could ask for 16,384 completions otherwise, each of which takes its turn.
    """
    num_prompts = len(body.prompts())
    if not 1 <= num_prompts <= max_prompts:
        told = f"prompt has {num_prompts} prompts; it takes 1 to {max_prompts}"
        raise ApiError(400, told, "prompt")
    num_completions, most = num_prompts * (body.n or 1), max(max_prompts, max_n)
    if num_completions > most:
        told = f"{num_prompts} prompts and n={body.n} are {num_completions} completions; a request "
        raise ApiError(400, f"{told}may have {most}", "n")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 asks for nothing without echo=true", "max_tokens")
