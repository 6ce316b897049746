"""GGUF, the file format of llama.cpp: weights, settings and tokenizer in one file."""
