"""Layers of the models: parallel linears and embeddings, norm, rotary embedding, activation."""
