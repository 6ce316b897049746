"""One engine for many clients: `AsyncLLM` in a program, `nanoserve serve` over HTTP.

engine_thread.py   owns the engine: takes orders, steps, posts what is new
token_feed.py      text is made of new tokens where it is read
async_llm.py       hands each task the outputs of its own requests
app.py             OpenAI's endpoints; the other files are what they need
"""
