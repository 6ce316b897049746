"""What a model thinks before it answers, between `<think>` and `</think>`."""

from enum import Enum

from nanoserve.serve.http.tools.parse_result import without_beginning_of

OPEN, CLOSE = "<think>", "</think>"


class Thought(Enum):
    """The state in which a prompt leaves the thought of an answer."""

    OPEN = "open"  # the answer goes on with it
    CLOSED = "closed"  # the answer begins, without another one
    NONE = "none"  # the answer may open one


# By the name of a parser: what its models do where the prompt does not end in a tag.
STARTS = {"qwen3": Thought.NONE, "deepseek_r1": Thought.OPEN}


def thought_at_end(prompt: str | None, parser: str, continued: str = "") -> Thought:
    """Return where a prompt leaves a thought; its end may tell.

    continued: the message at the end of the prompt that the answer goes on with, if it does. Its
    last tag tells.
    """
    end = (prompt or "").rstrip()
    if end.endswith((OPEN, CLOSE)):
        return Thought.OPEN if end.endswith(OPEN) else Thought.CLOSED
    opened, closed = continued.rfind(OPEN), continued.rfind(CLOSE)
    if opened != closed:  # one of them is there
        return Thought.OPEN if opened > closed else Thought.CLOSED
    return STARTS[parser]


def split(text: str, is_final: bool, is_inside: bool) -> tuple[str, str]:
    """(reasoning, answer). A thought that never ends is all that there is."""
    begun = text.lstrip()
    if begun.startswith(OPEN):
        thought = begun[len(OPEN) :]
    elif not is_final and OPEN.startswith(begun):
        return "", ""  # it may be about to open
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
