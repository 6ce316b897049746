"""The budget for the reasoning of a request, vLLM's `thinking_token_budget`."""

from weakref import WeakKeyDictionary

from nanoserve.sampling.thinking_budget import ThinkingBudget
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.reasoning import REASONING, ReasoningFormat, Thought
from nanoserve.text.tokenizer import Tokenizer

FIELD = "thinking_token_budget"
# How vocabularies write a space and a line feed.
_SPELLED = str.maketrans({"\u0120": " ", "\u2581": " ", "\u010a": "\n"})


def check_budget(budget: int | None, reasoning_parser: str | None) -> None:
    """Raise `ApiError` for a budget that is invalid, or that this server cannot enforce."""
    if budget is None or budget == -1:
        return
    if budget < 0:
        raise ApiError(400, f"{FIELD}={budget} must be at least 0, or -1 for no limit", FIELD)
    if reasoning_parser is None:
        message = f"{FIELD} needs a server that knows the tags of the reasoning: --reasoning-parser"
        raise ApiError(400, message, FIELD, "unsupported")
    if reasoning_parser == harmony.NAME:
        message = f"{FIELD} is not supported for this model, which thinks in messages: use "
        raise ApiError(400, f"{message}reasoning_effort", FIELD, "unsupported")


def budget_of(
    num_tokens: int, reasoning_parser: str, thought: Thought, tokenizer: Tokenizer
) -> ThinkingBudget | None:
    """Return the logits processor for a budget; None if the output has no reasoning.

    num_tokens: the budget; -1 is none. thought: the state at the end of the prompt.
    """
    if num_tokens < 0 or thought is Thought.CLOSED:
        return None
    form = REASONING[reasoning_parser]
    return ThinkingBudget(
        num_tokens,
        [tag.encode() for tag in form.opens],
        [tag.encode() for tag in form.closes],
        _pieces_of(tokenizer, form),
        tokenizer.encode(form.closes[0], add_special_tokens=False),
        is_open=thought is Thought.OPEN,
    )


# By tokenizer and tags; finding them takes some 0.3 s for a vocabulary of 150,000 tokens.
_PIECES: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], dict[int, bytes]]] = WeakKeyDictionary()


def _pieces_of(tokenizer: Tokenizer, form: ReasoningFormat) -> dict[int, bytes]:
    """Return the bytes of the tokens that may be a part of a tag, and of whitespace."""
    known = _PIECES.setdefault(tokenizer, {})
    if form.tags not in known:
        known[form.tags] = _find_pieces(tokenizer, form)
    return known[form.tags]


def _find_pieces(tokenizer: Tokenizer, form: ReasoningFormat) -> dict[int, bytes]:
    begins = tuple({tag[:end] for tag in form.tags for end in range(1, len(tag))})
    ends = tuple({tag[start:] for tag in form.tags for start in range(1, len(tag))})
    found = {}
    for token, token_id in tokenizer.backend.get_vocab().items():
        text = token.translate(_SPELLED)
        is_part = text.endswith(begins) or text.startswith(ends) or text.isspace()
        if is_part or any(tag in text or text in tag for tag in form.tags):
            found[token_id] = tokenizer.token_bytes.of(token_id)
    return found
