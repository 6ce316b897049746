"""One engine for many clients: `AsyncLLM` in a program, `nanoserve serve` over HTTP.

engine_thread.py   owns the engine: takes orders, steps, posts outputs
async_llm.py       hands each task the outputs of its own requests
"""
