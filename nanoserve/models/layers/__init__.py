"""Layers that models share: parallel linears, embeddings, norms, rotary embedding, activation."""
