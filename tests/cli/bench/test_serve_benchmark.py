"""`nanoserve bench --url`: its figures are what the server did, and no failure is lost."""

import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in_server import DONE, END, STREAM, StandIn, Steps, chunk, num_words, plain, said, talk

from nanoserve.cli.bench import main
from nanoserve.cli.bench.latency import poisson_arrivals
from nanoserve.cli.bench.serve import connection
from nanoserve.cli.bench.serve.connection import Server
from nanoserve.cli.bench.serve.options import parse_args
from nanoserve.cli.bench.workloads import draw_workload

SMALL = ["--num-seqs", "6", "--input-len", "20-40", "--output-len", "4-8"]
LATE = 0.05  # seconds from one thread to the other, at the median, on a busy machine
WARM_UPS = 2

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(url: str, *options: str, status: int = 0) -> dict[str, Any]:
        file = tmp_path / "report.json"
        assert main(["--url", url, *SMALL, "--json", str(file), *options]) == status
        return json.loads(file.read_text())

    return run


def only_run(report: dict[str, Any]) -> dict[str, Any]:
    (point,) = report["points"]
    (run,) = point["runs"]
    return run


def after_warm_up(faulty: Callable[[dict[str, Any], int], Steps]) -> Any:
    """`faulty` gets the requests that count, numbered from 0."""

    def answer(body: dict[str, Any], number: int) -> Steps:
        return talk(body) if number < WARM_UPS else faulty(body, number - WARM_UPS)

    return answer


def test_times_are_those_of_the_server(measure: Measure) -> None:
    with StandIn(lambda body, number: talk(body, ttft=0.1, gap=0.04)) as server:
        run = only_run(measure(server.url, "--concurrency", "6"))
        times = server.times[WARM_UPS:]
    found, n = run["latencies"], np.array([len(content) - 1 for content in times])
    ttft = np.array([content[1] - content[0] for content in times])
    e2e = np.array([content[-1] - content[0] for content in times])
    gaps = np.concatenate([np.diff(content[1:]) for content in times])
    waits = {"ttft": ttft, "itl": gaps, "tpot": (e2e - ttft) / (n - 1), "e2e": e2e}
    assert ttft.min() > 0.098 and gaps.min() > 0.038  # it has slept
    for name, seconds in waits.items():
        assert found[f"{name}_p50"] / 1000 == pytest.approx(np.median(seconds), abs=LATE), name
        assert found[f"{name}_mean"] / 1000 == pytest.approx(seconds.mean(), abs=LATE), name
    assert found["itl_p50"] > 35
    assert run["seconds"] >= e2e.max()


@pytest.mark.size("full")
def test_each_request_has_its_own_times(measure: Measure) -> None:
    """One at a time, the n-th after 40 n ms: the median of six is that of 3.5."""

    def answer(body: dict[str, Any], number: int) -> Steps:
        return talk(body, ttft=0.04 * (number + 1))

    with StandIn(after_warm_up(answer)) as server:
        run = only_run(measure(server.url, "--concurrency", "1"))
        slept = [1000 * (content[1] - content[0]) for content in server.times[WARM_UPS:]]
    for percentile in (50, 90, 99):
        found = run["latencies"][f"ttft_p{percentile}"]
        assert found == pytest.approx(np.percentile(slept, percentile), abs=1000 * LATE)
    assert slept[0] < slept[5] / 2


def test_several_tokens_in_a_chunk_are_told_apart_from_the_gap(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    with StandIn(lambda body, number: talk(body, gap=0.06, tokens_a_chunk=3)) as server:
        options = ("--concurrency", "6", "--output-len", "7-7")
        run = only_run(measure(server.url, *options))
        slept = np.array([np.diff(content[1:]) for content in server.times[WARM_UPS:]])
    found = run["latencies"]
    assert (run["output_tokens"], run["chunks"]) == (42, 18)
    assert slept.shape == (6, 2) and slept.min() > 0.058
    assert found["itl_p50"] / 1000 == pytest.approx(np.median(slept), abs=LATE)
    tpot = slept.sum(axis=1) / (7 - 1)
    assert found["tpot_p50"] / 1000 == pytest.approx(np.median(tpot), abs=LATE / 6)
    assert "of 2.33 tokens each" in capsys.readouterr().out


def test_rates_are_of_what_was_answered_over_all_of_the_run(measure: Measure) -> None:
    def answer(body: dict[str, Any], number: int) -> Steps:
        return talk(body) if number % 2 else iter([(0.0, plain("500 Oops", {"error": "no"}))])

    with StandIn(after_warm_up(answer)) as server:
        run = only_run(measure(server.url, "--concurrency", "1"))
        lens = [body["max_tokens"] for body in server.bodies[WARM_UPS:]]
        counted = [2 * num_words(body) + 7 for body in server.bodies[WARM_UPS:]]
    assert (run["ok"], run["failed"]) == (3, 3)
    assert (run["output_tokens"], run["input_tokens"]) == (sum(lens[1::2]), sum(counted[1::2]))
    assert run["latencies"]["request_rate"] == pytest.approx(3 / run["seconds"])
    assert run["goodput_share"] == pytest.approx(0.5)


def test_goodput_counts_who_met_both_objectives(measure: Measure) -> None:
    """Two of six come late, and one of the others is slow after its first token.

    The times are far apart, for machines that are busy.
    """

    def answer(body: dict[str, Any], number: int) -> Steps:
        return talk(body, 0.6 if number < 2 else 0.0, 0.4 if number == 4 else 0.0)

    with StandIn(after_warm_up(answer)) as server:
        options = ("--slo-ttft", "500", "--slo-itl", "300", "--output-len", "2-2")
        run = only_run(measure(server.url, "--concurrency", "6", *options))
    assert run["goodput_share"] == pytest.approx(3 / 6)
    assert run["latencies"]["goodput"] == pytest.approx(3 / run["seconds"])


@pytest.mark.size("full")
def test_requests_come_when_they_are_due(measure: Measure) -> None:
    """However long the server takes; and TTFT counts from then."""
    with StandIn(lambda body, number: talk(body, ttft=0.2)) as server:
        report = measure(server.url, "--request-rate", "40", "--seed", "3")
    run = only_run(report)
    arrivals = poisson_arrivals(40, 6, seed=3)
    due = [request["due"] for request in run["requests"]]
    assert due == pytest.approx([arrival - arrivals[0] for arrival in arrivals], abs=1e-6)
    assert all(request["sent"] >= request["due"] for request in run["requests"])
    assert run["latencies"]["ttft_p50"] > 198
    ended = [request["ended"] for request in run["requests"]]
    assert run["seconds"] == pytest.approx(max(ended)) and due[-1] < ended[0]  # they overlap
    assert run["client"]["late_ms_max"] == pytest.approx(
        1000 * max(request["sent"] - request["due"] for request in run["requests"])
    )


@pytest.mark.size("full")
def test_clients_that_wait_are_so_many_at_a_time(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_IDLE", 60.0)  # a busy machine may pause for a second
    now, most = [0], [0]

    def answer(body: dict[str, Any], number: int) -> Steps:
        now[0] += 1
        most[0] = max(most[0], now[0])
        yield from talk(body, ttft=0.05)
        now[0] -= 1

    with StandIn(answer) as server:
        report = measure(server.url, "--concurrency", "1,3", "--request-rate", "inf")
        num_connections = server.num_connections
    assert [p["load"] for p in report["points"]] == ["all at once", "1 at a time", "3 at a time"]
    assert most[0] == 6  # all at once
    runs = [point["runs"][0] for point in report["points"]]
    spans = [[(r["sent"], r["ended"]) for r in run["requests"]] for run in runs]
    overlaps = [max(sum(a <= t < b for a, b in s) for t, _ in s) for s in spans]
    assert overlaps == [6, 1, 3]
    assert num_connections == 6  # kept, and used again


def fault(name: str, body: dict[str, Any]) -> Steps:
    ok = said("word ")
    whole = chunk(said("", "length")) + chunk(DONE) + END
    steps: dict[str, list[tuple[float, bytes | None]]] = {
        "500 Busy: come back later": [
            (0.0, plain("500 Busy", {"error": {"message": "come back later"}}))
        ],
        "closed without a response": [(0.01, None)],
        "closed before the response was complete": [(0.0, STREAM + chunk(ok)), (0.01, None)],
        "a chunk that is not a JSON object": [(0.0, STREAM + chunk(b"data: {oh\n\n") + whole)],
        "the size of a chunk is": [(0.0, STREAM + b"zz\r\n" + ok)],
        "a chunk is longer than its size": [(0.0, STREAM + b"5\r\n" + ok)],
        "in the stream: out of memory": [
            (0.0, STREAM + chunk(ok)),
            (0.0, chunk(b'data: {"error": {"message": "out of memory"}}\n\n') + whole),
        ],
        "no end after 0.5 s": [(0.0, STREAM + chunk(ok)), (0.9, whole)],
        "not with a stream": [(0.0, plain("200 OK", {"choices": [{"text": "word"}]}))],
        "the stream ended before the answer did": [(0.0, STREAM + chunk(ok) + END)],
        "an answer without text": [(0.0, STREAM + whole)],
        "no HTTP/1.1": [(0.0, b"SSH-2.0-OpenSSH_9.6\r\n\r\n")],
        "bytes after the end": [(0.0, STREAM + chunk(ok) + whole + b"HTTP/1.1 200 OK")],
    }
    return iter(steps[name])


FAULTS = [
    "500 Busy: come back later", "closed without a response",
    "closed before the response was complete",
    "a chunk that is not a JSON object", "the size of a chunk is",
    "a chunk is longer than its size", "in the stream: out of memory", "no end after 0.5 s",
    "not with a stream",
    "the stream ended before the answer did", "an answer without text", "no HTTP/1.1",
    "bytes after the end",
]  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_is_counted_and_named(
    name: str, measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: dict[str, Any], number: int) -> Steps:
        return fault(name, body) if number in (1, 4) else talk(body, ttft=0.02)

    with StandIn(after_warm_up(answer)) as server:
        timeout = ("--timeout", "0.5") if "no end" in name else ()
        run = only_run(measure(server.url, "--concurrency", "2", *timeout))
    assert (run["ok"], run["failed"]) == (4, 2)
    assert sum(run["errors"].values()) == 2 and all(name in error for error in run["errors"])
    assert ["error" in request for request in run["requests"]].count(True) == 2
    assert name in capsys.readouterr().out.splitlines()[-1]


def test_the_most_common_error_is_told(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: dict[str, Any], number: int) -> Steps:
        return fault("an answer without text" if number == 2 else "closed without a response", body)

    with StandIn(after_warm_up(answer)) as server:
        run = only_run(measure(server.url, "--concurrency", "1", status=1))
    assert run["failed"] == 6 and "latencies" not in run
    assert "6 failed, most often (5): " in capsys.readouterr().out


def refusing(*names: str, message: str = "Unrecognized request argument: {}") -> Any:
    """OpenAI's way: a name that is not known is an error."""

    def answer(body: dict[str, Any], number: int) -> Steps:
        for name in names:
            if name in body:
                return iter([(0.0, plain("400 Bad Request", {"error": message.format(name)}))])
        if "max_completion_tokens" in body:
            body = body | {"max_tokens": body["max_completion_tokens"]}
        steps = talk(body)
        if "stream_options" in body:
            return steps
        return ((wait, _without_usage(data)) for wait, data in steps)

    return answer


def _without_usage(data: bytes | None) -> bytes | None:
    return chunk(DONE) + END if data is not None and b'"usage"' in data else data


def test_what_a_server_refuses_is_left_out_and_told(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    with StandIn(refusing("ignore_eos")) as server:
        run = only_run(measure(server.url, "--concurrency", "2"))
        assert all("stream_options" in body for body in server.bodies[1:])
        assert [("ignore_eos" in body) for body in server.bodies] == [True] + [False] * 8
    assert run["failed"] == 0 and run["with_usage"] == 6
    assert "rejects ignore_eos: outputs may end early" in capsys.readouterr().out


@pytest.mark.parametrize("message", ["unknown: {}", "something is wrong"])
def test_without_usage_chunks_are_counted(
    message: str, measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server may also not say what it does not like."""
    with StandIn(refusing("ignore_eos", "stream_options", message=message)) as server:
        run = only_run(measure(server.url, "--concurrency", "2"))
        asked = sum(body["max_tokens"] for body in server.bodies[-6:])
    assert run["with_usage"] == 0 and run["output_tokens"] == run["chunks"] == asked
    assert run["input_tokens"] == 0
    assert "counted by chunks, each counted as a token" in capsys.readouterr().out


def test_a_server_that_knows_only_the_newer_name_gets_it(measure: Measure) -> None:
    told = "Unsupported parameter: {}. Use 'max_completion_tokens' instead."
    with StandIn(refusing("max_tokens", message=told)) as server:
        run = only_run(measure(server.url, "--concurrency", "2"))
        assert all("ignore_eos" in body for body in server.bodies)
    assert run["failed"] == 0


def test_a_server_that_refuses_all_is_quoted(measure: Measure) -> None:
    refusal = plain("401 Unauthorized", {"error": {"message": "who are you?"}})
    with (
        StandIn(lambda body, number: iter([(0.0, refusal)])) as server,
        pytest.raises(ValueError, match=r"401 Unauthorized: who are you\?"),
    ):
        measure(server.url)
    refusal = plain("400 Bad Request", {"error": {"message": "no such model"}})
    with (
        StandIn(lambda body, number: iter([(0.0, refusal)])) as server,
        pytest.raises(ValueError, match="400 Bad Request: no such model"),
    ):
        measure(server.url)
        assert len(server.bodies) == 3


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from nanoserve.cli.main import main as shell

    with StandIn(lambda body, number: talk(body)) as server:
        url = server.url
    assert shell(["bench", "--url", url]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("nanoserve bench: ") and shown.count("\n") == 1


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_address_and_the_key(
    path: str, measure: Measure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-mine")
    with StandIn(lambda body, number: talk(body)) as server:
        report = measure(server.url + path, "--concurrency", "1")
        lines = {head.split("\r\n")[0] for head in server.heads}
        assert all("authorization: bearer sk-of-mine" in head.lower() for head in server.heads)
        assert {body["model"] for body in server.bodies} == {"stand-in"}
    assert lines == {"GET /v1/models HTTP/1.1", "POST /v1/chat/completions HTTP/1.1"}
    assert report["spec"]["model"] == "stand-in"
    assert "of-mine" not in json.dumps(report) + capsys.readouterr().out


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_over_tls_the_certificate_must_be_the_hosts(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with StandIn(lambda body, number: talk(body), context) as server:
        at_the_number = server.url.replace("http:", "https:")
        by_name = at_the_number.replace("127.0.0.1", "localhost")
        with pytest.raises(ssl.SSLCertVerificationError):
            measure(by_name)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert only_run(measure(by_name, "--concurrency", "3"))["ok"] == 6
        with pytest.raises(ssl.SSLCertVerificationError):
            measure(at_the_number)


def test_paths_of_hosted_servers() -> None:
    def path(url: str) -> str:
        return Server(url, None, 1.0).path

    assert path("https://somewhere.example/openai/v1") == "/openai/v1"
    assert path("https://somewhere.example/api/v4/") == "/api/v4"
    assert path("http://[::1]:8000") == "/v1"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("127.0.0.1:8000", "must be like"),
        ("ftp://somewhere/v1", "must be like"),
        ("http:///v1", "must be like"),
        ("http://some where/v1", "must be like"),
        ("http://somewhere/v1\r\nX: y", "must be like"),
        ("http://me:secret@somewhere/v1", "must not have a user name"),
        ("ftp://me:secret@somewhere/v1", "must not have a user name"),
        ("http://somewhere/v1?key=1", "must end with its path"),
        ("http://somewhere:99999/v1", "[Pp]ort"),
    ],
)
def test_an_address_that_is_none(url: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as error:
        Server(url, None, 1.0)
    assert "secret" not in str(error.value)


def test_a_key_that_would_end_its_line() -> None:
    with pytest.raises(ValueError, match="printable ASCII") as error:
        Server("http://somewhere", "sk\r\nX: y", 1.0)
    assert "sk" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--concurrency", "0"],
        ["--timeout", "-1"],
        ["--num-seqs", "0"],
        ["--repeat", "0"],
        ["--token-ids", "100"],
        ["--shared-len", "-1"],
        ["--temperature", "nan"],
        ["--shape", "tiny"],
        ["--engine", "nanoserve"],
    ],
)
def test_options_that_make_no_sense(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--url", "http://somewhere", *options])


def test_a_file_that_cannot_be_written_is_told_before(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        parse_args(["--url", "http://somewhere", "--json", str(tmp_path / "none" / "x.json")])


def test_prompts_have_the_lengths_that_were_asked_for(measure: Measure) -> None:
    """In the server's tokens, two for a word and seven around, to the next word."""
    with StandIn(lambda body, number: talk(body)) as server:
        run = only_run(measure(server.url, "--input-len", "30-90"))
        bodies = server.bodies[WARM_UPS:]
    prompts, output_lens = draw_workload(6, (30, 90), (4, 8), 105)
    asked = sorted(map(len, prompts))
    told = sorted(request["input_tokens"] for request in run["requests"])
    assert all(abs(a - b) <= 1 for a, b in zip(asked, told, strict=True))
    assert sorted(body["max_tokens"] for body in bodies) == sorted(output_lens)
    assert all(body["ignore_eos"] and body["stream"] for body in bodies)


def test_prompts_share_their_beginning_and_no_run_shares_its_prompts(measure: Measure) -> None:
    with StandIn(lambda body, number: talk(body)) as server:
        options = ("--shared-len", "60", "--input-len", "40-40", "--repeat", "2")
        measure(server.url, "--concurrency", "1", *options)
        texts = [body["messages"][0]["content"].split() for body in server.bodies[WARM_UPS:]]
    first, second = texts[:6], texts[6:]
    assert {tuple(words[:26]) for words in first} == {tuple(first[0][:26])}  # 60 = 7 + 2 * 26.5
    assert len({words[30] for words in first}) > 1
    assert all(a[0] != b[0] and len(a) == len(b) for a, b in zip(first, second, strict=True))


def test_random_ids_have_exact_lengths(measure: Measure) -> None:
    with StandIn(lambda body, number: talk(body)) as server:
        options = ("--endpoint", "completions", "--token-ids", "50", "--concurrency", "1")
        measure(server.url, *options)
        prompts = [body["prompt"] for body in server.bodies[WARM_UPS:]]
        assert server.heads[-1].startswith("POST /v1/completions ")
        assert 49 in server.bodies[0]["prompt"]  # whoever has no such token says so at once
    drawn, _ = draw_workload(6, (20, 40), (4, 8), 50)
    assert [*map(len, prompts)] == [*map(len, drawn)]
    assert all(0 <= i < 50 for prompt in prompts for i in prompt)


def test_completions_are_read_too(measure: Measure) -> None:
    def answer(body: dict[str, Any], number: int) -> Steps:
        words = b'data: {"choices": [{"text": "a"}], "usage": null}\n\n' * body["max_tokens"]
        yield 0.0, STREAM + chunk(words)
        yield 0.0, chunk(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n') + END

    with StandIn(answer) as server:
        run = only_run(measure(server.url, "--endpoint", "completions", "--concurrency", "1"))
        assert isinstance(server.bodies[-1]["prompt"], str)
    assert run["output_tokens"] == sum(draw_workload(6, (20, 40), (4, 8), 105)[1])


@pytest.mark.size("full")
def test_a_connection_that_has_idled_is_not_used_again(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers close those that do, some after a few seconds, and just when a request is sent."""
    assert connection._IDLE == 1.0
    monkeypatch.setattr(connection, "_IDLE", 0.4)
    # The second comes when the first has been answered, and before its connection has idled.
    arrivals = [0.5, 0.7, 1.3]
    monkeypatch.setattr("nanoserve.cli.bench.serve.measure.poisson_arrivals", lambda *_: arrivals)
    with StandIn(lambda body, number: talk(body)) as server:
        measure(server.url, "--request-rate", "3", "--num-seqs", "3")
        assert server.num_connections == 3


def test_it_imports_no_torch() -> None:
    """A client that shares the server's machine takes as little of it as it can."""
    code = "import nanoserve.cli.bench.serve.measure, sys; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "matplotlib"} & set(shown.stdout.split())


def test_loads_are_drawn(measure: Measure, tmp_path: Path) -> None:
    """Needs the extra `bench`."""
    pytest.importorskip("matplotlib", reason="pip install 'nanoserve[bench]'")
    file = tmp_path / "loads.png"
    with StandIn(lambda body, number: talk(body)) as server:
        measure(server.url, "--concurrency", "1,2", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
