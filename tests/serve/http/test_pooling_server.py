"""A model that pools behind HTTP: OpenAI's, Jina's and vLLM's formats, and what is refused."""

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from serving import Served, ask, served, wait_until
from tiny_checkpoints import make_checkpoint

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

from nanoserve import LLM, AsyncLLM, PoolingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.serve.http.api_docs import BODIES, openapi

OPTIONS: dict[str, Any] = {
    "runner": "pooling",
    "dtype": "float32",
    "max_num_seqs": 8,
    "num_kv_blocks": 300,
    "max_model_len": 512,
}
TEXTS = ["What is a KV cache?", "hello", "What is a block table?"]


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    with LLM("tiny-qwen3", **OPTIONS) as llm:
        return [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]


IN_PROCESS = pytest.param(True, marks=pytest.mark.size("full"), id="process")


@pytest.fixture(scope="module", params=[pytest.param(False, id="thread"), IN_PROCESS])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    llm = AsyncLLM("tiny-qwen3", engine_process=request.param, **OPTIONS)
    with served(llm, max_prompts=20) as one:
        yield one
    llm.shutdown()


def embed(server: Served, **body: Any) -> dict[str, Any]:
    status, _, answer = ask(server, "/v1/embeddings", {"model": "tiny", "input": TEXTS} | body)
    assert status == 200, answer
    return answer


def test_embeddings_are_those_of_the_library(server: Served, expected: list[list[float]]) -> None:
    answer = embed(server, user="somebody", encoding_format="float")
    assert answer["object"] == "list" and answer["model"] == "tiny"
    assert answer["id"].startswith("embd-")
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    assert {each["object"] for each in answer["data"]} == {"embedding"}
    found = [each["embedding"] for each in answer["data"]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"] > 10


def test_base64_has_the_same_bits(server: Served) -> None:
    plain, coded = embed(server), embed(server, encoding_format="base64")
    for each, other in zip(plain["data"], coded["data"], strict=True):
        vector = np.frombuffer(base64.b64decode(other["embedding"]), dtype="<f4")
        assert vector.tolist() == each["embedding"]


def test_token_ids_one_text_and_fewer_dimensions(
    server: Served, expected: list[list[float]]
) -> None:
    status, _, tokens = ask(server, "/tokenize", {"prompt": TEXTS[0]})
    assert status == 200
    ids = tokens["tokens"]
    for given in (ids, [ids], [float(i) for i in ids], TEXTS[0]):
        (only,) = embed(server, input=given)["data"]
        np.testing.assert_allclose(only["embedding"], expected[0], atol=1e-6)
    (cut,) = embed(server, input=ids, dimensions=5)["data"]
    first = np.array(expected[0][:5])
    np.testing.assert_allclose(cut["embedding"], first / np.linalg.norm(first), atol=1e-6)
    (raw,) = embed(server, input=ids, normalize=False)["data"]
    assert np.linalg.norm(raw["embedding"]) > 1.5


def test_texts_are_truncated_only_if_that_is_asked_for(server: Served) -> None:
    long = "block " * 1000
    status, _, answer = ask(server, "/v1/embeddings", {"input": ["a", long]})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["param"] == "input" and "truncate_prompt_tokens" in str(answer)
    assert embed(server, input=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 512
    assert embed(server, input=long, truncate_prompt_tokens=7)["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_back_by_their_relevance(
    server: Served, path: str, expected: list[list[float]]
) -> None:
    documents = [*TEXTS, {"text": TEXTS[0]}]
    body = {"query": TEXTS[0], "documents": documents, "top_n": 3}
    status, _, answer = ask(server, path, body)
    assert status == 200 and answer["id"].startswith("rerank-")
    first, second, third = answer["results"]
    assert (first["index"], second["index"]) == (0, 3) and third["index"] in (1, 2)
    assert first["document"] == {"text": TEXTS[0]}
    cosine = np.dot(expected[0], expected[third["index"]])
    assert abs(third["relevance_score"] - cosine) < 1e-5
    assert abs(first["relevance_score"] - 1) < 1e-5
    status, _, answer = ask(server, path, body | {"return_documents": False})
    assert all("document" not in result for result in answer["results"])


def test_pairs_are_scored(server: Served, expected: list[list[float]]) -> None:
    for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
        body = dict(zip(names, (TEXTS[0], TEXTS), strict=True))
        for path in ("/score", "/v1/score"):
            status, _, answer = ask(server, path, body)
            assert status == 200 and answer["data"][0]["object"] == "score"
            found = [each["score"] for each in answer["data"]]
            np.testing.assert_allclose(found, np.dot(expected, expected[0]), atol=1e-5)


def test_tokens_are_pooled_one_by_one(server: Served, expected: list[list[float]]) -> None:
    body = {"input": TEXTS, "task": "token_embed"}
    status, _, answer = ask(server, "/pooling", body)
    assert status == 200 and answer["id"].startswith("pool-")
    for each, vector in zip(answer["data"], expected, strict=True):
        np.testing.assert_allclose(each["data"][-1], vector, atol=1e-6)
    status, _, answer = ask(server, "/pooling", body | {"task": None, "pooling_type": "MEAN"})
    assert len(answer["data"][0]["data"]) == len(expected[0])


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/v1/embeddings", {}, "input", "Field required"),
    ("/v1/embeddings", {"input": []}, "input", "0 texts; it must have 1 to 20"),
    ("/v1/embeddings", {"input": ["a"] * 21}, "input", "21 texts; it must have 1 to 20"),
    ("/v1/embeddings", {"input": ""}, None, "no token to pool"),
    ("/v1/embeddings", {"input": [[]]}, None, "no token to pool"),
    ("/v1/embeddings", {"input": [1, 10**6]}, None, "1000000 is not an integer in [0, "),
    ("/v1/embeddings", {"input": {"text": "a"}}, "input", "valid"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "dimensions=0"),
    ("/v1/embeddings", {"input": "a", "dimensions": 10**6}, "dimensions", "at most the model's"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "'base64'"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "int8"}, "embed_dtype", "float32"),
    ("/v1/embeddings", {"input": "a", "input_type": "query"}, "input_type", "instruction"),
    ("/v1/embeddings", {"input": "a", "messages": [{}]}, "messages", "/tokenize"),
    ("/v1/embeddings", {"input": "a", "truncation_side": "left"}, "truncation_side", "'right'"),
    ("/v1/embeddings", {"input": "a", "priority": 1}, None, "scheduling_policy"),
    ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "does not exist"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 513}, None, "exceeds max_model"),
    ("/pooling", {"input": "a", "task": "plugin"}, "task", "'token_embed'"),
    ("/pooling", {"input": "a", "task": "embed", "pooling_type": "ALL"}, None, "token_embed"),
    ("/pooling", {"input": "a", "pooling_type": "STEP"}, "pooling_type", "'STEP'"),
    ("/classify", {"input": "a"}, "task", "supports 'embed'"),
    ("/score", {"text_1": "a"}, "text_2", "missing"),
    ("/score", {"text_1": "a", "text_2": "b", "documents": "c"}, "text_2", "the same field"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, None, "2 texts cannot be paired"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "0 texts"),
    ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents", "documents[0]"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "at least 1"),
    ("/rerank", {"query": "a", "documents": ["b"], "raw_scores": True}, "raw_scores", "activation"),
    ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, None, "by itself"),
    ("/v1/completions", {"prompt": "a"}, None, "runner='pooling'"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None, "pools"),
]


@pytest.mark.parametrize(("path", "body", "param", "told"), REFUSED, ids=str)
def test_what_cannot_be_is_refused_by_name(
    server: Served, path: str, body: dict[str, Any], param: str | None, told: str
) -> None:
    status, _, answer = ask(server, path, body)
    assert status in (400, 404), answer
    assert told in answer["error"]["message"]
    assert param is None or answer["error"]["param"] == param


def test_a_text_that_cannot_fit_is_not_tokenized(server: Served) -> None:
    for extra in ({}, {"add_special_tokens": False}):
        status, _, answer = ask(server, "/v1/embeddings", {"input": "a" * 100_000} | extra)
        assert status == 400 and "it has 100000 characters" in answer["error"]["message"]


def test_nothing_is_left_when_a_client_goes(expected: list[list[float]]) -> None:
    llm = AsyncLLM("tiny-qwen3", **OPTIONS | {"max_num_batched_tokens": 8})
    with served(llm) as server:

        async def leave() -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            body = json.dumps({"input": ["block " * 300] * 40}).encode()
            head = f"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            await writer.drain()
            while not llm.engine.scheduler.running:
                await asyncio.sleep(0.01)
            writer.close()

        asyncio.run(leave())
        server.wait_until_idle()
        (answer,) = embed(server, input=TEXTS[0])["data"]
        np.testing.assert_allclose(answer["embedding"], expected[0], atol=1e-6)
    llm.shutdown()


def test_many_numbers_are_all_written(server: Served) -> None:
    """The response of a large request is encoded in a thread, part by part."""
    answer = embed(server, input=["a block of tokens " * 5 + str(i) for i in range(20)])
    lengths = {len(each["embedding"]) for each in answer["data"]}
    assert len(answer["data"]) == 20 and len(lengths) == 1
    body = {"input": ["token " * 100] * 2, "task": "token_embed"}
    status, _, answer = ask(server, "/pooling", body)
    lengths = [len(each["data"]) for each in answer["data"]]
    assert status == 200 and sum(lengths) == answer["usage"]["prompt_tokens"] >= 200


def test_classes_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    names = {0: "bad", 1: "so-so", 2: "good"}
    make_checkpoint(
        transformers.Qwen3ForSequenceClassification,
        tmp_path,
        vocab_size=2048,
        id2label=names,
        label2id={name: i for i, name in names.items()},
    )
    tokenizer = str(bundled_checkpoint("tiny-qwen3"))
    llm = AsyncLLM(str(tmp_path), tokenizer=tokenizer, num_kv_blocks=50, max_model_len=256)
    with served(llm) as server:
        status, _, answer = ask(server, "/classify", {"input": TEXTS})
        assert status == 200 and answer["id"].startswith("classify-")
        for index, each in enumerate(answer["data"]):
            assert each["index"] == index and each["num_classes"] == len(each["probs"]) == 3
            assert abs(sum(each["probs"]) - 1) < 1e-6
            assert each["label"] == names[int(np.argmax(each["probs"]))]
        status, _, answer = ask(server, "/v1/embeddings", {"input": "a"})
        assert status == 400 and "supports 'classify'" in answer["error"]["message"]
        status, _, answer = ask(server, "/rerank", {"query": "a", "documents": ["b"]})
        assert status == 400 and "3 classes" in answer["error"]["message"]
    llm.shutdown()


def test_the_schema_has_the_endpoints_and_their_fields(server: Served) -> None:
    described = openapi(server.api.app)
    adapters = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}  # see test_lora_server
    for path, body in ((path, body) for path, body in BODIES.items() if path not in adapters):
        operation = described["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{body.__name__}"}
        known = described["components"]["schemas"][body.__name__]["properties"]
        assert known.keys() == body.model_fields.keys() and operation["summary"].endswith(".")


def test_async_results_are_those_of_the_library(expected: list[list[float]]) -> None:
    async def run() -> None:
        async with AsyncLLM("tiny-qwen3", **OPTIONS | {"max_num_batched_tokens": 8}) as llm:

            async def one(text: str) -> np.ndarray:
                (output,) = [output async for output in llm.encode(text)]
                assert output.finished
                return output.outputs.data.numpy()

            found = await asyncio.gather(*map(one, TEXTS))
            np.testing.assert_allclose(found, expected, atol=1e-6)
            task = asyncio.create_task(one("block " * 400))
            while not llm.engine.scheduler.running:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until, lambda: not llm.engine.has_unfinished_requests())
            with pytest.raises(ValueError, match="dimensions=193"):
                [_ async for _ in llm.encode("a", PoolingParams(dimensions=193))]
            with pytest.raises(ValueError, match="runner='pooling'"):
                [_ async for _ in llm.generate("a")]

    asyncio.run(run())


def test_openais_client_embeds(server: Served, expected: list[list[float]]) -> None:
    """It asks for base64 unless told otherwise, and decodes it."""
    openai = pytest.importorskip("openai", reason="pip install openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for options in ({}, {"encoding_format": "float"}, {"user": "me"}):
        answer = client.embeddings.create(model="tiny", input=TEXTS, **options)
        np.testing.assert_allclose([one.embedding for one in answer.data], expected, atol=1e-6)
    answer = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8)
    assert len(answer.data[0].embedding) == 8 and answer.usage.total_tokens > 3
    with pytest.raises(openai.BadRequestError, match="dimensions=4096"):
        client.embeddings.create(model="tiny", input="a", dimensions=4096)


def test_langchain_finds_the_nearest_text(server: Served) -> None:
    """A small retrieval loop; its tokens are not the model's, so it has to send texts."""
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    from langchain_core.vectorstores import InMemoryVectorStore

    made = langchain.OpenAIEmbeddings(
        model="tiny",
        base_url=f"{server.url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
    )
    store = InMemoryVectorStore.from_texts([f"{text} {i}" for i, text in enumerate(TEXTS)], made)
    (found,) = store.similarity_search(f"{TEXTS[1]} 1", k=1)
    assert found.page_content == f"{TEXTS[1]} 1"


def test_llama_index_finds_the_nearest_text(server: Served) -> None:
    pytest.importorskip("llama_index.core", reason="pip install llama-index-core")
    like: Any = pytest.importorskip(
        "llama_index.embeddings.openai_like",
        reason="pip install llama-index-embeddings-openai-like",
    )
    from llama_index.core import Document, VectorStoreIndex

    made = like.OpenAILikeEmbedding(
        model_name="tiny", api_base=f"{server.url}/v1", api_key="x", max_retries=0
    )
    texts = [f"{text} {i}" for i, text in enumerate(TEXTS)]
    index = VectorStoreIndex.from_documents([Document(text=t) for t in texts], embed_model=made)
    for text in texts:
        (found,) = index.as_retriever(similarity_top_k=1).retrieve(text)
        assert found.text == text and found.score == pytest.approx(1, abs=1e-5)


def test_coheres_client_reranks(server: Served) -> None:
    """Both of its versions, which use /v1/rerank and /v2/rerank."""
    cohere = pytest.importorskip("cohere", reason="pip install cohere")
    for kind in (cohere.Client, cohere.ClientV2):
        client = kind(api_key="none", base_url=server.url)
        answer = client.rerank(model="tiny", query=TEXTS[0], documents=TEXTS, top_n=2)
        assert answer.results[0].index == 0 and len(answer.results) == 2
        assert abs(answer.results[0].relevance_score - 1) < 1e-5
