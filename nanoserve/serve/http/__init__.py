"""The OpenAI-compatible server and its web page."""
