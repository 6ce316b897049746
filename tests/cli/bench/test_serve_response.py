"""A streamed response, cut anywhere: read as Python's own client reads it."""

import http.client
import io
import random

import pytest

from nanoserve.cli.bench.serve.figures import figures
from nanoserve.cli.bench.serve.load import Exchange
from nanoserve.cli.bench.serve.response import Response
from nanoserve.cli.bench.serve.stream import Answer, read_answer

_EVENTS = (
    b": a comment\n\n"
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": "one \xc3\xa9"}}]}\r\n\r\n'
    b'event: message\nid: 7\ndata:{"choices":\ndata: [{"delta": {"content": "two"}}]}\n\n'
    b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n: keep-alive\n\n'
    b'data: {"choices": [{"delta": {"content": "three"}, "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 5,'
    b' "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
    b"data: [DONE]\n\n"
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(data: bytes, *borders: int) -> bytes:
    """Chunks that end at the borders, whatever event is there; an extension, and a trailer."""
    ends = [*borders, len(data)]
    parts = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    body = b"".join(b"%X;x=y\r\n%b\r\n" % (len(part), part) for part in parts)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\nDigest: none\r\n\r\n"


# In the middle of events, and no two that have content end in the same chunk.
INSIDE = [_EVENTS.index(word) + 2 for word in (b'"one', b'"two"', b'"hm"', b'"three"')]
RAW = chunked(_EVENTS, 3, 4, *INSIDE)
FRAMINGS = {
    "chunks": RAW,
    "length": HEAD + b"Content-Length: %d\r\n\r\n" % len(_EVENTS) + _EVENTS,
    "until closed": HEAD + b"\r\n" + _EVENTS,
    "after a 100": b"HTTP/1.1 100 Continue\r\n\r\n" + RAW,
}


class FakeSocket:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.data)


def read(data: bytes, *cuts: int) -> Response:
    response, ends = Response(), [*cuts, len(data)]
    for now, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        response.feed(data[start:end], float(now))
    if not response.is_complete:
        response.end()
    return response


@pytest.mark.parametrize("framing", FRAMINGS)
def test_it_is_read_as_pythons_own_client_reads_it(framing: str) -> None:
    theirs = http.client.HTTPResponse(FakeSocket(FRAMINGS[framing]))
    theirs.begin()
    ours = read(FRAMINGS[framing])
    assert (ours.status, ours.reason, ours.body) == (theirs.status, theirs.reason, theirs.read())
    assert ours.body == _EVENTS
    assert ours.headers["content-type"] == theirs.getheader("content-type")
    assert ours.keeps_alive != theirs.will_close


@pytest.mark.parametrize("framing", FRAMINGS)
def test_where_it_is_cut_makes_no_difference(framing: str) -> None:
    data = FRAMINGS[framing]
    expected = Answer([0.0] * 4, 11, 5, 4, True)
    assert read_answer(read(data)) == expected
    for cut in range(1, len(data)):
        response = read(data, cut)
        answer = read_answer(response)
        assert response.body == _EVENTS
        assert len(answer.times) == 4 and answer.times == sorted(answer.times)
        assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == (11, 5, 4)
    byte_by_byte = read_answer(read(data, *range(1, len(data))))
    assert len(set(byte_by_byte.times)) == 4
    rng = random.Random(0)
    for _ in range(200):
        cuts = sorted(rng.sample(range(1, len(data)), 7))
        assert len(read_answer(read(data, *cuts)).times) == 4


def test_content_has_the_time_of_its_last_byte() -> None:
    for index, place in enumerate(INSIDE):
        data = FRAMINGS["length"]
        times = read_answer(read(data, len(data) - len(_EVENTS) + place)).times
        assert times == [0.0] * index + [1.0] * (4 - index)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"HTTP/2 200\r\n\r\n", "no HTTP/1.1"),
        (b"HTTP/1.1 abc\r\n\r\n", "no HTTP/1.1"),
        (b"x" * 70_000, "head of the response is longer"),
        (HEAD + b"Content-Length: -5\r\n\r\n", "Content-Length"),
        (HEAD + b"Content-Length: 2\r\n\r\nabc", "bytes after the end"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", "size of a chunk"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFF\r\n", "size of a chunk"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", "longer than its size"),
        (RAW + b"x", "bytes after the end"),
        (RAW[:-9], "closed before the response was complete"),
        (HEAD + b"Content-Length: 5\r\n\r\nabc", "closed before the response was complete"),
        (b"HTTP/1.1 200 O", "closed before the response was complete"),
    ],
)
def test_what_is_no_response(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(data)


@pytest.mark.parametrize(
    "data",
    [b"[]", b"7", b"{", b'{"choices": [7]}', b'{"choices": {"a": 1}, "error": []}', b"[" * 100_000],
)
def test_chunks_of_another_kind_are_failures_or_nothing(data: bytes) -> None:
    """Never an exception of another kind."""
    with pytest.raises(ValueError, match=r"JSON object|an answer without text"):
        read_answer(read(HEAD + b"\r\n" + b"data: " + data + b"\n\ndata: [DONE]\n\n"))


def test_waiting_counts_from_when_a_request_was_due() -> None:
    """Not from when a busy client got to it; and what failed takes its time, too."""
    response = read(FRAMINGS["length"], len(FRAMINGS["length"]) - len(_EVENTS) + INSIDE[0])
    late = Exchange(due=0.25, sent=0.75, ended=1.0, response=response)
    failed = Exchange(due=0.5, sent=0.5, ended=4.25, error="TimeoutError: too long")
    run = figures([late, failed], [5, 5], 0.8, 1.0, client_seconds=1.0)
    assert run["seconds"] == 4.0
    assert run["latencies"]["ttft_p50"] == pytest.approx(750)
    assert run["latencies"]["request_rate"] == pytest.approx(1 / 4)
    assert run["goodput_share"] == 0.5
    assert run["client"] == {"late_ms_p99": 495, "late_ms_max": 500, "core": 0.25}
    assert (run["input_tokens"], run["output_tokens"], run["cached_tokens"]) == (11, 5, 4)
    assert run["errors"] == {"TimeoutError: too long": 1}
