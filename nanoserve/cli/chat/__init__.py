"""`nanoserve chat` is a conversation in the terminal with a local model or a server."""

from nanoserve.cli.chat.command import main

__all__ = ["main"]
