"""The small real model that ships with the package, and everything it was made from.

``tiny-qwen3`` is a Qwen3 checkpoint of about 5.5 MB that runs at once, without a download. It
answers what the terms of the course mean, word for word as in ``glossary.json``, and adds two
numbers below 100. A model with known answers is an oracle: if the engine breaks, the text breaks.

Beside it lie two that guess what it will say, for speculative decoding: ``draft/``, a Qwen3 of one
layer, and ``head.safetensors``, a head on its hidden states. ``acceptance.py`` says how often they
are right.
"""

# The folders of checkpoints that are known by name.
BUNDLED = {"tiny-qwen3": "checkpoint", "tiny-qwen3-draft": "draft"}
