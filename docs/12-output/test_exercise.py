"""Test of the exercise of chapter 12: a reference that sees everything, and the engine itself."""

import codecs
import random
import time
from pathlib import Path

import pytest

import nanoserve
from nanoserve import RequestOutputKind, SamplingParams
from nanoserve.engine.sequence import Sequence
from nanoserve.text.detokenizer import Detokenizer
from nanoserve.text.tokenizer import Tokenizer

from .exercise import TextStream

CHARACTERS = [*"ababab \n.", "é", "中", "文", "e\u0301", "👍🏽", "👩‍💻"]
BROKEN = [b"\xff", b"\xc3", b"\xe4\xb8", b"\x80", b"\xf0\x9f\x98"]


def settled(data: bytes) -> str:
    """The characters that no later byte can change."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    return min(((text.find(stop), stop) for stop in stops if stop in text), default=None)


def may_begin_a_stop(text: str, stops: list[str]) -> int:
    lengths = range(len(text) + 1)
    return max(
        (n for n in lengths for s in stops if n < len(s) and s[:n] == text[len(text) - n :]),
        default=0,
    )


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    pieces = []
    while data:
        size = rng.randint(1, 5)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def check(pieces: list[bytes], stops: list[str]) -> str | None:
    """Push the pieces and compare with the expected text after each of them."""
    stream, shown = TextStream(stops), ""
    for end in range(1, len(pieces) + 1):
        shown += stream.push(pieces[end - 1])
        text = settled(b"".join(pieces[:end]))
        found = first_stop(text, stops)
        case = f"TextStream({stops}), pushed {pieces[:end]}"
        if found:
            assert shown == text[: found[0]], case
            assert stream.stopped_by in stops, case
            assert text.startswith(stream.stopped_by, found[0]), case
            assert stream.finish() == "", f"{case}, then finish()"
            with pytest.raises(ValueError):
                stream.push(b"more")
            return stream.stopped_by
        assert stream.stopped_by is None, case
        assert shown == text[: len(text) - may_begin_a_stop(text, stops)], case
    text = b"".join(pieces).decode("utf-8", "replace")
    found = first_stop(text, stops)
    expected, case = text[: found[0]] if found else text, f"TextStream({stops}), pushed {pieces}"
    assert shown + stream.finish() == expected, f"{case}, then finish()"
    return stream.stopped_by


@pytest.mark.parametrize(
    ("pieces", "stops"),
    [
        (["Ans", "wer:", " 42"], []),
        (["Ans", "wer:", " 42"], ["swer"]),
        (["a", "a", "b", "b"], ["aabb", "ab"]),  # the shorter one is complete first
        (["ab", "abx"], ["abab"]),
        (["ab", "ac"], ["abab"]),
        (["x", "stop", "y"], ["stop"]),
        (["中", "文", "。"], ["文。"]),
        (["a"], ["a"]),
        ([], ["a"]),
    ],
)
def test_cases_that_one_can_do_by_hand(pieces: list[str], stops: list[str]) -> None:
    check([piece.encode() for piece in pieces], stops)
    check([bytes([byte]) for piece in pieces for byte in piece.encode()], stops)


@pytest.mark.parametrize("data", [b"\xe4\xb8", b"ok \xff\xfe", b"\xf0\x9f\x98", b"\xc3\xc3\xa9"])
def test_bytes_that_never_become_a_character(data: bytes) -> None:
    check([bytes([byte]) for byte in data], [])
    check([data], [])


def test_random_texts_equal_a_reference_that_sees_everything() -> None:
    rng, num_stopped = random.Random(0), 0
    for _ in range(1_500):
        data = b"".join(
            rng.choice(BROKEN) if rng.random() < 0.05 else rng.choice(CHARACTERS).encode()
            for _ in range(rng.randint(0, 25))
        )
        text = settled(data)
        stops = [rng.choice(["abab", "ba\n", "aab", "中文", "文.", "👍"])]
        if text:
            start = rng.randrange(len(text))
            stops.append(text[start : start + rng.randint(1, 6)] + rng.choice(["", "", "x"]))
        stops = [stop for stop in stops if "\ufffd" not in stop]
        num_stopped += check(cut(data, rng), stops) is not None
    assert 300 < num_stopped < 1_400, f"{num_stopped} of the 1,500 random texts were stopped"


def test_streams_do_not_share_anything() -> None:
    first, second = TextStream(["ab"]), TextStream(["ab"])
    first.push(b"a")
    case = "two TextStream(['ab']): 'a' to the first, then 'b' to the second"
    assert second.push(b"b") == "b" and second.stopped_by is None, case


def test_the_work_does_not_grow_with_the_text() -> None:
    """100 times the text may take 100 times as long, with a wide margin, but not 10,000 times."""

    def seconds(num_pieces: int) -> float:
        stream, start = TextStream(["never seen"]), time.perf_counter()
        for _ in range(num_pieces):
            stream.push("中n".encode())
        return time.perf_counter() - start

    seconds(100)
    few, many = seconds(500), seconds(50_000)
    assert many < 1_000 * max(few, 1e-4), f"500 pieces take {few:.4f} s, 50,000 take {many:.4f} s"


# -- Compared with the engine's own detokenizer, with the tokenizer of the bundled model ---------


def byte_of_symbol() -> dict[str, int]:
    """A byte-level vocabulary writes printable bytes as themselves, the others from 256 upwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def test_pieces_are_those_of_the_engine_token_by_token() -> None:
    tokenizer = Tokenizer(Path(nanoserve.__file__).parent / "checkpoint" / "tiny_qwen3" / "model")
    symbols, rng = byte_of_symbol(), random.Random(1)
    texts = ["What is a 块表? KV缓存 is memory.\n👩‍💻: done.\n", "块表块表块。ababab"]
    num_stopped = 0
    for _ in range(60):
        text = rng.choice(texts)
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randint(1, 5)] + rng.choice(["", "", "#"])
        params = SamplingParams(stop=stop, max_tokens=999, output_kind=RequestOutputKind.DELTA)
        seq = Sequence("r", [0], params, max_model_len=1_000)
        detokenizer, stream, pieces = Detokenizer(tokenizer), TextStream([stop]), []
        for token_id in tokenizer.encode(text):
            seq.append(token_id)
            seq.stop_reason = detokenizer.advance(seq)
            piece = bytes(symbols[s] for s in tokenizer.backend.id_to_token(token_id))
            shown = stream.push(piece)
            pieces.append(piece)
            case = f"TextStream({[stop]}), pushed {pieces}"
            assert stream.stopped_by == seq.stop_reason, case
            if seq.stop_reason is not None:
                num_stopped += 1
                break
            assert shown == detokenizer.text(seq), case
    assert num_stopped > 20, f"{num_stopped} of the 60 texts were stopped"
