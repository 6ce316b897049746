"""Saves a conversation in the format of the page's export, so that the page can import it."""

import json
import time
from pathlib import Path
from typing import Any

from nanoserve.cli.chat.backend import Messages

_LONGEST_TITLE = 60


def save(path: Path, conversation_id: str, messages: Messages, extra: dict[str, Any]) -> None:
    """Write questions and answers to a file. Each message names the one before it as `parent`.

    extra: members of the conversation that the page does not read, such as the model.
    """
    tree: list[dict[str, Any]] = [
        {**message, "id": number + 1, "parent": number or None}
        for number, message in enumerate(messages)
    ]
    for message in tree[1::2]:
        message["state"] = "done"
    first = messages[0]["content"] if messages else "New conversation"
    conversation = {
        "id": conversation_id,
        "title": " ".join(first.split())[:_LONGEST_TITLE],
        "isNamed": False,
        "changed": int(1000 * time.time()),
        "messages": tree,
        "leaf": len(tree) or None,
    }
    exported = {"format": "nanoserve.conversations", "version": 1}
    content = {**exported, "conversations": [conversation | extra]}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
