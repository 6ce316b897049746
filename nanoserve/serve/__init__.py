"""Serve one engine to many clients, with `AsyncLLM` in a program or `nanoserve serve` over HTTP.

engine_thread.py    owns the engine, executes commands and steps, posts new tokens and outputs
engine_process.py   runs the engine thread in another process
token_stream.py     converts new tokens to text in the reading task instead of the engine's thread
response_stream.py  holds the outputs of some requests for the task that reads them
async_llm.py        delivers to each task the outputs of its own requests
http/               has the OpenAI-compatible server and its web page
replicas/           runs several engines for one server, on Ray Serve
batch/              answers files of requests in OpenAI's batch format
"""
