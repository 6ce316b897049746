"""Serving one engine to many clients: `AsyncLLM` in a program, `nanoserve serve` over HTTP.

engine_thread.py    owns the engine: executes commands, steps, posts new tokens and outputs
engine_process.py   the same from another process
token_stream.py     converts new tokens to text in the reading task instead of the engine's thread
response_stream.py  the outputs of one request, for the task that reads them
async_llm.py        delivers to each task the outputs of its own requests
http/               the OpenAI-compatible server, and its page
replicas/           several engines behind one server, on Ray Serve
batch/              files of requests in OpenAI's batch format
"""
