"""The layers that models are made of: parallel linears and embeddings, norm, rotary, activation."""
