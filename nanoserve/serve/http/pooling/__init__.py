"""The endpoints of a model that pools: embeddings, classes, scores, ranks."""
