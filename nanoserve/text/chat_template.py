"""Loads a chat template that replaces the checkpoint's, from a file or a string."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanoserve.utils.checks import require, shown

_LONGEST_PATH = 4096
_LARGEST_FILE = 2**20  # bytes; models' templates have a few thousand


def load_chat_template(
    given: Any, has_tokenizer: bool = True, must_show_messages: bool = True
) -> str:
    """Return a Jinja template as a string; `given` is a file name or the template, as in vLLM.

    A file may be JSON with the template as "chat_template", as in checkpoints. Raises `ValueError`
    if `given` is neither a file nor a template, is not valid Jinja or does not use `messages`.
    `must_show_messages`: False for a template that need not use them.
    """
    require(
        has_tokenizer,
        f"chat_template={_shown(given)} needs a tokenizer: remove skip_tokenizer_init=True",
    )
    is_path = isinstance(given, str | Path)
    require(is_path, f"chat_template={_shown(given)} must be a file or a template string")
    text = str(given)
    path = Path(text)
    if _is_file(path):
        text = _text_of(path)
    else:
        may_be_text = "{" in text or "\n" in text or len(text) >= _LONGEST_PATH
        is_text = isinstance(given, str) and may_be_text
        require(
            is_text,
            f"chat_template={_shown(given)} is neither a file nor a template",
        )
    check_template(text)
    is_good = "messages" in text or not must_show_messages
    require(is_good, f"chat_template={_shown(given)} does not use the variable `messages`")
    return text


def _shown(given: Any) -> str:
    return shown(given[:100] if isinstance(given, str) else given)


def _is_file(path: Path) -> bool:
    try:
        return len(str(path)) < _LONGEST_PATH and path.is_file()
    except (OSError, ValueError):  # not a valid file name
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
            raise ValueError(
                f"{path} is not a JSON object with a chat_template: {error!r}"
            ) from error
        require(isinstance(text, str), f"{path}: chat_template={shown(text)} must be one string")
    return text


@lru_cache(16)
def check_template(text: str) -> None:
    """Raise `ValueError` for a template that is not valid Jinja."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([[]], chat_template=text)
    except Exception as error:
        if type(error).__name__ != "TemplateSyntaxError":  # jinja2's
            return  # a valid template may reject an empty conversation
        line = getattr(error, "lineno", "?")
        raise ValueError(f"chat_template is not valid Jinja: {error} (line {line})") from error
