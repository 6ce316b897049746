"""The models that `nanoserve chat` can talk to: one in this process, or one behind a server."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nanoserve.llm import LLM

Messages = list[dict[str, str]]

_TIMEOUT = 600  # seconds without any byte from a server


@dataclass
class Piece:
    """A piece of an answer as it is generated. A server may send reasoning separately."""

    text: str
    is_reasoning: bool = False


@dataclass
class Usage:
    """The token counts of an answer and its prompt; None if they are unknown."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def note(self, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        """Replace the counts."""
        self.prompt_tokens, self.completion_tokens = prompt_tokens, completion_tokens


class Backend(Protocol):
    """A model to chat with. `max_model_len` is its context in tokens; None if it is unknown."""

    name: str
    max_model_len: int | None

    def reply(
        self, messages: Messages, parameters: Mapping[str, Any], usage: Usage
    ) -> Iterator[Piece]:
        """Yield the answer to a conversation, and write its token counts to `usage`.

        Closing the iterator stops the answer. Raises `ValueError`, `OSError` or `HTTPException` if
        there is no answer, or not all of it.
        """
        ...


class LocalModel:
    """A model in this process. Its answers are as long as the context allows."""

    def __init__(self, llm: "LLM", name: str) -> None:
        self.name = name
        self.max_model_len: int | None = llm.engine.input_processor.max_model_len
        self._llm = llm
        self._defaults = replace(llm.get_default_sampling_params(), max_tokens=None)

    def reply(
        self, messages: Messages, parameters: Mapping[str, Any], usage: Usage
    ) -> Iterator[Piece]:
        params, num_tokens = replace(self._defaults, **parameters), 0
        with closing(self._llm.stream(messages, params)) as outputs:  # type: ignore[type-var]
            for output in outputs:
                (completion,) = output.outputs
                num_tokens += len(completion.token_ids)
                usage.note(len(output.prompt_token_ids or ()), num_tokens)
                yield Piece(completion.text)


class RemoteModel:
    """A model of an OpenAI-compatible server. It needs the standard library only."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        with self._send("/models") as response:
            cards = {card["id"]: card for card in json.load(response)["data"]}
        self.name = model or next(iter(cards), "")
        if not self.name:
            raise ValueError(f"{self._base} serves no model")
        self.max_model_len: int | None = cards.get(self.name, {}).get("max_model_len")

    def reply(
        self, messages: Messages, parameters: Mapping[str, Any], usage: Usage
    ) -> Iterator[Piece]:
        own = {"model": self.name, "messages": messages, "stream": True}
        body = {**own, "stream_options": {"include_usage": True}, **parameters}
        with self._send("/chat/completions", body) as lines:
            for line in lines:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: {"):
                    yield from _pieces_of(json.loads(line[6:]), usage)
        raise ValueError(f"{self._base} has ended the answer before its end")

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._base}{path}", content, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT)
        except urllib.error.HTTPError as error:
            message = _message_in(error.read(10_000).decode(errors="replace"))
            raise ValueError(f"{self._base} answers {error.code}: {message}") from error
        except urllib.error.URLError as error:
            raise OSError(f"{self._base} cannot be reached: {error.reason}") from error


def _pieces_of(event: dict[str, Any], usage: Usage) -> Iterator[Piece]:
    """Yield the text of an event of a stream. Raises `ValueError` for an error event."""
    if error := event.get("error"):
        raise ValueError(error.get("message", error) if isinstance(error, dict) else str(error))
    if counts := event.get("usage"):
        usage.note(counts.get("prompt_tokens"), counts.get("completion_tokens"))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            yield Piece(reasoning, is_reasoning=True)
        if delta.get("content"):
            yield Piece(delta["content"])


def _message_in(text: str) -> str:
    """Return the message of an error in OpenAI's format, or the text itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text.strip()


# What may go wrong with an answer, after which the conversation can go on.
FAILURES = (ValueError, OSError, HTTPException)
