"""How the bundled model was made: its corpus, its training, its evaluation.

``tiny-qwen3`` is a Qwen3 checkpoint of about 5.5 MB that runs at once, without a download. It
answers what the terms of the course mean, word for word as in ``glossary.json``, and adds two
numbers below 100. A model with known answers is an oracle: if the engine breaks, the text breaks.

Beside it lie two that propose draft tokens for speculative decoding: ``draft/``, a Qwen3 of one
layer, and ``head.safetensors``, a head on its hidden states. ``acceptance.py`` measures how often
their draft tokens are accepted. All files are in ``nanoserve/checkpoint/tiny_qwen3``.
"""
