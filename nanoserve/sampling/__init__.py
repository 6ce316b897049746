"""Sampling: from logits to tokens, for a whole batch at once."""
