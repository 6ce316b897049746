"""One server for the tests of a module that need nothing special of it."""

import pytest
from serving import served

from nanoserve.serve.async_llm import AsyncLLM

OPTIONS = {"dtype": "float32", "max_num_seqs": 32, "num_kv_blocks": 1000, "max_model_len": 1024}


@pytest.fixture(scope="module")
def server_llm():
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(server_llm):
    pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
    with served(server_llm) as one:
        yield one
