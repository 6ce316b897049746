"""Conversations as prompts, by the checkpoint's template; what was typed stays text."""

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from functools import partial
from types import FunctionType, MethodType, NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoserve.checks import check_bool, shown
from nanoserve.engine.llm_engine import LLMEngine

if TYPE_CHECKING:
    from nanoserve.tokenizer import Message, Tokenizer

_FUNCTIONS = (FunctionType, MethodType)  # which transformers describes to the template, as tools
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
    for conversation in conversations:
        if not isinstance(conversation, (list, tuple)):
            raise ValueError(f"a conversation is a list of messages, not {shown(conversation)}")
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
    most = limit.most_characters(is_ascii=False)
    from_outside = [conversation, arguments.get("tools"), arguments.get("documents")]
    texts = _texts_in(from_outside, most and max(most, _MOST_CHARACTERS))
    render = partial(tokenizer.apply_chat_template, conversation, **arguments)
    if allow_special_tokens or not any(map(specials.may_be_in, texts)):
        text = render()
        limit.check(text)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, False)}
    marks = specials.make_marks(texts)
    text = render(mark_text=marks.on_special_tokens)
    limit.check(text)
    if specials.found_in(text) != specials.found_in(render(mark_text=marks.everywhere)):
        raise ValueError(
            "the chat template makes special tokens of parts of these messages, which are text; "
            "with allow_special_tokens=True it may"
        )
    token_ids = tokenizer.encode_marked(text, marks)
    return {"prompt": marks.remove(text), "prompt_token_ids": token_ids}


def _texts_in(value: Any, most: int | None) -> list[str]:
    """All texts in lists and dictionaries, keys included, if they are not too long together.

    Nothing else may hold texts: they would be overlooked.
    """
    texts, size, waiting = [], 0, [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if isinstance(part, str):
            texts.append(part)
        if isinstance(part, (str, Mapping, list, tuple)):
            size += len(part)
        elif not isinstance(part, (int, float, np.number, NoneType, *_FUNCTIONS)):
            raise ValueError(f"{shown(part)} in messages is no text, number, list or dictionary")
        if most is not None and size > most:
            raise ValueError(f"these messages have more than {most} characters: they cannot fit")
        if depth > _DEEPEST:
            raise ValueError(f"lists and dictionaries in messages may be {_DEEPEST} deep, no more")
        if isinstance(part, Mapping):
            waiting += [(inner, depth + 1) for item in part.items() for inner in item]
        elif isinstance(part, (list, tuple)):
            waiting += [(inner, depth + 1) for inner in part]
    return texts
