"""Serving one engine to many clients: `AsyncLLM` in a program, `nanoserve serve` over HTTP.

engine_thread.py   owns the engine: executes commands, steps, posts new tokens and outputs
token_feed.py      converts new tokens to text in the reading task instead of the engine's thread
async_llm.py       delivers to each task the outputs of its own requests
app.py             OpenAI's endpoints; the other files support them
"""
