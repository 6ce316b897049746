"""Text and token ids: tokenizer, chat templates, special tokens, detokenizer, stop strings."""
