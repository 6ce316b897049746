"""`nanoserve serve` as a process: from its first line to its exit status."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from serving import wait_until

from nanoserve.cli.main import main

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
OPTIONS = ["--num-kv-blocks", "200", "--max_num_seqs=8", "--dtype", "float32"]


@contextlib.contextmanager
def serving(*arguments: str, environment: dict | None = None):
    """The process, and the address that it tells."""
    command = [sys.executable, "-m", "nanoserve", "serve", "--port", "0", *OPTIONS, *arguments]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    ) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r" at (http://\S+)", line):
                    break
            else:
                pytest.fail("".join(lines))
            url = found[1]
            wait_until(lambda: answers(url))
            yield process, url
        finally:
            process.kill()


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"{url}/health", timeout=30).status == 200
    return False


def stream(url: str, max_tokens: int):
    body = {"prompt": "A KV cache", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(asked, timeout=60)


FULL = pytest.mark.size("full")  # each starts a process that imports all that an engine needs


@pytest.mark.small(number=[signal.SIGTERM])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_end_and_takes_nothing_new(number) -> None:
    with serving() as (process, url):
        answer = stream(url, max_tokens=1500)
        answer.readline()
        process.send_signal(number)
        wait_until(lambda: not answers(url))
        assert process.poll() is None  # it still answers whom it has promised to
        text = answer.read().decode()
        assert text.rstrip().endswith("data: [DONE]") and '"finish_reason": "length"' in text
        assert process.wait(60) == 0


@FULL
def test_who_outlasts_the_grace_period_is_told() -> None:
    with serving("--grace-period", "0.2", "--max-model-len", "2000") as (process, url):
        answer = stream(url, max_tokens=1900)
        answer.readline()
        process.terminate()
        text = answer.read().decode()
        assert '"engine_dead"' in text and "[DONE]" not in text
        assert process.wait(60) == 0


@FULL
def test_kill_9_leaves_nothing_in_the_way_of_the_next_one() -> None:
    with serving() as (process, url):
        answer = stream(url, max_tokens=1500)
        answer.readline()
        process.kill()
        with contextlib.suppress(OSError, http.client.HTTPException):  # it ended too early
            answer.read()
        process.wait(60)
        port = url.rpartition(":")[2]
        with serving("--port", port) as (_, again):
            assert again == url


@FULL
def test_names_and_keys_from_the_command_line(monkeypatch) -> None:
    key = {"NANOSERVE_API_KEY": "secret"}
    with serving("--served-model-name", "a", "b", environment=key) as (_, url):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/v1/models")
        assert refused.value.code == 401
        headers = {"authorization": "Bearer secret"}
        models = urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", None, headers))
        assert [model["id"] for model in json.load(models)["data"]] == ["a", "b"]


def test_a_port_in_use_is_told_before_a_model_is_loaded(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "no-such-model", "--port", port]) == 1
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        pytest.param(["no-such-model"], "no-such-model", marks=FULL),
        (["--max-n", "0"], "max_n=0"),
        (["--stream-interval", "0"], "stream_interval=0"),
        (["--no-engine-process", "--max-model-len", "1"], "max_model_len=1"),
        (["--no-engine-process", "--dtype", "float7"], "float7"),
        (["--no-engine-process", "--skip-tokenizer-init"], "tokenizer"),
        (["--ssl-keyfile", "x"], "TLS"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(arguments, told, capsys) -> None:
    assert main(["serve", "--port", "0", *arguments]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("nanoserve serve: ") and told in error


def test_every_option_of_the_engine_is_a_flag() -> None:
    from nanoserve.cli.engine_flags import engine_options
    from nanoserve.cli.serve import _OURS, _parser

    given = ["--max_model_len", "99", "--no-enable-prefix-caching", "--async-scheduling"]
    given += ["--gpu-memory-utilization=0.5", "--trace", "a_b.jsonl"]
    given += ["--speculative-config", '{"method": "ngram"}']
    given += ["--swap-space", "4", "--enable-lora", "--reasoning-parser", "qwen3"]
    args = _parser().parse_args(given)
    assert engine_options(args, _OURS) == {
        "swap_space": 4,
        "enable_lora": True,
        "max_model_len": 99,
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "gpu_memory_utilization": 0.5,
        "trace": "a_b.jsonl",
        "speculative_config": {"method": "ngram"},
    }


def test_without_its_packages_it_says_what_to_install(monkeypatch, capsys) -> None:
    for name in [name for name in sys.modules if name.startswith("nanoserve.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve"]) == 1
    assert "pip install 'nanoserve[serve]'" in capsys.readouterr().err
