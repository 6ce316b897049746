"""The server in front of replicas in this process: its metrics, its health, and its page."""

import asyncio
import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs the extra nanoserve[ray]")
pytest.importorskip("fastapi", reason="needs the extra nanoserve[serve]")

from browser_tab import Tab
from fake_serve import FakeServe
from ray_server import read_stream
from serving import Served, behind_http, wait_until

from nanoserve.features.parallel import heartbeat
from nanoserve.serve.engine_thread import EngineDeadError
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.serve.replicas import fleet_llm
from nanoserve.serve.replicas.fleet_llm import FleetLLM, FleetServer


class FleetServed(Served):
    """As `serving.served` has it, of a fleet."""

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def open(self, path: str, **body: object) -> Any:
        headers = {"content-type": "application/json"}
        content = json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(self.url + path, content, headers))


@pytest.fixture
def serve() -> Iterator[FakeServe]:
    serve = FakeServe()
    serve.start("a")
    serve.start("b")
    yield serve
    serve.close()


@pytest.fixture
def server(serve: FakeServe) -> Iterator[FleetServed]:
    llm = FleetLLM(serve)
    api = FleetServer(llm, ServerSettings(served_model_name=["tiny"]))
    wait_until(lambda: len(llm.owner.replicas) == 2)
    with behind_http(api) as one:
        yield FleetServed(one.url, api)
    llm.shutdown()


def test_metrics_of_all_and_health_of_any(serve: FakeServe, server: FleetServed) -> None:
    body = {"prompt": "A KV cache", "max_tokens": 5, "temperature": 0}
    for _ in range(2):
        assert read_stream(server, body).finish_reason == "length"
    told = server.get("/metrics")
    found = dict(
        re.findall(r'^vllm:generation_tokens_total\{replica="(\d)".*\} (\S+)$', told, re.M)
    )
    assert found.keys() == {"0", "1"} and sum(map(float, found.values())) == 10
    assert told.count("# TYPE vllm:generation_tokens_total") == 1
    serve.kill("a")
    wait_until(lambda: len(server.api.llm.owner.replicas) == 1)
    assert server.get("/health") == ""
    serve.kill("b")
    wait_until(lambda: not server.api.llm.owner.replicas)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        server.get("/health")
    assert server.get("/metrics") == ""
    serve.start("c")
    wait_until(lambda: len(server.api.llm.owner.replicas) == 1)
    assert server.get("/health") == ""


def test_a_replica_that_hangs_hides_nobodys_metrics_and_says_that_it_is_not_well(
    serve: FakeServe, server: FleetServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "IDLE_LIMIT", 1.0)
    monkeypatch.setattr(fleet_llm, "_SCRAPE_SECONDS", 0.5)
    goes_on = threading.Event()
    numbers = {name: number for number, name in server.api.llm.owner.replicas.items()}
    serve.replicas["b"]._thread.call(lambda engine: goes_on.wait(), lambda *told: None)
    try:
        told = server.get("/metrics")
        assert f'replica="{numbers["a"]}"' in told and f'replica="{numbers["b"]}"' not in told
        wait_until(lambda: serve.replicas["b"]._thread.stall is not None)
        with pytest.raises(EngineDeadError, match="computed nothing"):
            asyncio.run(serve.replicas["b"].check_health())  # so Serve replaces it
        asyncio.run(serve.replicas["a"].check_health())
        assert server.get("/health") == ""
    finally:
        goes_on.set()


def test_a_replica_that_is_not_there_cannot_be_watched(server: FleetServed) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        server.get("/live?replica=7")


def test_the_page_shows_the_replica_that_is_chosen(serve: FakeServe, server: FleetServed) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome")
    with sync_api.sync_playwright() as playwright:
        names = server.api.llm.owner.replicas
        watched = [serve.replicas[names[number]]._engine.observers for number in (0, 1)]
        first, second = map(len, watched)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = Tab(browser, server)
        tab.wait_for("!document.getElementById('choose-replica').hidden")
        tab.wait_for("document.getElementById('pool-about').textContent.includes('100 blocks')")
        wait_until(lambda: list(map(len, watched)) == [first + 1, second])
        tab.page.select_option("#replica", "1")
        wait_until(lambda: list(map(len, watched)) == [first, second + 1])
        tab.wait_for("document.getElementById('replica').value === '1'")
        assert not tab.wrong
        browser.close()


def test_a_response_is_continued_whichever_replica_has_answered(server: FleetServed) -> None:
    asked = {"max_output_tokens": 5}
    first = json.load(server.open("/v1/responses", input="What is a KV cache?", **asked))
    for _ in range(3):
        asked["previous_response_id"] = first["id"]
        more = json.load(server.open("/v1/responses", input="And a block?", **asked))
        assert more["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    assert json.loads(server.get(f"/v1/responses/{first['id']}")) == first
    question = [{"role": "user", "content": "What is a KV cache?"}]
    answer = json.load(server.open("/v1/messages", messages=question, max_tokens=5))
    assert answer["content"][0]["text"] == first["output"][0]["content"][0]["text"]
