"""Replicas of a model that pools: embeddings and ranks are those of one engine."""

import math

import pytest

pytest.importorskip("ray.serve", reason="needs the extra nanoserve[ray]")
pytest.importorskip("fastapi", reason="needs the extra nanoserve[serve]")

from ray_server import ray_server

from nanoserve import LLM

pytestmark = pytest.mark.size("full")
TEXTS = [f"What is a KV cache, number {i}?" for i in range(12)]


def test_replicas_pool_as_one_engine_does() -> None:
    with LLM("tiny-qwen3", runner="pooling", dtype="float32", num_kv_blocks=500) as llm:
        expected = [each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)]
    with ray_server("-dp", "2", "--runner", "pooling") as server:
        answer = server.post("/v1/embeddings", input=TEXTS)
        for entry, own in zip(answer["data"], expected, strict=True):
            assert math.dist(entry["embedding"], own) < 1e-5
        ranks = server.post("/rerank", query=TEXTS[3], documents=TEXTS, top_n=1)["results"]
        assert [rank["index"] for rank in ranks] == [3]
