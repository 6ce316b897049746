"""Find checkpoints by name, read their configuration (`config.json`), and load their weights."""
