"""Conversations as prompts, by the checkpoint's template; what was typed stays text."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING, Any

from nanoserve.checks import check_bool, shown
from nanoserve.engine.llm_engine import LLMEngine

if TYPE_CHECKING:
    from nanoserve.tokenizer import Message, Tokenizer

_FROM_OUTSIDE = ("tools", "documents")  # arguments of templates that may hold what others wrote
_MOST_CHARACTERS = 2**20  # of messages, where a prompt may not be longer than that anyway
_DEEPEST = 64  # lists and dictionaries within each other


def chat_prompts(
    engine: LLMEngine,
    messages: "AbstractSequence[Message] | AbstractSequence[AbstractSequence[Message]]",
    template_arguments: dict[str, Any],
    allow_special_tokens: bool,
) -> list[dict[str, Any]]:
    """One conversation or several as prompts: their texts, and the token ids of these.

    Raises `ValueError` for what is no conversation, what the template cannot render and what
    cannot fit into `max_model_len`, the last before anything is tokenized.
    """
    if engine.tokenizer is None:
        raise ValueError("chat() needs a tokenizer, and this engine has none")
    check_bool("allow_special_tokens", allow_special_tokens)
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages={shown(messages)} must be a list of messages, at least one")
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    return [
        _prompt_of(engine, conversation, template_arguments, allow_special_tokens)
        for conversation in conversations
    ]


def _prompt_of(
    engine: LLMEngine,
    conversation: "AbstractSequence[Message]",
    arguments: dict[str, Any],
    allow_special_tokens: bool,
) -> dict[str, Any]:
    tokenizer: Tokenizer = engine.tokenizer
    limit, specials = engine.input_processor.text_limit, tokenizer.special_tokens
    from_outside = {key: arguments[key] for key in _FROM_OUTSIDE if key in arguments}
    most = limit.most_characters(is_ascii=False)
    texts = _texts_in([conversation, from_outside], most and max(most, _MOST_CHARACTERS))

    def render(mark: Callable[[str], str]) -> str:
        marked = {key: _with_marks(value, mark) for key, value in from_outside.items()}
        return tokenizer.apply_chat_template(
            _with_marks(conversation, mark), **{**arguments, **marked}
        )

    if allow_special_tokens or not any(map(specials.may_be_in, texts)):
        text = render(str)
        limit.check(text)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, False)}
    marks = specials.make_marks(texts)
    text = render(marks.on_special_tokens)
    if specials.found_in(text) != specials.found_in(render(marks.everywhere)):
        raise ValueError(
            "the chat template makes special tokens of parts of these messages, which are text; "
            "with allow_special_tokens=True it may"
        )
    limit.check(text)
    token_ids = tokenizer.encode_marked(text, marks)
    return {"prompt": marks.remove(text), "prompt_token_ids": token_ids}


def _texts_in(value: Any, most: int | None) -> list[str]:
    """All texts in lists and dictionaries, keys included, if they are not too long together."""
    texts, size, waiting = [], 0, [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if isinstance(part, str):
            texts.append(part)
        if isinstance(part, (str, Mapping, list, tuple)):
            size += len(part)
        if most is not None and size > most:
            raise ValueError(f"these messages have more than {most} characters: they cannot fit")
        if depth > _DEEPEST:
            raise ValueError(f"lists and dictionaries in messages may be {_DEEPEST} deep, no more")
        if isinstance(part, Mapping):
            waiting += [(inner, depth + 1) for item in part.items() for inner in item]
        elif isinstance(part, (list, tuple)):
            waiting += [(inner, depth + 1) for inner in part]
    return texts


def _with_marks(value: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {_with_marks(key, mark): _with_marks(inner, mark) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_marks(inner, mark) for inner in value]
    return value
