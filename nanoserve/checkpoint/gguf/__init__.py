"""GGUF, the files of llama.cpp: model, settings and tokenizer in one."""
