"""Parse a streamed answer, which is server-sent events with a chunk of the answer each.

Events are parsed as in the HTML standard (9.2.6, "Interpreting an event stream"): lines end with LF
or CR LF, an empty line ends an event, `: ...` is a comment, and several `data:` lines are joined.
This is done after the measurement, from the received pieces and their times.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nanoserve.cli.bench.serve.response import Response

_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")  # fields of a chat's delta
_SHOWN = 160  # characters of a server's text in an error message


@dataclass
class Answer:
    """A parsed answer, with the times of its chunks and the server's token counts or None."""

    times: list[float] = field(default_factory=list)  # of each chunk with content
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    is_finished: bool = False


def read_answer(response: Response) -> Answer:
    """Parse an answer. Raises `ValueError` for an error, an invalid chunk or a missing end."""
    if response.status != 200:
        raise ValueError(f"{response.status} {response.reason}: {_short(error_in(response.body))}")
    kind = response.headers.get("content-type", "nothing")
    if not kind.startswith("text/event-stream"):
        raise ValueError(f"the server answers with {_short(kind)}, not with a stream")
    answer = Answer()
    for data, now in events(zip(response.pieces, response.times, strict=True)):
        if data == b"[DONE]":
            answer.is_finished = True
        else:
            _read_chunk(_parsed(data), now, answer)
    if not answer.is_finished:
        raise ValueError("the stream ended before the answer did")
    if not answer.times:
        raise ValueError("an answer without text")
    return answer


def events(pieces: Iterable[tuple[bytes, float]]) -> Iterator[tuple[bytes, float]]:
    """Yield the data of each event that has data, and the time of its last byte."""
    left, now = b"", 0.0
    for piece, now in pieces:
        *whole, left = (left + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        yield from _data_of(whole, now)
    yield from _data_of([left], now)  # without the empty line at its end


def error_in(body: bytes) -> str:
    """Return the message of an error in OpenAI's format, or else the body as text."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else json.dumps(value)


def _data_of(whole: list[bytes], now: float) -> Iterator[tuple[bytes, float]]:
    for event in whole:
        lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines)
        if data:
            yield data.strip(), now


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        raise ValueError(f"a chunk that is not a JSON object: {_short(repr(data)[1:])}")
    if chunk.get("error"):
        raise ValueError(f"in the stream: {_short(error_in(data))}")
    return chunk


def _read_chunk(chunk: dict[str, Any], now: float, answer: Answer) -> None:
    """Read a chunk into `answer`. The last chunk may have only the usage, and no choices."""
    choices, usage = chunk.get("choices") or [], chunk.get("usage")
    for choice in choices if isinstance(choices, list) else [choices]:
        if not isinstance(choice, dict):
            raise ValueError(f"a choice that is not a JSON object: {_short(repr(choice))}")
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        if choice.get("text") or any(delta.get(name) for name in _TEXTS):
            answer.times.append(now)
        answer.is_finished |= choice.get("finish_reason") is not None
    if isinstance(usage, dict):
        answer.input_tokens = _count(usage, "prompt_tokens")
        answer.output_tokens = _count(usage, "completion_tokens")
        details = usage.get("prompt_tokens_details")
        details = details if isinstance(details, dict) else {}
        answer.cached_tokens = _count(details, "cached_tokens")


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else None


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
