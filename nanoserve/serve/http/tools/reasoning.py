"""The reasoning of a model before its answer, between `<think>` and `</think>`."""

from enum import Enum

from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.parse_result import without_beginning_of

OPEN, CLOSE = "<think>", "</think>"


class Thought(Enum):
    """The state of the reasoning at the end of a prompt."""

    OPEN = "open"  # the output continues it
    CLOSED = "closed"  # the output has no further reasoning
    NONE = "none"  # the output may begin with reasoning


# State for a prompt that does not end with a tag, by the name of the parser.
STARTS = {"qwen3": Thought.NONE, "deepseek_r1": Thought.OPEN}


def special_tokens_of(parser: str) -> tuple[str, ...]:
    """Return the special tokens of a format of reasoning, which the output text must keep."""
    return harmony.SPECIAL_TOKENS if parser == harmony.NAME else (OPEN, CLOSE)


def thought_at_end(prompt: str | None, parser: str, continued: str = "") -> Thought:
    """Return the state of the reasoning at the end of a prompt.

    A tag at the end of the prompt determines it, or else the last tag in `continued`: the message
    at the end of the prompt that the output continues, "" if it continues none.
    """
    end = (prompt or "").rstrip()
    if end.endswith((OPEN, CLOSE)):
        return Thought.OPEN if end.endswith(OPEN) else Thought.CLOSED
    opened, closed = continued.rfind(OPEN), continued.rfind(CLOSE)
    if opened != closed:  # at least one tag was found
        return Thought.OPEN if opened > closed else Thought.CLOSED
    return STARTS[parser]


def split(text: str, is_final: bool, is_inside: bool) -> tuple[str, str]:
    """Return (reasoning, answer). The answer is "" while the reasoning has not ended."""
    begun = text.lstrip()
    if begun.startswith(OPEN):
        thought = begun[len(OPEN) :]
    elif not is_final and OPEN.startswith(begun):
        return "", ""  # may become an opening tag
    elif is_inside:
        thought = text
    else:
        return "", text
    reasoning, closed, answer = thought.partition(CLOSE)
    if closed:
        return reasoning.strip(), answer.lstrip()
    if not is_final:
        reasoning = without_beginning_of(reasoning, (CLOSE,))
    return reasoning.strip(), ""
