"""Prints answers while they are generated, and a status line after each."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from nanoserve.cli.chat.backend import Piece, Usage

Clock = Callable[[], float]


@dataclass
class Answer:
    """A printed answer. Times are in seconds."""

    text: str = ""
    num_pieces: int = 0
    first: float | None = None  # time to the first piece
    last: float = 0.0  # time from the first piece to the last one
    usage: Usage = field(default_factory=Usage)

    def take(self, piece: Piece, seconds: float) -> None:
        """Add a piece that has arrived `seconds` after the question."""
        self.first = seconds if self.first is None else self.first
        self.last = seconds - self.first
        self.num_pieces += 1
        if not piece.is_reasoning:
            self.text += piece.text


def show(pieces: Iterator[Piece], answer: Answer, clock: Clock = time.perf_counter) -> None:
    """Print an answer and record it in `answer`. Ctrl-C cuts it short.

    Reasoning is printed for people only, in a faint colour.
    """
    began, shows_reasoning = clock(), is_styled()
    is_reasoning = False
    try:
        for piece in pieces:
            answer.take(piece, clock() - began)
            if piece.is_reasoning:
                is_reasoning = shows_reasoning
                print(faint(piece.text) if shows_reasoning else "", end="", flush=True)
                continue
            if is_reasoning:
                print("\n")
                is_reasoning = False
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()  # stops the answer
        print(flush=True)


def status(answer: Answer, max_model_len: int | None) -> str:
    """Return the status line of an answer: tokens, rate, time to first token, context in use.

    >>> usage = Usage(prompt_tokens=20, completion_tokens=11)
    >>> status(Answer(first=0.05, last=0.5, usage=usage), 200)
    '11 tokens, 20 tokens/s, first after 50 ms, context 31 of 200 (16 %)'
    """
    counted = answer.usage.completion_tokens
    num_tokens = answer.num_pieces if counted is None else counted
    parts = [f"{'about ' if counted is None else ''}{num_tokens:,} tokens"]
    if num_tokens > 1 and answer.last > 0.005:  # otherwise all tokens have arrived at once
        parts.append(f"{(num_tokens - 1) / answer.last:,.0f} tokens/s")
    if answer.first is not None:
        parts.append(f"first after {_duration(answer.first)}")
    if answer.usage.prompt_tokens is not None:
        used = answer.usage.prompt_tokens + num_tokens
        parts.append(f"context {used:,}{_share(used, max_model_len)}")
    return ", ".join(parts)


def _share(used: int, most: int | None) -> str:
    return "" if not most else f" of {most:,} ({100 * used / most:.0f} %)"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def is_styled() -> bool:
    """Return True if colours can be used: on a terminal, unless NO_COLOR is set."""
    is_plain = os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR")
    return sys.stdout.isatty() and not is_plain


def faint(text: str) -> str:
    return f"\x1b[2m{text}\x1b[22m" if is_styled() else text
