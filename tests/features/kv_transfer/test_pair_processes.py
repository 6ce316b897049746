"""A prefill server and a decode server as processes, which are killed under load."""

import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_pair import free_port
from serving import wait_until

from nanoserve import LLM, SamplingParams

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

OPTIONS: dict[str, Any] = {
    **{"dtype": "float32", "block_size": 4, "num_kv_blocks": 300},
    **{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 200},
}
MODEL = "tiny-qwen3"
LEASE_SECONDS = 3.0


@dataclass
class Pair:
    """The two servers, on ports of their own. Each may be started again after it was killed."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ports = {name: free_port() for name in ("prefill", "decode", "kv")}

    def start(self, name: str) -> None:
        extra: dict[str, Any] = {"lease_timeout": LEASE_SECONDS}
        if name == "decode":
            url = f"http://127.0.0.1:{self.ports['prefill']}"
            extra = {"prefill_server": url, "min_tokens": 8, "load_timeout": 5}
        role = "kv_producer" if name == "prefill" else "kv_consumer"
        config = {"kv_connector": "socket", "kv_role": role, "kv_port": self.ports["kv"]}
        config["kv_connector_extra_config"] = extra
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in OPTIONS.items()]
        command = [sys.executable, "-m", "nanoserve", "serve", MODEL, *flags]
        command += ["--port", str(self.ports[name]), "--no-engine-process"]
        command += ["--kv-transfer-config", json.dumps(config)]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(command, stderr=log, stdout=log)

    def wait(self, name: str) -> None:
        def is_ready() -> bool:
            assert self.processes[name].poll() is None, (self.folder / f"{name}.log").read_text()
            with contextlib.suppress(OSError):
                return bool(self.ask(name, "/health") is not None)
            return False

        wait_until(is_ready, 120)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def ask(self, name: str, path: str) -> bytes:
        url = f"http://127.0.0.1:{self.ports[name]}{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bytes(answer.read())

    def counters(self, name: str) -> dict[str, int]:
        lines = self.ask(name, "/metrics").decode().splitlines()
        found = (line.removeprefix("vllm:").split() for line in lines if line.startswith("vllm:kv"))
        return {key.partition("_total")[0]: int(float(value)) for key, value in found}

    def num_open_leases(self) -> int:
        counts = self.counters("prefill")
        ended = sum(counts[f"kv_lease_{end}"] for end in ("confirmed", "expired", "lost"))
        return counts["kv_lease_requests"] - ended

    def complete(self, prompt: list[int], seed: int) -> list[int]:
        """Return the tokens of the decode server; raises `OSError` and others if it is killed."""
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0.9, "seed": seed}
        body |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["decode"], timeout=60)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise ConnectionError(text)
            tokens: list[int] = json.loads(text)["choices"][0]["token_ids"]
            return tokens


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Pair]:
    pair = Pair(folder)
    try:
        for name in ("prefill", "decode"):
            pair.start(name)
            if name == "prefill":
                pair.wait(name)  # otherwise the first prompts are computed without it
        pair.wait("decode")
        yield pair
    finally:
        for process in pair.processes.values():
            process.kill()
            process.wait()


def requests_of(number: int) -> tuple[list[int], int]:
    """Return a prompt and a seed; the prompts share beginnings."""
    rng = random.Random(number)
    start = random.Random(number % 3).choices(range(300, 1500), k=24)
    return start + rng.choices(range(300, 1500), k=rng.randrange(10, 80)), number


def expected_of(num_requests: int) -> list[list[int]]:
    prompts, seeds = zip(*map(requests_of, range(num_requests)), strict=True)
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=6, ignore_eos=True) for seed in seeds
    ]
    with LLM(MODEL, **OPTIONS) as llm:
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.size("full")
def test_a_pair_of_servers(tmp_path: Path) -> None:
    expected = expected_of(6)
    with started(tmp_path) as pair:
        assert [pair.complete(*requests_of(number)) for number in range(6)] == expected
        wait_until(lambda: pair.num_open_leases() == 0)
        counts = pair.counters("decode")
        assert counts["kv_prefill_failed_requests"] == 0 and counts["kv_connector_loaded_blocks"]
        assert pair.counters("prefill")["kv_lease_confirmed"] == counts["kv_prefill_requests"] == 6
        pair.kill("prefill")
        assert pair.complete(*requests_of(7)) == expected_of(8)[7]
        assert pair.counters("decode")["kv_prefill_failed_requests"] == 1


class Load:
    """Clients in threads, which send requests until they are stopped."""

    def __init__(self, pair: Pair, expected: list[list[int]], num_clients: int = 4) -> None:
        self.pair, self.expected = pair, expected
        self.num_right = self.num_errors = 0
        self.wrong: list[Any] = []
        self.is_over = threading.Event()
        jobs = [(number,) for number in range(num_clients)]
        self.threads = [threading.Thread(target=self._run, args=job) for job in jobs]
        for thread in self.threads:
            thread.start()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.is_over.is_set():
            number = rng.randrange(len(self.expected))
            try:
                tokens = self.pair.complete(*requests_of(number))
            except (OSError, http.client.HTTPException, KeyError, ValueError):
                self.num_errors += 1
                time.sleep(0.05)
                continue
            if tokens == self.expected[number]:
                self.num_right += 1
            else:
                self.wrong.append((number, tokens))

    def stop(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self.threads), "a request without an answer"


@pytest.mark.size("full")
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_killed_side_makes_no_answer_wrong(
    side: str, by_size: Callable[..., int], tmp_path: Path
) -> None:
    expected = expected_of(200)
    rng, num_right, num_loaded = random.Random(0), 0, 0
    with started(tmp_path) as pair:
        for _ in range(by_size(1, 3, 50)):
            load = Load(pair, expected)
            time.sleep(rng.uniform(0.05, 2.0))
            num_loaded += pair.counters("decode")["kv_connector_loaded_blocks"]
            pair.kill(side)
            if side == "prefill":
                time.sleep(0.5)
                before = load.num_right
                wait_until(lambda load=load, before=before: load.num_right >= before + 4)
            else:
                time.sleep(LEASE_SECONDS / 10)  # far sooner than at its deadline
                wait_until(lambda: pair.num_open_leases() == 0, LEASE_SECONDS)
            load.stop()
            assert not load.wrong
            assert side == "decode" or not load.num_errors
            num_right += load.num_right
            pair.start(side)
            pair.wait(side)
        if side == "prefill":  # it is used again
            before = pair.counters("decode")["kv_connector_loaded_blocks"]
            fresh = iter(range(1000, 2000))
            wait_until(lambda: is_used_again(pair, next(fresh), before), 60)
        wait_until(lambda: pair.num_open_leases() == 0, LEASE_SECONDS + 5)
    assert num_right and num_loaded
    print(f"{num_right} right answers")


def is_used_again(pair: Pair, number: int, before: int) -> bool:
    pair.complete(*requests_of(number))
    time.sleep(0.2)
    return pair.counters("decode")["kv_connector_loaded_blocks"] > before


@pytest.mark.size("full")
def test_a_stopped_prefill_server_costs_time_only(tmp_path: Path) -> None:
    """It accepts connections, as the system does for it, and never answers."""
    expected = expected_of(10)
    with started(tmp_path) as pair:
        os.kill(pair.processes["prefill"].pid, signal.SIGSTOP)
        began = time.monotonic()
        assert [pair.complete(*requests_of(number)) for number in range(10)] == expected
        assert time.monotonic() - began < 30  # one load_timeout, and then an outage
        os.kill(pair.processes["prefill"].pid, signal.SIGCONT)
        wait_until(lambda: pair.num_open_leases() == 0, LEASE_SECONDS + 5)
