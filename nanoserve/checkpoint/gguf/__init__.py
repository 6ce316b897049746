"""GGUF is llama.cpp's file format, with weights, settings and tokenizer in one file."""
