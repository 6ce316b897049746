"""Quantized weights: a canonical form, readers of checkpoint formats, and linear methods."""
