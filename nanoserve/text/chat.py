"""Renders conversations as prompts. Special tokens that users type stay ordinary text."""

import re
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from functools import partial
from types import FunctionType, MethodType, NoneType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nanoserve.text.chat_template import load_chat_template
from nanoserve.text.prompt_types import Conversation, Conversations, Message
from nanoserve.text.tool_arguments import with_objects
from nanoserve.utils.checks import check_bool, check_choice, require, shown

if TYPE_CHECKING:
    from pathlib import Path

    from nanoserve.engine.input_processor import InputProcessor
    from nanoserve.text.tokenizer import Tokenizer

_FUNCTIONS = (FunctionType, MethodType)  # tools that transformers describes to the template
# Matches a template's loop over the parts of a content; such a template gets the list of parts.
_LOOKS_INTO_CONTENT = re.compile(
    r"""\{%-?\s*for\s+\w+\s+in\s+(?:[^%]*[.\s]|[^%]*\[['"])?content\b"""
)
# Types of text parts, and the field that holds the text: in requests, in answers sent back as
# messages, and for both in OpenAI's newer protocol.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MOST_CHARACTERS = 2**20  # limit for messages, if the prompt's limit is not higher
_DEEPEST = 64  # maximum nesting depth of lists and dictionaries


class ChatEngine(Protocol):
    """The part of an engine that chat prompts need.

    `GuardedEngine` has it, and the stand-in for an engine in another process.
    """

    @property
    def tokenizer(self) -> "Tokenizer": ...

    @property
    def input_processor(self) -> "InputProcessor": ...


def prompts_of(
    engine: ChatEngine,
    messages: Conversation | Conversations,
    *,
    chat_template: "str | Path | None" = None,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    allow_special_tokens: bool = False,
    **unknown: Any,
) -> list[dict[str, Any]]:
    """Render one conversation or several as prompts, with the options of `LLM.chat`.

    Raises `ValueError` for unknown or conflicting options; see `chat_prompts`.
    """
    if unknown:
        from nanoserve.compat.keywords import refuse_chat_keywords

        refuse_chat_keywords(unknown)
    check_choice(
        "chat_template_content_format", chat_template_content_format, ("auto", "string", "openai")
    )
    own = {} if chat_template_kwargs is None else chat_template_kwargs
    is_mapping = isinstance(own, Mapping)
    require(is_mapping, f"chat_template_kwargs={shown(own)} must be a dictionary")
    check_bool("add_generation_prompt", add_generation_prompt)
    check_bool("continue_final_message", continue_final_message)
    require(
        not (add_generation_prompt and continue_final_message),
        "continue_final_message=True continues the last message, and add_generation_prompt=True "
        "begins a new one: set add_generation_prompt=False",
    )
    arguments = {**own, "add_generation_prompt": add_generation_prompt}
    if continue_final_message:
        arguments["continue_final_message"] = True
    if chat_template is not None:
        arguments["chat_template"] = _text_of_template(engine, chat_template)
    if tools is not None:
        arguments["tools"] = tools
    template = arguments.get("chat_template") or getattr(engine.tokenizer, "chat_template", "")
    template = template if isinstance(template, str) else ""
    require(
        not tools or "tools" in template,
        "tools: the chat template does not show tools to the model; describe them in a message",
    )
    as_text = chat_template_content_format == "string"
    if chat_template_content_format == "auto":
        as_text = not looks_into_content(template)
    return chat_prompts(engine, messages, arguments, allow_special_tokens, as_text)


def looks_into_content(template: str) -> bool:
    """Return True if a template has a loop over the parts of a content."""
    return _LOOKS_INTO_CONTENT.search(template) is not None


def _text_of_template(engine: ChatEngine, given: Any) -> str:
    """Return the checkpoint's template of this name; otherwise see `load_chat_template`."""
    if isinstance(given, str) and "{" not in given and engine.tokenizer is not None:
        named: Any = engine.tokenizer.hugging_face.chat_template
        if isinstance(named, dict) and given in named:
            return named[given]
    return load_chat_template(given, must_show_messages=False)


def chat_prompts(
    engine: ChatEngine,
    messages: Conversation | Conversations,
    template_arguments: dict[str, Any],
    allow_special_tokens: bool,
    content_as_text: bool = True,
) -> list[dict[str, Any]]:
    """Render one conversation or several: return prompts with their text and token ids.

    `content_as_text`: join a content that is a list of parts into one string, which most templates
    expect. False: make a content that is a string a list of one part, as vLLM does.

    Raises `ValueError` for an invalid conversation, for one that the template cannot render, and
    for one that cannot fit into `max_model_len`, which is checked before tokenization.
    """
    if engine.tokenizer is None:
        raise ValueError("chat() needs a tokenizer, and this engine has none")
    check_bool("allow_special_tokens", allow_special_tokens)
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages={shown(messages)} must be a list of messages, at least one")
    conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        if not isinstance(conversation, (list, tuple)):
            raise ValueError(f"a conversation is a list of messages, not {shown(conversation)}")
    return [
        _prompt_of(engine, conversation, template_arguments, allow_special_tokens, content_as_text)
        for conversation in conversations
    ]


def _with_parts(message: Any) -> Any:
    """Return the message with its content as a list of text parts; None has no parts."""
    if not isinstance(message, Mapping) or "content" not in message:
        return message
    content = message["content"]
    if content is None:
        return {**message, "content": []}
    parts = content if isinstance(content, (list, tuple)) else [content]
    text = [{"type": "text", "text": _text_of_part(part)} for part in parts]
    return {**message, "content": text}


def _with_text(message: Any) -> Any:
    """Return the message with its content joined into one string."""
    return {**message, "content": text_of(message["content"])} if _has_no_text(message) else message


def _has_no_text(message: Any) -> bool:
    """Return True if the content is a list of parts, or None as in messages with tool calls."""
    if not isinstance(message, Mapping) or "content" not in message:
        return False
    return message["content"] is None or isinstance(message["content"], (list, tuple))


def text_of(content: Any) -> str:
    """Return the text of a content: the string, or its text parts joined by newlines (as vLLM).

    None has an empty text. Raises `ValueError` for parts that are not text.
    """
    if content is None:
        return ""
    if isinstance(content, Mapping):
        raise ValueError(
            f"messages: content={shown(content)} must be a string or a list of parts, such as "
            f"[{{'type': 'text', 'text': ...}}]"
        )
    parts = content if isinstance(content, (list, tuple)) else [content]
    return "\n".join(map(_text_of_part, parts))


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        kind = type(part).__name__
        raise ValueError(
            f"messages: content must be a string or a list of text parts; it is or has a {kind}"
        )
    kind = part.get("type", "text")
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise ValueError(
            f"messages: content has a part of type {kind!r:.50}, and this model reads only text"
        )
    text = part.get(field)
    if text is None and field in part:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"messages: a part of type {kind!r} must have a string as {field!r}")
    return text


def _prompt_of(
    engine: ChatEngine,
    conversation: AbstractSequence[Message],
    arguments: dict[str, Any],
    allow_special_tokens: bool,
    content_as_text: bool,
) -> dict[str, Any]:
    tokenizer: Tokenizer = engine.tokenizer
    conversation = [with_objects(message) for message in conversation]
    limit, specials = engine.input_processor.text_limit, tokenizer.special_tokens
    most = limit.most_characters(is_ascii=False)
    from_outside = [conversation, arguments.get("tools"), arguments.get("documents")]
    most = most and max(most, _MOST_CHARACTERS)
    texts, is_whole = _texts_in(from_outside, most)
    if not is_whole:
        raise limit.error(None, f"The prompt is too long: it has more than {most} characters.")
    convert = _with_text if content_as_text else _with_parts
    conversation = [convert(message) for message in conversation]
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
            "the chat template turns text of these messages into special tokens; set "
            "allow_special_tokens=True to allow that"
        )
    token_ids = tokenizer.encode_marked(text, marks)
    return {"prompt": marks.remove(text), "prompt_token_ids": token_ids}


def _texts_in(value: Any, most: int | None) -> tuple[list[str], bool]:
    """Return all strings in nested lists and dictionaries, including keys.

    The second value is False if together they are longer than `most`. Raises `ValueError` for other
    types, which could contain strings that this would miss.
    """
    texts, size, waiting = [], 0, [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if isinstance(part, str):
            texts.append(part)
        if isinstance(part, (str, Mapping, list, tuple)):
            size += len(part)
        elif not isinstance(part, (int, float, np.number, NoneType, *_FUNCTIONS)):
            raise ValueError(
                f"{shown(part)} in messages is not a string, number, list or dictionary"
            )
        if most is not None and size > most:
            return texts, False
        if depth > _DEEPEST:
            raise ValueError(
                f"lists and dictionaries in messages may be nested at most {_DEEPEST} deep"
            )
        if isinstance(part, Mapping):
            waiting += [(inner, depth + 1) for item in part.items() for inner in item]
        elif isinstance(part, (list, tuple)):
            waiting += [(inner, depth + 1) for inner in part]
    return texts, True
