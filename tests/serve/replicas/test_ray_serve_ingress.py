"""`serve run` with a YAML file: the ingress is a deployment, and Serve scales and replaces."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray.serve", reason="needs the extra nanoserve[ray]")
pytest.importorskip("fastapi", reason="needs the extra nanoserve[serve]")

from ray_server import RayCluster, RayServer, ray_cluster, read_stream, read_streams, wait_for

pytestmark = pytest.mark.size("full")
SCALING = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4}
SCALING |= {"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 2}
LONG = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def config_of(port: int) -> dict:
    args = {"model": "tiny-qwen3", "num_kv_blocks": 1000, "prefix_cache_seed": 7}
    application = {
        "name": "tiny",
        "import_path": "nanoserve.serve.replicas.ingress:build",
        "args": {**args, "dtype": "float32", "resources": {"num_cpus": 0.5}},
        "deployments": [
            {"name": "replicas", "num_replicas": "auto", "autoscaling_config": SCALING}
        ],
    }
    return {"http_options": {"port": port, "host": "127.0.0.1"}, "applications": [application]}


def serve_command(command: str, cluster: RayCluster, config: dict, folder: Path) -> list[str]:
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))  # which is YAML, too
    return [sys.executable, "-m", "ray.serve.scripts", command, str(file)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    folder = tmp_path_factory.mktemp("serve")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = serve_command("run", cluster, config_of(port), folder)
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "token"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    server = RayServer(process, f"http://127.0.0.1:{port}", 0.0)
    try:
        wait_for(lambda: server.is_healthy() or process.poll() is not None, 90)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        print((folder / "log").read_text())


def num_running(server: RayServer) -> float:
    return sum(server.metric("num_requests_running").values())


def test_it_is_the_same_server(server: RayServer) -> None:
    assert '"id":"tiny-qwen3"' in server.get("/v1/models")
    whole = server.complete("A KV cache", temperature=0, max_tokens=20)
    stream = read_stream(server, {"prompt": "A KV cache", "temperature": 0, "max_tokens": 20})
    assert stream.text == whole["text"] and stream.is_done
    assert server.get("/").startswith("<!doctype html>")
    with server.open_get("/live") as events:
        assert events.readline() == b"event: replicas\n"


def test_who_goes_aborts(server: RayServer) -> None:
    answer = server.open("/v1/completions", prompt="a", stream=True, **LONG)
    answer.readline()
    assert num_running(server) == 1
    answer.close()
    print(f"aborted after {wait_for(lambda: not num_running(server), 2):.2f} s")


@pytest.mark.size("soak")
def test_replicas_come_with_the_load_and_go_with_it(server: RayServer) -> None:
    """Nothing that a replica has begun is lost when it goes."""
    bodies, is_over, seen = [{"prompt": f"{i} is", **LONG} for i in range(12)], [], []
    good = read_streams(server, bodies[:1])[0].text

    def load() -> None:
        while not is_over:
            seen.extend(read_streams(server, bodies))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        seconds = wait_for(lambda: len(server.metric("num_requests_running")) == 2, 90)
        print(f"a second replica after {seconds:.1f} s of load")
        wait_for(lambda: all(server.metric("num_requests_running").values()), 60)
    finally:
        is_over.append(True)
        thread.join()
    trickle = []
    began = time.monotonic()
    while len(server.metric("num_requests_running")) == 2:
        trickle.append(read_stream(server, bodies[0]))
        assert time.monotonic() - began < 90
    print(f"one replica again {time.monotonic() - began:.1f} s later")
    assert all(s.error is None and s.finish_reason == "length" for s in [*seen, *trickle])
    assert {stream.text for stream in trickle} <= {good}


@pytest.mark.size("soak")
def test_the_ingress_is_killed_and_comes_back(server: RayServer, cluster: RayCluster) -> None:
    answer = server.open("/v1/completions", prompt="a", stream=True, **LONG)
    answer.readline()
    (pid,) = cluster.pids("tiny:ingress")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    seconds = wait_for(server.is_healthy, 90)
    print(f"the ingress answers again after {seconds:.1f} s")
    assert server.complete("A KV cache", temperature=0, max_tokens=5)["text"]
    aborted = wait_for(lambda: not num_running(server), 40)
    print(f"and what nobody waits for any more is aborted {aborted:.1f} s later")
