"""Two replicas on Ray Serve behind one server: what their clients see."""

import re
import subprocess
import sys
import time

import pytest

pytest.importorskip("ray.serve", reason="needs the extra nanoserve[ray]")
pytest.importorskip("fastapi", reason="needs the extra nanoserve[serve]")

from ray_server import OPTIONS, RayServer, read_streams, wait_for

from nanoserve.cli.main import main
from nanoserve.serve.async_llm import AsyncLLM

needs_ray_to_start = pytest.mark.size("full")
GREEDY = {"temperature": 0, "max_tokens": 30}


@pytest.fixture
def server(two_replicas: RayServer) -> RayServer:
    return two_replicas


def completions_of_one(bodies: list[dict]) -> list[str]:
    """What one engine answers, in this process."""
    import asyncio

    from nanoserve import SamplingParams

    async def ask(llm: AsyncLLM, body: dict) -> str:
        names = ("temperature", "max_tokens", "seed", "stop", "logprobs")
        params = SamplingParams(**{name: body[name] for name in names if name in body})
        outputs = [output async for output in llm.generate(body["prompt"], params)]
        return outputs[-1].outputs[0].text

    async def ask_all() -> list[str]:
        options = {"num_kv_blocks": 500, "max_num_seqs": 64, "dtype": "float32", "seed": 5}
        async with AsyncLLM("tiny-qwen3", **options) as llm:
            return [await ask(llm, body) for body in bodies]

    return asyncio.run(ask_all())


@pytest.mark.size("full")
def test_without_replicas_nothing_of_ray_is_imported() -> None:
    code = (
        "import sys; from nanoserve.cli.main import main; import nanoserve.serve.http.app;"
        "main(['serve', '--data-parallel-size', '1', 'no-such-model']);"
        "print([name for name in sys.modules if name.split('.')[0] == 'ray'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.size("full")
def test_what_is_missing_is_named() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; from nanoserve.cli.main import main;"
        "sys.exit(main(['serve', '-dp', '2', '--port', '0']))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 1 and "pip install 'nanoserve[ray]'" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-dp", "0"], "data_parallel_size=0"),
        (["-dp", "3", "--max-data-parallel-size", "2"], "max_data_parallel_size=2"),
        (["--ray-address", "somewhere:1"], "ray_address='somewhere:1'"),
        (["-dp", "2", "--router", "random"], "router='random'"),
        (["-dp", "2", "no-such-model"], "no-such-model"),
        (["-dp", "2", "--max-model-len", "1"], "max_model_len=1"),
        (["-dp", "2", "--kv-offloading-path", "kv"], "kv_offloading_path needs a single engine"),
    ],
)
def test_what_cannot_be_served_is_told_before_ray_is_started(arguments, told, capsys) -> None:
    assert main(["serve", "--port", "0", *OPTIONS, *arguments]) == 1
    assert told in capsys.readouterr().err
    import ray

    assert not ray.is_initialized()


@needs_ray_to_start
def test_the_tokens_are_those_of_one_engine(server: RayServer) -> None:
    """Seeds that are not given are drawn as one engine draws them, whoever computes."""
    bodies = [
        {"prompt": "A KV cache", **GREEDY},
        *({"prompt": "Once", "temperature": 1.0, "max_tokens": 30} for _ in range(4)),
        {"prompt": "Once", "temperature": 1.0, "max_tokens": 30, "seed": 3},
        {"prompt": "One, two,", **GREEDY, "stop": [" "]},
    ]
    texts = [server.complete(**body)["text"] for body in bodies]
    assert texts == completions_of_one(bodies)
    assert len(set(texts[1:5])) == 4
    bodies = [{"prompt": f"Number {i}", "temperature": 1.0, "seed": i} for i in range(16)]
    bodies = [{**body, "max_tokens": 50, "ignore_eos": True} for body in bodies]
    streams = read_streams(server, bodies)
    assert [stream.text for stream in streams] == [server.complete(**b)["text"] for b in bodies]
    assert all(stream.is_done and stream.error is None for stream in streams)


@needs_ray_to_start
def test_a_shared_prefix_stays_at_one_replica_and_load_is_spread(server: RayServer) -> None:
    before, hits = server.metric("prompt_tokens_total"), server.metric("prefix_cache_hits_total")
    prefix = "The quick brown fox jumps over the lazy dog. " * 20
    for number in range(6):
        server.complete(f"{prefix}{number}", max_tokens=2)
        time.sleep(0.1)  # until it was told what is cached
    now, found = server.metric("prompt_tokens_total"), server.metric("prefix_cache_hits_total")
    assert sum(now[replica] > before[replica] for replica in now) == 1
    assert sum(found.values()) - sum(hits.values()) > 0.7 * 5 / 6 * (
        sum(now.values()) - sum(before.values())
    )
    read_streams(server, [{"prompt": f"{i} is", "max_tokens": 50} for i in range(16)])
    spread = server.metric("prompt_tokens_total")
    assert all(spread[replica] > before[replica] for replica in spread)


@needs_ray_to_start
@pytest.mark.parametrize("streams", [True, False])
def test_who_goes_leaves_nothing_behind_within_a_second(server: RayServer, streams: bool) -> None:
    import socket

    host, port = server.url.removeprefix("http://").split(":")
    body = '{"prompt": "a", "max_tokens": 1900, "ignore_eos": true, "stream": %s}'
    body = body % str(streams).lower()
    asked = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    asked += f"content-type: application/json\r\n\r\n{body}"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(asked.encode())
        wait_for(lambda: sum(server.metric("num_requests_running").values()) == 1, 5)
    seconds = wait_for(lambda: not any(server.metric("num_requests_running").values()), 1)
    print(f"aborted after {seconds:.2f} s")


@needs_ray_to_start
def test_metrics_are_one_exposition_with_a_label(server: RayServer) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {one.name: one for one in text_string_to_metric_families(server.get("/metrics"))}
    samples = families["vllm:num_requests_running"].samples
    assert {sample.labels["replica"] for sample in samples} == {"0", "1"}
    assert all(
        sample.labels["replica"] in "01" for one in families.values() for sample in one.samples
    )


@needs_ray_to_start
@pytest.mark.parametrize("replica", [0, 1])
def test_the_page_shows_the_replica_that_was_chosen(server: RayServer, replica: int) -> None:
    with server.open_get(f"/live?replica={replica}") as events:
        told = b"".join(events.readline() for _ in range(5)).decode()
    assert f'{{"replicas": [0, 1], "shown": {replica}}}' in told
    assert re.search(r'event: snapshot\ndata: \{"pool":\{"num_blocks":500', told)
    assert "choose-replica" in server.get("/")


@needs_ray_to_start
def test_what_needs_no_engine_is_answered_by_the_ingress(server: RayServer) -> None:
    tokens = server.post("/tokenize", prompt="A KV cache")["tokens"]
    assert server.post("/detokenize", tokens=tokens)["prompt"] == "A KV cache"
    assert '"max_model_len":2048' in server.get("/v1/models")
