"""Samples tokens from logits, for a whole batch at once."""
