"""Quantization schemes, and the linear methods that multiply quantized weights."""
