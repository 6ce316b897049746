"""Embeddings, classes and scores instead of text: `LLM(model, runner="pooling")`."""
