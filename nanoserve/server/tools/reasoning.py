"""What a model thinks before it answers, between `<think>` and `</think>`."""

from nanoserve.server.tools.parsed import without_beginning_of

OPEN, CLOSE = "<think>", "</think>"
# By the name of a parser: whether the template has opened the thought already.
STARTS_INSIDE = {"qwen3": False, "deepseek_r1": True}


def starts_inside(prompt: str | None, parser: str) -> bool:
    """Whether an answer to this prompt begins within a thought: its end may tell."""
    end = (prompt or "").rstrip()
    if end.endswith((OPEN, CLOSE)):
        return end.endswith(OPEN)
    return STARTS_INSIDE[parser]


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
