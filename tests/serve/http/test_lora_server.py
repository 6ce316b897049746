"""Adapters of a server: the `model` of a request names one; clients load and unload them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import ALL, write_adapter, write_files

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from serving import Served, ask, served
from transformers import AutoModelForCausalLM

from nanoserve import LoRARequest, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.http import lora
from nanoserve.serve.http.api_docs import BODIES, openapi
from nanoserve.serve.http.app import ApiServer
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.lora import UnloadAdapterBody, parse_module
from nanoserve.serve.http.settings import ServerSettings

OPTIONS: dict[str, Any] = {
    **{"dtype": "float32", "num_kv_blocks": 200, "enable_lora": True, "max_loras": 2},
    **{"max_lora_rank": 8, "max_cpu_loras": 3, "attention_backend": "torch"},
}
PROMPT = {"prompt": "What is a KV cache?", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    folder = bundled_checkpoint("tiny-qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for seed, name in enumerate(("one", "two", "three", "outside/four")):
        inside = root / "root" / name if "/" not in name else root / name
        write_adapter(model, inside, seed, ALL, 4, size=0.2)
    write_files(root / "root" / "broken", {"model.x.lora_A": torch.ones(2, 2)}, {"r": 2})
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    inside = root / "root"
    modules = [f"one={inside / 'one'}"]
    modules += [json.dumps({"name": "two", "path": str(inside / "two"), "base_model_name": "b"})]
    settings = {"lora_modules": modules, "lora_root": str(inside)}
    settings |= {"served_model_name": ["tiny-qwen3"]}
    with served(AsyncLLM("tiny-qwen3", **OPTIONS), **settings) as server:
        yield server


def text(server: Served, model: str | None) -> str:
    status, _, answer = ask(server, "/v1/completions", {**PROMPT, "model": model})
    assert status == 200, answer
    assert answer["model"] == (model or "tiny-qwen3")
    return answer["choices"][0]["text"]


def models(server: Served) -> dict[str, Any]:
    _, _, answer = ask(server, "/v1/models", b"", method="GET")
    return {entry["id"]: entry for entry in answer["data"]}


def test_the_model_of_a_request_names_its_adapter(server: Served, root: Path) -> None:
    texts = {name: text(server, name) for name in (None, "tiny-qwen3", "one", "two")}
    assert texts[None] == texts["tiny-qwen3"] and len(set(texts.values())) == 3
    listed = models(server)
    assert [*listed] == ["tiny-qwen3", "one", "two"]
    assert listed["tiny-qwen3"]["parent"] is None
    assert (listed["one"]["parent"], listed["two"]["parent"]) == ("tiny-qwen3", "b")
    assert listed["one"]["root"] == str(root / "root" / "one")
    body = {"model": "one", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    status, _, answer = ask(server, "/v1/chat/completions", {**body, "temperature": 0})
    assert status == 200 and answer["model"] == "one"
    _, _, other = ask(server, "/v1/chat/completions", {**body, "model": "two", "temperature": 0})
    assert answer["choices"] != other["choices"]
    server.wait_until_idle()


def test_the_schema_has_the_endpoints_and_their_fields(server: Served) -> None:
    described = openapi(server.api.app)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body, operation = BODIES[path], described["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{body.__name__}"}
        known = described["components"]["schemas"][body.__name__]["properties"]
        assert known.keys() == body.model_fields.keys() and operation["summary"].endswith(".")


def test_clients_load_replace_and_unload_adapters(server: Served, root: Path) -> None:
    own = {"lora_name": "new", "lora_path": str(root / "root" / "three")}
    assert ask(server, "/v1/completions", {**PROMPT, "model": "new"})[0] == 404
    status, _, answer = ask(server, "/v1/load_lora_adapter", own)
    assert (status, answer) == (200, b"Success: LoRA adapter 'new' added successfully.")
    first = text(server, "new")
    status, _, answer = ask(server, "/v1/load_lora_adapter", own)
    assert status == 400 and "lora_name='new' is in use" in answer["error"]["message"]
    other = own | {"lora_path": str(root / "root" / "two"), "load_inplace": True}
    assert ask(server, "/v1/load_lora_adapter", other)[0] == 200
    assert text(server, "new") == text(server, "two") != first
    assert ask(server, "/v1/unload_lora_adapter", {"lora_name": "new"})[0] == 200
    assert ask(server, "/v1/unload_lora_adapter", {"lora_name": "new"})[0] == 404
    assert ask(server, "/v1/completions", {**PROMPT, "model": "new"})[0] == 404
    assert [*models(server)] == ["tiny-qwen3", "one", "two"]


def test_what_clients_may_not_load(server: Served, root: Path) -> None:
    inside = root / "root"
    for path, told in (
        (root / "outside" / "four", "is not inside of"),
        (inside / ".." / "outside" / "four", "is not inside of"),
        ("/etc", "is not inside of"),
        (inside / "nowhere", "is not a folder"),
        (inside / "broken", "lora_A"),
    ):
        body = {"lora_name": "bad", "lora_path": str(path)}
        status, _, answer = ask(server, "/v1/load_lora_adapter", body)
        is_missing = path == inside / "nowhere"
        assert status == (404 if is_missing else 400), answer
        assert told in answer["error"]["message"], answer
    for body, told in (
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": 5, "lora_path": "y"}, "lora_name"),
        ({"lora_name": "", "lora_path": str(inside / "three")}, "lora_name"),
        ({"lora_name": "x" * 257, "lora_path": str(inside / "three")}, "257 characters"),
        ({"lora_name": "tiny-qwen3", "lora_path": str(inside / "three")}, "is in use"),
        ({"lora_name": "x", "lora_path": "y", "rank": 4}, "'rank' is not a field"),
    ):
        status, _, answer = ask(server, "/v1/load_lora_adapter", body)
        assert status == 400 and told in answer["error"]["message"], answer
    assert ask(server, "/v1/unload_lora_adapter", {"lora_name": "tiny-qwen3"})[0] == 404
    assert [*models(server)] == ["tiny-qwen3", "one", "two"]


def test_an_adapter_that_breaks_later_fails_its_requests(server: Served, root: Path) -> None:
    folder = root / "root" / "fragile"
    parts = root / "root" / "three"
    folder.mkdir()
    for file in parts.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    own = {"lora_name": "fragile", "lora_path": str(folder)}
    assert ask(server, "/v1/load_lora_adapter", own)[0] == 200
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    status, _, answer = ask(server, "/v1/completions", {**PROMPT, "model": "fragile"})
    assert status in (400, 500) and "adapter_model.safetensors" in answer["error"]["message"]
    assert text(server, "one")
    assert ask(server, "/v1/unload_lora_adapter", {"lora_name": "fragile"})[0] == 200
    server.wait_until_idle()


def test_there_are_only_so_many_names(
    server: Served, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "_MOST_NAMES", 2)
    body = {"lora_name": "three", "lora_path": str(root / "root" / "three")}
    status, _, answer = ask(server, "/v1/load_lora_adapter", body)
    assert status == 400 and "2 adapters have a name" in answer["error"]["message"]
    body = {"lora_name": "two", "lora_path": str(root / "root" / "two"), "load_inplace": True}
    assert ask(server, "/v1/load_lora_adapter", body)[0] == 200


def test_without_a_root_nothing_can_be_loaded(root: Path) -> None:
    module = f"one={root / 'root' / 'one'}"
    with served(
        AsyncLLM("tiny-qwen3", **OPTIONS), lora_modules=[module], served_model_name=["tiny-qwen3"]
    ) as server:
        body = {"lora_name": "two", "lora_path": str(root / "root" / "two")}
        status, _, answer = ask(server, "/v1/load_lora_adapter", body)
        assert status == 400 and "--lora-root" in answer["error"]["message"]
        assert text(server, "one") != text(server, None)


@pytest.mark.parametrize(
    ("options", "settings", "told"),
    [
        ({}, {"lora_modules": ["x=/nowhere"]}, "is not a folder"),
        ({}, {"lora_modules": ["tiny-qwen3=/nowhere"]}, "is in use"),
        ({"enable_lora": False}, {"lora_modules": ["x=y"]}, "needs enable_lora=True"),
        ({"enable_lora": False}, {"lora_root": "."}, "needs enable_lora=True"),
    ],
    ids=str,
)
def test_wrong_settings(options: dict[str, Any], settings: dict[str, Any], told: str) -> None:
    own = OPTIONS if options == {} else {"num_kv_blocks": 50}
    llm = AsyncLLM("tiny-qwen3", **own)
    try:
        with pytest.raises(ValueError, match=told):
            ApiServer(llm, ServerSettings(**settings))
    finally:
        llm.shutdown()


def test_an_adapter_that_is_unloaded_while_a_request_is_tokenized(root: Path) -> None:
    """The model itself must not answer in its place."""
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)
    try:
        api = ApiServer(llm, ServerSettings(lora_modules=[f"one={root / 'root' / 'one'}"]))
        request = llm.engine.input_processor.process("id", "Hi")
        api.bodies.check_model("one")
        api.adapters.unload(UnloadAdapterBody(lora_name="one"))
        with pytest.raises(ApiError, match="'one' is unloaded") as raised:
            api.note_arrival([request], 0.0, None, "one")
        assert raised.value.status == 404
        api.note_arrival([request], 0.0, None, "tiny-qwen3")
    finally:
        llm.shutdown()


def test_modules_are_pairs_or_json() -> None:
    assert parse_module("a=b=c") == ("a", "b=c", None)
    assert parse_module('{"name": "a", "path": "b"}') == ("a", "b", None)
    for wrong in ("a", "=b", "a=", "{", '{"name": "a"}', '{"name": 1, "path": "b"}', '{"x": "y"}'):
        with pytest.raises(ValueError, match="lora_modules"):
            parse_module(wrong)
    with pytest.raises(ValueError, match="lora_root"):
        ServerSettings(lora_root="/nowhere/at/all")


@pytest.mark.size("full")
def test_an_engine_in_another_process(root: Path) -> None:
    """Requests carry their adapter there, and a broken one comes back as an error."""
    broken = str(root / "root" / "broken")
    one, bad = LoRARequest("one", 1, str(root / "root" / "one")), LoRARequest("bad", 2, broken)

    async def run() -> None:
        async with AsyncLLM("tiny-qwen3", engine_process=True, **OPTIONS) as llm:

            async def text_of(adapter: LoRARequest | None) -> str:
                params = SamplingParams(temperature=0, max_tokens=8)
                outputs = llm.generate("What is a KV cache?", params, lora_request=adapter)
                return [output.outputs[0].text async for output in outputs][-1]

            plain, adapted, again = await asyncio.gather(*map(text_of, (None, one, one)))
            assert plain != adapted == again
            with pytest.raises(ValueError, match=r"lora_request: .*lora_A"):
                await text_of(bad)
            assert await text_of(one) == adapted

    asyncio.run(run())
