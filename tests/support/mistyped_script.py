"""What type checkers must find: a mistake in each marked line, and nothing else."""
# ruff: noqa: F401

from nanoserve import LLM, NoSuchThing, SamplingParams  # wrong
from nanoserve.compat import NoSuchName  # wrong

llm = LLM("x", gpu_mem_utilization=0.5)  # wrong
LLM("x", max_num_seqs="8")  # wrong
SamplingParams(temprature=1)  # wrong
llm.chat([{"role": "user", "content": "x"}], max_tokens=5)  # wrong
llm.chat([{"role": "user", "content": "x"}], stream=True)  # wrong
llm.stream("x", temperature=0)  # wrong
SamplingParams(temperature=0.5, max_tokens=None)
