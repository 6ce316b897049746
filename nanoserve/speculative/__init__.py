"""Guesses at the next tokens, which the target then checks, several in one step."""
