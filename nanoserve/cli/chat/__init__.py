"""`nanoserve chat` is a conversation in the terminal with a local model or a server."""
