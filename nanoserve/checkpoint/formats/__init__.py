"""Readers of quantised checkpoint formats; all convert to one canonical form."""
