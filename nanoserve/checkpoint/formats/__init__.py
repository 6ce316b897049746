"""Readers of quantized checkpoint formats; all convert to one canonical form."""
