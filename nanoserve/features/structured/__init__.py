"""Structured output: grammars that constrain which tokens may come next."""
