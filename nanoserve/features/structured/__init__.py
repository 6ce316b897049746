"""Structured output uses grammars to constrain which tokens may come next."""
