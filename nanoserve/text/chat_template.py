"""Chat templates that users give in the place of the checkpoint's: a file, or the text itself."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanoserve.utils.checks import require, shown

_LONGEST_PATH = 4096
_LARGEST_FILE = 2**20  # bytes; those of models have some thousand


def load_chat_template(
    given: Any, has_tokenizer: bool = True, must_show_messages: bool = True
) -> str:
    """The text of a Jinja template. `given` names a file, or is that text, as for vLLM.

    A file may be JSON with the text as "chat_template", as checkpoints have it. Raises `ValueError`
    for what is neither a file nor a template, and for one that is no Jinja or shows no messages.
    `must_show_messages`: a template for all conversations has to.
    """
    require(has_tokenizer, f"chat_template={_shown(given)} needs a tokenizer: skip_tokenizer_init")
    is_path = isinstance(given, str | Path)
    require(is_path, f"chat_template={_shown(given)} must be a file, or the text of a template")
    text = str(given)
    path = Path(text)
    if _is_file(path):
        text = _text_of(path)
    else:
        may_be_text = "{" in text or "\n" in text or len(text) >= _LONGEST_PATH
        is_text = isinstance(given, str) and may_be_text
        require(is_text, f"chat_template={_shown(given)} is no file, and no text of a template")
    _check(text)
    is_good = "messages" in text or not must_show_messages
    require(is_good, f"chat_template={_shown(given)} does not show `messages`")
    return text


def _shown(given: Any) -> str:
    return shown(given[:100] if isinstance(given, str) else given)


def _is_file(path: Path) -> bool:
    try:
        return len(str(path)) < _LONGEST_PATH and path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _text_of(path: Path) -> str:
    try:
        require(path.stat().st_size <= _LARGEST_FILE, f"{path} has more than {_LARGEST_FILE} bytes")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template: {path} cannot be read: {error}") from error
    if path.suffix == ".json":
        try:
            text = json.loads(text)["chat_template"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is no JSON object with a chat_template: {error!r}") from error
        require(isinstance(text, str), f"{path}: chat_template={shown(text)} must be one text")
    return text


@lru_cache(16)
def _check(text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([[]], chat_template=text)
    except Exception as error:
        if type(error).__name__ != "TemplateSyntaxError":  # jinja2's
            return  # an empty conversation is none that it must know what to do with
        told = f"chat_template is no template that Jinja understands: {error}"
        line = getattr(error, "lineno", "?")
        raise ValueError(f"{told} (line {line})") from error
