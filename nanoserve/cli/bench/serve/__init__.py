"""`nanoserve bench --url`: what a client sees of a server that speaks OpenAI's protocol."""
