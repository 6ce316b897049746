"""`nanoserve bench --url`: measure a server with OpenAI's protocol as its clients see it."""
