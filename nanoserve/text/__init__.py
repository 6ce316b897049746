"""Converts between text and token ids: tokenizer, chat templates, detokenizer, stop strings."""
