"""Readers of quantized checkpoint formats. All convert to one canonical form."""
