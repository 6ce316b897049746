"""`nanoserve bench --url` measures an OpenAI-compatible server as its clients see it."""
