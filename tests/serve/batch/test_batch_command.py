"""`nanoserve batch`: the answers are the server's, and every line gets one."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batch_files import (
    OPTIONS,
    answers,
    line,
    small_requests,
    start,
    texts,
    without_names,
    write,
)
from serving import served, wait_until

from nanoserve.cli.main import main

pytest.importorskip("fastapi", reason="a batch needs pip install 'nanoserve[serve]'")

from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.batch.local_runner import answer_here
from nanoserve.serve.batch.request_executor import Answered
from nanoserve.serve.batch.requests import BatchLine

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "What is 12 + 30?"}]
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"town": {"enum": ["Paris", "Rome"]}},
        "required": ["town"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0, "max_tokens": 8}
GUIDED = [
    line("json", CHAT, messages=ASKED, response_format={"type": "json_object"}, **GREEDY),
    line("choice", prompt="I say", guided_choice=["yes", "no"], **GREEDY),
    line(
        "tool",
        CHAT,
        messages=ASKED,
        tools=[{"type": "function", "function": WEATHER}],
        tool_choice="required",
        temperature=0,
        max_tokens=60,
    ),
]
REQUESTS = [
    line("text", prompt="A KV cache", **GREEDY),
    line("ids", prompt=[5, 6, 7], **GREEDY),
    line("several", prompt=["A KV cache", "A block", "A block"], n=2, **GREEDY),
    line("echo", prompt="A KV cache", echo=True, logprobs=2, **GREEDY),
    line("prompt", prompt="A KV cache", prompt_logprobs=1, **GREEDY),
    line("stop", prompt="one two three", stop=["e"], **GREEDY),
    line("chat", CHAT, messages=ASKED, **GREEDY),
    line("logprobs", CHAT, messages=ASKED, logprobs=True, top_logprobs=3, **GREEDY),
    line("seed", CHAT, messages=ASKED, seed=3, temperature=1, n=3, max_tokens=8),
    line("named", CHAT, model="tiny", messages=ASKED, **GREEDY),
    # What is refused, with the status that a client would get.
    line("no model", model="gpt-5", prompt="A KV cache"),
    line("long", prompt="word " * 3000),
    line("too much", prompt="word", max_tokens=5000),
    line("wrong", prompt="A KV cache", temperature="hot"),
    line("missing", CHAT),
    line("unknown", prompt="A KV cache", best_of=3),
    line("prompt of none", prompt=[]),
]


def post(url: str, body: Any) -> tuple[int, dict[str, Any]]:
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(scope="module")
def server():
    options = {"dtype": "float32", "max_num_seqs": 32, "num_kv_blocks": 1000}
    llm = AsyncLLM("tiny-qwen3", max_model_len=1024, **options)
    with served(llm, served_model_name=["tiny-qwen3", "tiny"]) as one:
        yield one
    llm.shutdown()


def run(source: Path, out: Path, *arguments: str) -> int:
    """In this process; the engine, too, which starts sooner."""
    ours = ["--served-model-name", "tiny-qwen3", "tiny", "--no-engine-process"]
    return main(["batch", str(source), str(out), *OPTIONS, *ours, *arguments])


def check_answers(
    requests: list[dict[str, Any]], tmp_path: Path, server: Any, *arguments: str
) -> dict[str, dict[str, Any]]:
    source, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    run(source, out, *arguments)
    found = answers(out)
    assert found.keys() == {each["custom_id"] for each in requests}
    for each in requests:
        written = found[each["custom_id"]]
        response = written["response"]
        assert written["id"].startswith("batch_req_") and response["request_id"]
        status, body = post(server.url + each["url"], each["body"])
        assert response["status_code"] == status, written
        assert without_names(response["body"]) == without_names(body)
        if status == 200:
            assert written["error"] is None
        else:
            assert written["error"]["message"] == body["error"]["message"]
            assert written["error"]["code"]
    return {each["custom_id"]: found[each["custom_id"]] for each in requests}


def test_answers_are_those_of_the_server(tmp_path: Path, server: Any) -> None:
    check_answers(REQUESTS, tmp_path, server)


POOLED = [
    line("embeddings", "/v1/embeddings", input=["A KV cache", "A block"], dimensions=8),
    line("base64", "/v1/embeddings", input="A KV cache", encoding_format="base64"),
    line("score", "/score", text_1="A KV cache", text_2=["A block", "A KV cache"]),
    line("rerank", "/v1/rerank", query="A KV cache", documents=["A block", "A KV cache"]),
    line("dimensions", "/v1/embeddings", input="A KV cache", dimensions=100_000),
    line("chat", CHAT, messages=ASKED),
]


def test_a_model_that_pools_answers_files_too(tmp_path: Path) -> None:
    options: Any = {"dtype": "float32", "max_num_seqs": 32, "num_kv_blocks": 1000}
    llm = AsyncLLM("tiny-qwen3", runner="pooling", max_model_len=1024, **options)
    try:
        with served(llm, served_model_name=["tiny-qwen3", "tiny"]) as server:
            found = check_answers(POOLED, tmp_path, server, "--runner", "pooling")
    finally:
        llm.shutdown()
    statuses = {key: each["response"]["status_code"] for key, each in found.items()}
    assert [key for key, status in statuses.items() if status == 200] == list(statuses)[:4]


def test_formats_and_tools_are_those_of_the_server(tmp_path: Path, server: Any) -> None:
    pytest.importorskip("llguidance", reason="formats need pip install 'nanoserve[guided]'")
    check_answers(GUIDED, tmp_path, server)
    found = answers(tmp_path / "out.jsonl")
    (choice,) = found["tool"]["response"]["body"]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["town"] in ("Paris", "Rome")


def test_lines_that_no_server_would_see(tmp_path: Path, capsys: Any) -> None:
    good = line("good", prompt="A KV cache", max_tokens=2)
    wrong = {
        "method": good | {"custom_id": "method", "method": "GET"},
        "url": line("url", "/v1/responses", input="x"),
        "body": good | {"custom_id": "body", "body": ["x"]},
        "stream": line("stream", prompt="x", stream=True),
        "nothing": {"custom_id": "nothing"},
    }
    source = write(tmp_path / "in.jsonl", [good, *wrong.values(), "no JSON", good])
    out = tmp_path / "out.jsonl"
    for _ in range(2):  # the second run has nothing to do, and says the same
        assert run(source, out) == 1
        found = answers(out)
        assert found.keys() == {"good", *wrong}
        assert found["good"]["response"]["status_code"] == 200
        for name in ("method", "url", "body", "stream"):
            assert found[name]["response"]["status_code"] == 400
            assert found[name]["response"]["body"]["error"]["param"] == name
            assert name in found[name]["error"]["message"]
        told = capsys.readouterr().err
        assert f"{source}:7: the line is not JSON" in told
        assert f"{source}:8: custom_id='good' is not unique" in told
        assert "6 answers" in told and "5 of them errors" in told and "2 invalid lines" in told
    assert ", 6 of them from earlier runs" in told


def test_samples_do_not_depend_on_what_ran_before_or_beside(tmp_path: Path) -> None:
    """On the name of a line and on the engine's seed."""
    requests = small_requests(40)
    outs = [tmp_path / f"{name}.jsonl" for name in ("all", "again", "other")]
    source = write(tmp_path / "in.jsonl", requests)
    assert run(source, outs[0]) == 0
    shuffled = write(tmp_path / "shuffled.jsonl", random.Random(1).sample(requests, 40))
    assert run(shuffled, outs[1], "--max-num-seqs", "3") == 0
    assert texts(outs[0]) == texts(outs[1])
    assert run(source, outs[2], "--seed", "1") == 0
    assert texts(outs[2]) != texts(outs[0])


def test_one_line_of_equal_prompts_is_sampled_apart(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line("a", prompt=["A"] * 8, temperature=1, max_tokens=8)])
    assert run(source, tmp_path / "out") == 0
    choices = answers(tmp_path / "out")["a"]["response"]["body"]["choices"]
    assert len({choice["text"] for choice in choices}) > 1


def test_files_may_be_named_as_for_vllm(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line("a", prompt="x", max_tokens=1)])
    flags = ["-i", str(source), "-o", str(tmp_path / "out"), "--model", "tiny-qwen3"]
    assert main(["batch", *flags, *OPTIONS, "--no-engine-process"]) == 0
    assert answers(tmp_path / "out").keys() == {"a"}


def test_what_the_page_shows_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "batch-jobs.md").read_text("utf-8")
    shown = [text for text in page.splitlines() if text.startswith('{"custom_id"')]
    assert len(shown) == 2
    assert run(write(tmp_path / "requests.jsonl", shown), tmp_path / "answers.jsonl") == 0
    (form,) = [json.loads(text) for text in page.splitlines() if text.startswith('{"id"')]
    for answer in answers(tmp_path / "answers.jsonl").values():
        assert answer.keys() == form.keys() and answer["response"].keys() == form["response"].keys()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["IN"], "OUT is set 0 times"),
        (["IN", "OUT", "-o", "OUT"], "OUT is set 2 times"),
        (["missing", "OUT"], "missing is not a file"),
        (["IN", "IN"], "is the input"),
        (["IN", "no/folder/OUT"], "No such file or directory"),
        (["IN", "OUT", "--replicas", "0"], "replicas=0"),
        (["IN", "OUT", "--grace-period", "-1"], "grace_period=-1"),
        (["IN", "OUT", "--model", "no-such-model"], "no-such-model"),
        (["IN", "OUT", "--max-model-len", "1"], "max_model_len=1"),
        (["IN", "OUT", "--tool-call-parser", "x"], "tool_call_parser='x'"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(
    arguments: list[str], told: str, tmp_path: Path, capsys: Any
) -> None:
    write(tmp_path / "IN", [line("a", prompt="x")])
    files = {"IN", "OUT", "missing", "no/folder/OUT"}
    given = [str(tmp_path / each) if each in files else each for each in arguments]
    before = (tmp_path / "IN").read_bytes()
    assert main(["batch", *given, "--no-engine-process"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("nanoserve batch: ") and told in error
    assert (tmp_path / "IN").read_bytes() == before


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("fastapi", "serve", []),
        pytest.param("ray.data", "ray", ["--replicas", "2"], marks=pytest.mark.size("full")),
    ],
)
def test_without_its_packages_it_says_what_to_install(
    package: str, extra: str, arguments: list[str], tmp_path: Path
) -> None:
    """In another process: what was imported stays imported."""
    source = write(tmp_path / "in", [line("a", prompt="x")])
    code = f"import sys; sys.modules[{package!r}] = None; from nanoserve.cli.main import main; "
    code += f"sys.exit(main(['batch', {str(source)!r}, {str(tmp_path / 'out')!r}, *{arguments}]))"
    if package == "ray.data":
        code = "import sys; sys.modules['ray'] = None; " + code
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2
    assert f"pip install 'nanoserve[{extra}]'" in ended.stderr


# ---------------------------------------------------------------- stopping, and going on


@pytest.mark.size("full")  # two starts of an engine
@pytest.mark.full(number=[signal.SIGTERM])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_what_runs_end(number: int, tmp_path: Path) -> None:
    """And the same command goes on."""
    wishes = {"prompt": "A KV cache", "ignore_eos": True, "temperature": 0}
    requests = [line(f"{n}", max_tokens=100, **wishes) for n in range(300)]
    source, out = write(tmp_path / "in", requests), tmp_path / "out"
    with start(source, out) as process:
        try:
            wait_until(lambda: out.exists() and out.stat().st_size > 0, 60)
            process.send_signal(number)
            assert process.wait(60) == 128 + number
            told = process.stderr.read()
        finally:
            process.kill()
    assert "run the same command again to resume" in told
    done = answers(out)
    # Those that ran, or waited for a slot; not all.
    assert 32 <= len(done) < 300
    assert {each["response"]["status_code"] for each in done.values()} == {200}
    before = out.read_bytes()
    with start(source, out, "--grace-period", "0") as process:
        try:
            wait_until(lambda: out.stat().st_size > len(before), 60)
            process.send_signal(number)
            assert process.wait(20) == 128 + number
        finally:
            process.kill()
    assert out.read_bytes().startswith(before)
    assert len(answers(out)) < 300


def test_no_more_lines_are_read_than_are_under_way() -> None:
    """And one is begun whenever another ends."""
    begun, ended, taken = count(1), [], []
    rng = random.Random(0)

    def lines():
        for number in range(100):
            assert next(begun) - len(ended) <= 2 * 3
            yield BatchLine(number, f"{number}", {}, "")

    async def answer(asked: BatchLine) -> Answered:
        for _ in range(rng.randrange(5)):
            await asyncio.sleep(0)
        ended.append(asked.number)
        return Answered(asked.number, b"x", "")

    config = SimpleNamespace(max_num_seqs=3)
    engine = SimpleNamespace(config=config)
    answerer: Any = SimpleNamespace(llm=SimpleNamespace(engine=engine), answer=answer)
    assert asyncio.run(answer_here(answerer, lines(), taken.append, 5)) == 0
    assert sorted(each.number for each in taken) == list(range(100))


@pytest.mark.parametrize("where", ["answer", "take"])
def test_an_error_ends_it(where: str) -> None:
    """Be it that the engine has died, or that the disk is full."""

    async def answer(asked: BatchLine) -> Answered:
        await asyncio.sleep(0.001 if asked.number else 0)
        if where == "answer":
            raise RuntimeError("the engine is not running")
        return Answered(asked.number, b"x", "")

    def take(answered: Answered) -> None:
        raise OSError("no space left")

    engine = SimpleNamespace(config=SimpleNamespace(max_num_seqs=4))
    answerer: Any = SimpleNamespace(llm=SimpleNamespace(engine=engine), answer=answer)
    lines = (BatchLine(number, f"{number}", {}, "") for number in range(50))
    with pytest.raises(RuntimeError if where == "answer" else OSError):
        asyncio.run(answer_here(answerer, lines, take, 5))
    assert len(list(lines)) > 30  # the others were not begun


@pytest.mark.size("full")
def test_who_is_killed_goes_on_where_it_was(tmp_path: Path, by_size: Callable[..., Any]) -> None:
    """With -9, at random moments: every line is answered once, and as without."""
    number, parts = by_size((300, [0.5]), (300, [0.3, 0.6]), (5000, [0.2, 0.5, 0.8]))
    requests = small_requests(number)
    source, out = write(tmp_path / "in", requests), tmp_path / "out"
    rng = random.Random(os.getpid())
    num_before = 0
    for part in parts:
        aim = num_before + (part + rng.uniform(-0.15, 0.15)) * (number - num_before)
        with start(source, out) as process:
            wait_until(lambda: _num_lines(out) > num_before, 60)  # noqa: B023
            wait_until(lambda: _num_lines(out) >= aim or process.poll() is not None, 120)  # noqa: B023
            process.kill()
        left = out.read_bytes()
        out.write_bytes(left + left[: rng.randrange(1, 100)])  # as if torn in the middle
        num_before = left.count(b"\n")
    process = start(source, out)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    assert f"{num_before:,} of them from earlier runs" in told
    assert answers(out).keys() == {each["custom_id"] for each in requests}
    undisturbed = tmp_path / "undisturbed"
    assert run(source, undisturbed, "--max-num-seqs", "20") == 0
    assert texts(out) == texts(undisturbed)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
