"""The reasoning of a model before its answer, such as `<think>...</think>`."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.parse_result import without_beginning_of

OPEN, CLOSE = "<think>", "</think>"


class Thought(Enum):
    """The state of the reasoning at the end of a prompt."""

    OPEN = "open"  # the output continues it
    CLOSED = "closed"  # the output has no further reasoning
    NONE = "none"  # the output may begin with reasoning


@dataclass(frozen=True)
class ReasoningFormat:
    """The text around the reasoning.

    opens, closes: either of several spellings. start: the state for a prompt that ends with
    neither. ends: text that begins the answer if the model leaves out the closing tag.
    """

    start: Thought = Thought.NONE
    opens: tuple[str, ...] = (OPEN,)
    closes: tuple[str, ...] = (CLOSE,)
    ends: tuple[str, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        return self.opens + self.closes


THINK = ReasoningFormat()
_STARTED = ReasoningFormat(Thought.OPEN)
# By name of vLLM's parser. Most templates of the first group end with a tag if the model reasons.
REASONING = {
    "qwen3": THINK,
    "deepseek_v3": THINK,
    "glm45": THINK,
    "glm47": THINK,
    "kimi_k2": ReasoningFormat(ends=("<|tool_calls_section_begin|>",)),
    "mimo": THINK,
    "seed_oss": ReasoningFormat(opens=("<seed:think>",), closes=("</seed:think>",)),
    "mistral": ReasoningFormat(opens=("[THINK]",), closes=("[/THINK]",)),
    "granite": ReasoningFormat(
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
    ),
    "deepseek_r1": _STARTED,
    "holo2": _STARTED,
    "minimax_m2": _STARTED,
    "nemotron_v3": _STARTED,
    "olmo3": _STARTED,
    "step3": _STARTED,
    "step3p5": _STARTED,
}
# State for a prompt that does not end with a tag, by the name of the parser.
STARTS = {name: one.start for name, one in REASONING.items()}


def special_tokens_of(parser: str) -> tuple[str, ...]:
    """Return the special tokens of a format of reasoning, which the output text must keep."""
    return harmony.SPECIAL_TOKENS if parser == harmony.NAME else REASONING[parser].tags


def thought_at_end(prompt: str | None, parser: str, continued: str = "") -> Thought:
    """Return the state of the reasoning at the end of a prompt.

    A tag at the end of the prompt determines it, or else the last tag in `continued`: the message
    at the end of the prompt that the output continues, "" if it continues none.
    """
    end, form = (prompt or "").rstrip(), REASONING[parser]
    if end.endswith(form.tags):
        return Thought.OPEN if end.endswith(form.opens) else Thought.CLOSED
    opened = max(continued.rfind(tag) for tag in form.opens)
    closed = max(continued.rfind(tag) for tag in form.closes)
    if opened != closed:  # at least one tag was found
        return Thought.OPEN if opened > closed else Thought.CLOSED
    if continued and form.start is Thought.OPEN:
        return Thought.CLOSED  # the beginning of the answer is there already
    return form.start


def split(
    text: str, is_final: bool, is_inside: bool, form: ReasoningFormat = THINK
) -> tuple[str, str]:
    """Return (reasoning, answer). The answer is "" while the reasoning has not ended."""
    begun = text.lstrip()
    opened = next((tag for tag in form.opens if begun.startswith(tag)), None)
    if opened is not None:
        thought = begun[len(opened) :]
    elif not is_final and any(tag.startswith(begun) for tag in form.opens):
        return "", ""  # may become an opening tag
    elif is_inside:
        thought = text
    else:
        return "", text
    end, answer_at = _end_of(thought, form)
    if end >= 0:
        return thought[:end].strip(), thought[answer_at:].lstrip()
    if not is_final:
        thought = without_beginning_of(thought, form.closes + form.ends)
    return thought.strip(), ""


def _end_of(thought: str, form: ReasoningFormat) -> tuple[int, int]:
    """Return the position where the reasoning ends, -1 if it has not, and that of the answer."""
    found = _first(thought, form.closes)
    if form.ends:
        found = min(filter(None, (found, _first(thought, form.ends, keeps=True))), default=None)
    return (-1, -1) if found is None else found


def _first(text: str, tags: Iterable[str], keeps: bool = False) -> tuple[int, int] | None:
    """Return where the first of the tags begins and ends; keeps: the tag belongs to the answer."""
    found = [(i, i if keeps else i + len(tag)) for tag in tags if (i := text.find(tag)) >= 0]
    return min(found, default=None)
