"""Checkpoints: look-up by name, configuration (`config.json`) and loading of weights."""
