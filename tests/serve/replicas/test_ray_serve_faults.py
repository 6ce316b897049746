"""kill -9 of everything that two replicas consist of, with 64 streams under way.

Each test prints the seconds that it took: `pytest -s`.
"""

import os
import signal
import threading
import time

import pytest

pytest.importorskip("ray.serve", reason="needs the extra nanoserve[ray]")
pytest.importorskip("fastapi", reason="needs the extra nanoserve[serve]")

from ray_server import (
    RayServer,
    Stream,
    command_of,
    descendants,
    ray_cluster,
    ray_server,
    read_streams,
    wait_for,
)

# With --full one replica is killed, and then the server; --soak kills the rest in all ways.
pytestmark = pytest.mark.size("full")
NUM_STREAMS = 64


def bodies_of(number: int) -> list[dict]:
    common = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0}
    return [{"prompt": f"{i} is", "seed": i, **common} for i in range(number)]


def streams_while(server: RayServer, title: str, number: int) -> tuple[list[Stream], float]:
    """What clients have seen while a process got that signal, and when it did."""
    sent: list[float] = []

    def send() -> None:
        pid = server.pids(title)[0]
        sent.append(time.monotonic())
        os.kill(pid, number)

    timer = threading.Timer(1.5, send)
    timer.start()
    seen = read_streams(server, bodies_of(NUM_STREAMS))
    timer.join()
    return seen, sent[0]


def is_whole(server: RayServer) -> bool:
    return len(server.metric("num_requests_running")) == 2


@pytest.fixture
def server(two_replicas: RayServer) -> RayServer:
    return two_replicas


@pytest.fixture(scope="module")
def undisturbed(two_replicas: RayServer) -> list[Stream]:
    return read_streams(two_replicas, bodies_of(NUM_STREAMS))


# A killed replica is missed at once; one that hangs when it has not answered for 8 s, and Serve
# replaces it after three health checks of 10 s.
@pytest.mark.parametrize(
    ("number", "over", "whole"),
    [
        (signal.SIGKILL, 40, 60),
        pytest.param(signal.SIGSTOP, 40, 120, marks=pytest.mark.size("soak")),
    ],
)
def test_a_replica_is_killed_or_hangs(
    server: RayServer, undisturbed: list[Stream], number: int, over: float, whole: float
) -> None:
    seen, at = streams_while(server, "ServeReplica", number)
    seconds = time.monotonic() - at
    failed = [stream for stream in seen if stream.error is not None]
    for stream, good in zip(seen, undisturbed, strict=True):
        if stream.error is None:
            assert (stream.text, stream.finish_reason) == (good.text, "length")
        else:  # it had begun: told so, and nothing was told twice
            assert good.text.startswith(stream.text) and stream.text
            assert (stream.error["code"], stream.finish_reason) == ("engine_dead", None)
    assert 0 < len(failed) < NUM_STREAMS and seconds < over
    wait_for(lambda: is_whole(server), whole)
    took = time.monotonic() - at
    print(f"{number!r}: all have their answer after {seconds:.1f} s, whole after {took:.1f} s")
    again = read_streams(server, bodies_of(NUM_STREAMS))
    assert [stream.text for stream in again] == [stream.text for stream in undisturbed]
    assert not any(server.metric("num_requests_running").values())


@pytest.mark.size("soak")
def test_what_has_not_begun_is_computed_elsewhere(server: RayServer) -> None:
    """More requests than a replica has slots for: those that wait have seen nothing yet."""
    bodies = bodies_of(2 * NUM_STREAMS + 40)
    killer = threading.Timer(1.5, lambda: os.kill(server.pids("ServeReplica")[0], signal.SIGKILL))
    killer.start()
    seen = read_streams(server, bodies)
    killer.join()
    failed = [stream for stream in seen if stream.error is not None]
    assert all(stream.text for stream in failed)  # who had seen nothing has an answer
    assert sum(stream.finish_reason == "length" for stream in seen) == len(seen) - len(failed)
    assert len(failed) <= NUM_STREAMS
    wait_for(lambda: is_whole(server), 60)


@pytest.mark.size("soak")
def test_the_controller_is_killed(server: RayServer, undisturbed: list[Stream]) -> None:
    """It is in no request's way; a replica that is killed afterwards is replaced as ever."""
    seen, at = streams_while(server, "ServeController", signal.SIGKILL)
    assert [stream.text for stream in seen] == [stream.text for stream in undisturbed]
    os.kill(server.pids("ServeReplica")[0], signal.SIGKILL)
    wait_for(lambda: not is_whole(server), 20)
    wait_for(lambda: is_whole(server), 90)
    print(f"whole {time.monotonic() - at:.1f} s after the controller was killed")


@pytest.mark.size("soak")
def test_ctrl_c_in_a_terminal_lets_what_runs_end() -> None:
    """It is sent to all processes of the terminal's foreground, Ray's own among them."""
    with ray_server("-dp", "2") as server:
        pids = descendants(server.process.pid)
        answer = server.open(
            "/v1/completions", prompt="a", max_tokens=900, ignore_eos=True, stream=True
        )
        answer.readline()
        os.killpg(server.process.pid, signal.SIGINT)
        sent = time.monotonic()
        text = answer.read().decode()
        assert text.rstrip().endswith("data: [DONE]") and '"finish_reason": "length"' in text
        assert server.process.wait(60) == 0
        wait_for(lambda: not any(map(command_of, pids)), 10)
        print(f"all is gone {time.monotonic() - sent:.1f} s after Ctrl-C")


@pytest.mark.size("soak")
def test_a_server_takes_over_the_replicas_of_one_that_was_killed() -> None:
    """On a cluster, which outlives it. What nobody waits for any more is aborted."""
    with ray_cluster() as cluster:
        options = ["-dp", "2", "--ray-address", cluster.address]
        with ray_server(*options, RAY_AUTH_MODE="token") as server:
            replicas = cluster.pids("ServeReplica")
            server.open("/v1/completions", prompt="a", max_tokens=1900, stream=True).readline()
            server.process.kill()
            killed = time.monotonic()
            server.process.wait()
        assert cluster.pids("ServeReplica") == replicas
        with ray_server(*options, RAY_AUTH_MODE="token") as server:
            took = time.monotonic() - killed
            print(f"a server answers again {took:.1f} s after it was killed")
            assert cluster.pids("ServeReplica") == replicas
            wait_for(lambda: not any(server.metric("num_requests_running").values()), 40)
            assert server.complete("A KV cache", temperature=0, max_tokens=5)["text"]
        wait_for(
            lambda: not cluster.pids("ServeReplica"), 30
        )  # a server that ends takes them along


def test_the_server_is_killed_and_nothing_of_ray_is_left(server: RayServer) -> None:
    """The last of the tests of this server."""
    # Two agents of Ray's look once a minute whether they are still wanted.
    all_pids = descendants(server.process.pid)
    pids = [pid for pid in all_pids if not command_of(pid).endswith("Agent")]
    server.open("/v1/completions", prompt="a", max_tokens=1900, stream=True).readline()
    server.process.kill()
    seconds = wait_for(lambda: not any(map(command_of, pids)), 20)
    print(f"{len(pids)} processes are gone after {seconds:.1f} s")
