"""A prefill engine and a decode engine: the same tokens as one engine, whatever happens."""

import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_pair import (
    counter,
    decode_options,
    prefill_server,
    stats_of,
    wait_for_leases,
)
from kv_workload import OPTIONS, answers, workload
from serving import served, wait_until
from tiny_checkpoints import make_qwen3
from windowed_models import make_windowed

from nanoserve import LLM, SamplingParams
from nanoserve.cli.main import main
from nanoserve.features.kv_transfer.pair import outage
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.worker.model_runner import ModelRunner

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PROMPT = [*range(61)]  # 15 full blocks, and the last token
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "torch": {"attention_backend": "torch"},
    "async": {"async_scheduling": True},
    "int8": {"kv_cache_dtype": "int8"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "host tier": {"kv_offloading_size": 0.002},
}


@pytest.mark.small(kind=["plain", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_one_engine(kind: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    options = {**OPTIONS, **KINDS[kind]}
    with LLM(tmp_path, **options) as llm:
        expected = answers(llm)
    with prefill_server(tmp_path, **options) as server:
        with LLM(tmp_path, **options, **decode_options(server)) as llm:
            assert answers(llm) == expected
            stats = stats_of(llm)
            assert stats.num_failed == stats.num_late == 0
            assert stats.hits > 50
            assert counter(llm, "kv_prefill_failed_requests") == 0
        wait_for_leases(server.llm)


@pytest.mark.small(name=["gemma2"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_groups_of_layers(name: str, tmp_path: Path) -> None:
    make_windowed(name, tmp_path)
    options = OPTIONS | {"num_kv_blocks": 130}
    with LLM(tmp_path, **options) as llm:
        expected = answers(llm)
    with prefill_server(tmp_path, **options) as server:
        with LLM(tmp_path, **options, **decode_options(server, patience=0.05)) as llm:
            assert answers(llm) == expected
            assert stats_of(llm).hits
        wait_for_leases(server.llm)


def test_the_decode_engine_computes_the_last_token_only(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    with prefill_server(tmp_path, **OPTIONS) as server:
        with LLM(tmp_path, **OPTIONS, **decode_options(server)) as llm:
            (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
            assert output.num_cached_tokens == 60 and llm.stats.num_computed_tokens == 1
        assert server.bodies == [{"prompt": PROMPT[:60], "max_tokens": 1, "temperature": 0}]
        wait_for_leases(server.llm)
        assert server.counter("kv_lease_confirmed") == 1
        assert server.counter("kv_lease_sent_blocks") == 15


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=str)
def test_what_the_prefill_engine_has_is_sent_again(options: Any, tmp_path: Path) -> None:
    """It drops what it has sent, and finds it in its KV cache."""
    make_qwen3(tmp_path)
    with prefill_server(tmp_path, **OPTIONS, **options) as server:
        expected = server.llm.generate(PROMPT, ONE, use_tqdm=False)[0].outputs[0].token_ids
        for _ in range(2):
            with LLM(tmp_path, **OPTIONS, **decode_options(server)) as llm:
                (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
                assert output.outputs[0].token_ids == expected
                assert output.num_cached_tokens == 60
            wait_for_leases(server.llm)


def test_blocks_are_sent_before_the_prompt_is_complete(tmp_path: Path) -> None:
    """The answer of the prefill server is not waited for."""
    make_qwen3(tmp_path)
    with prefill_server(tmp_path, **OPTIONS) as server:

        def compute_and_stay(body: dict[str, Any]) -> int:
            server.llm.generate({"prompt_token_ids": body["prompt"]}, ONE, use_tqdm=False)
            may_go_on.wait(20)
            return 503

        may_go_on, server.before = threading.Event(), compute_and_stay
        with LLM(tmp_path, **OPTIONS, **decode_options(server)) as llm:
            (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
            assert output.num_cached_tokens == 60
            may_go_on.set()


def test_only_blocks_of_leases_are_kept(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    with prefill_server(tmp_path, **OPTIONS) as server:
        server.llm.generate([PROMPT, [7] * 40], ONE, use_tqdm=False)
        assert server.counter("kv_connector_stored_blocks") == 0


@pytest.mark.parametrize("case", ["short", "prompt_logprobs", "known"])
def test_what_stays_here(case: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with prefill_server(tmp_path, **OPTIONS) as server:
        with LLM(tmp_path, **OPTIONS, **decode_options(server)) as llm:
            if case == "known":
                llm.generate(PROMPT, ONE, use_tqdm=False)
            length = 8 if case == "short" else 61  # one full block before the last token
            is_logged = case == "prompt_logprobs"
            llm.generate(PROMPT[:length], params if is_logged else ONE, use_tqdm=False)
        assert len(server.bodies) == (case == "known")


def test_tenants_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSERVE_API_KEY", "sesame")
    make_qwen3(tmp_path)
    options: dict[str, Any] = {**OPTIONS, "kv_cache_dtype": "int8"}  # is in the key, too
    with prefill_server(tmp_path, **options) as server:
        with LLM(tmp_path, **options, **decode_options(server)) as llm:
            for salt in ("a", "b"):
                prompt = {"prompt_token_ids": PROMPT, "cache_salt": salt}
                (output,) = llm.generate(prompt, ONE, use_tqdm=False)  # type: ignore[arg-type]
                assert output.num_cached_tokens == 60
        assert [body["cache_salt"] for body in server.bodies] == ["a", "b"]
        assert server.keys == ["Bearer sesame"] * 2
        assert server.llm.stats.num_computed_tokens >= 120


def test_many_prompts_at_once(tmp_path: Path) -> None:
    """More than there are threads, with one beginning and different ends, in a small buffer."""
    make_qwen3(tmp_path)
    prompts = [[*range(20), *([number] * 30), number] for number in range(30)]
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=4, ignore_eos=True)
    with LLM(tmp_path, **OPTIONS) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with prefill_server(tmp_path, **OPTIONS) as server:
        options = decode_options(server)
        options["kv_transfer_config"]["kv_buffer_size"] = 40 * block_bytes(server)
        with LLM(tmp_path, **OPTIONS, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert stats_of(llm).hits > 20
            assert counter(llm, "kv_prefill_failed_requests") == 0
        wait_for_leases(server.llm)


# ---------------------------------------------------------------- misfortunes


@pytest.mark.parametrize(
    "trouble", ["down", "status", "busy", "long", "silent", "late", "full", "half"]
)
def test_trouble_costs_time_and_no_request(trouble: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    prompts = [PROMPT, [5] * 50, [6] * 50]
    with LLM(tmp_path, **OPTIONS) as llm:
        outputs = llm.generate(prompts, ONE, use_tqdm=False)
        expected = [output.outputs[0].token_ids for output in outputs]
    small: dict[str, Any] = {}
    with prefill_server(tmp_path, **OPTIONS) as server:
        if trouble == "full":
            small = {"kv_buffer_size": 14 * block_bytes(server)}
    with prefill_server(tmp_path, **OPTIONS, kv_transfer_config=small) as server:
        may_go_on = threading.Event()

        def misbehave(body: dict[str, Any]) -> int | None:
            if trouble == "late":
                may_go_on.wait(20)
            if trouble == "half":
                half = {"prompt_token_ids": body["prompt"][:-20]}
                server.llm.generate(half, ONE, use_tqdm=False)
            return {"status": 404, "busy": 429, "long": 400, "silent": 200, "half": 200}.get(
                trouble
            )

        if trouble != "full":
            server.before = misbehave
        options = decode_options(server, load_timeout=0.3 if trouble == "late" else 20)
        if trouble in ("half", "silent"):
            options = decode_options(server, patience=0.3)
        if trouble == "down":
            options["kv_transfer_config"]["kv_ip"] = str(tmp_path / "nothing")
        with LLM(tmp_path, **OPTIONS, **options) as llm:
            outputs = llm.generate(prompts, ONE, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            if trouble == "late":  # a busy machine may note it after the engine has gone on
                wait_until(lambda: counter(llm, "kv_prefill_failed_requests") > 0)
            may_go_on.set()
            counts = {each: counter(llm, f"kv_prefill_{each}") for each in COUNTED}
        assert counts["received_blocks"] == {"half": 24, "full": 7}.get(trouble, 0)
        assert (counts["failed_requests"] > 0) == (trouble in ("status", "late", "silent"))
        assert (counts["refused_requests"] > 0) == (trouble in ("busy", "long", "full"))
        assert counts["local_prompts"] == 3 or trouble != "down"
        wait_for_leases(server.llm)


COUNTED = ("requests", "failed_requests", "refused_requests", "local_prompts", "received_blocks")


def block_bytes(server: Any) -> int:
    return int(server.llm.engine.executor.host_pool.place_bytes)


@pytest.mark.parametrize("difference", ["weights", "data type", "block size"])
def test_unequal_engines_share_nothing(
    difference: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_qwen3(tmp_path / "a")
    make_qwen3(tmp_path / "b", seed=1 if difference == "weights" else 0)
    options: dict[str, Any] = dict(OPTIONS)
    if difference != "weights":
        change = {"data type": ("kv_cache_dtype", "int8"), "block size": ("block_size", 8)}
        options |= [change[difference]]
    with LLM(tmp_path / "b", **options) as llm:
        expected = llm.generate(PROMPT, ONE, use_tqdm=False)[0].outputs[0].token_ids
    with prefill_server(tmp_path / "a", **OPTIONS) as server:
        with LLM(tmp_path / "b", **options, **decode_options(server)) as llm:
            (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
            assert output.outputs[0].token_ids == expected and not output.num_cached_tokens
        assert server.counter("kv_lease_rejected_connections") and not server.bodies
    assert "prompts are computed here" in caplog.text


@pytest.mark.parametrize("moment", ["before the blocks", "after some blocks"])
def test_a_request_is_aborted_while_its_prompt_is_computed(moment: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    with prefill_server(tmp_path, **OPTIONS) as server:
        is_there, may_go_on = threading.Event(), threading.Event()

        def stay(body: dict[str, Any]) -> None:
            if moment != "before the blocks":
                start = {"prompt_token_ids": body["prompt"][:30]}
                server.llm.generate(start, ONE, use_tqdm=False)
            is_there.set()
            may_go_on.wait(20)

        server.before = stay
        with LLM(tmp_path, **OPTIONS, **decode_options(server)) as llm:
            engine = llm.engine
            for name in ("a", "b"):  # the second one follows the first
                engine.add_request(name, PROMPT, ONE)
            engine.step()
            assert is_there.wait(20) and len(engine.scheduler.held) == 2
            engine.abort_request("a")
            outputs = []
            while engine.has_unfinished_requests():  # "b" does not wait for the first load
                outputs += engine.step()
            assert [output.request_id for output in outputs if output.finished] == ["b"]
            wait_for_leases(server.llm)
            may_go_on.set()
            engine.scheduler.check()


def test_an_engine_is_closed_while_it_waits(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    with prefill_server(tmp_path, **OPTIONS) as server:
        is_there, may_go_on = threading.Event(), threading.Event()

        def stay(body: dict[str, Any]) -> None:
            is_there.set()
            may_go_on.wait(20)

        server.before = stay
        with LLM(tmp_path, **OPTIONS, **decode_options(server)) as llm:
            llm.engine.add_request("a", PROMPT, ONE)
            llm.engine.step()
            assert is_there.wait(20)
            began = time.monotonic()
        assert time.monotonic() - began < 5
        wait_for_leases(server.llm)
        may_go_on.set()


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=str)
def test_random_trouble(
    options: dict[str, Any],
    by_size: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a tiny pool, with preemption: prompts fail, are late, come in part, and are aborted."""
    monkeypatch.setattr(outage, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(outage, "_LONGEST_PAUSE", 0.01)
    make_qwen3(tmp_path)
    num_requests = by_size(40, 150, 600)
    prompts, params = workload(num_requests)
    options = {**OPTIONS, **options}
    with LLM(tmp_path, **options) as llm:
        expected = answers(llm, num_requests)
    rng, lock = random.Random(0), threading.Lock()
    with prefill_server(tmp_path, **options) as server:

        def misbehave(body: dict[str, Any]) -> int | None:
            with lock:
                trouble = rng.choice([None, None, None, "fail", "busy", "part", "late"])
            if trouble in ("part", "late"):
                start = {"prompt_token_ids": body["prompt"][: len(body["prompt"]) // 2]}
                server.llm.generate(start, ONE, use_tqdm=False)
            time.sleep(0.1 if trouble == "late" else 0)
            return {"fail": 500, "busy": 429, "part": 200, "late": 200}.get(trouble or "")

        server.before = misbehave
        ours = decode_options(server, patience=0.02)
        with LLM(tmp_path, **options, **ours) as llm:
            engine, finished = llm.engine, {}
            is_aborted = [rng.random() < 0.1 for _ in prompts]
            for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                engine.add_request(str(number), prompt, param)
                for _ in range(rng.randrange(4)):
                    outputs = engine.step()
                    finished |= {int(o.request_id): o for o in outputs if o.finished}
                if is_aborted[number]:
                    engine.abort_request(str(number))
            while engine.has_unfinished_requests():
                finished |= {int(o.request_id): o for o in engine.step() if o.finished}
            for number, output in finished.items():
                is_right = [each.token_ids for each in output.outputs] == expected[number]
                assert is_right or is_aborted[number]
            assert all(n in finished or is_aborted[n] for n in range(num_requests))
            engine.scheduler.check()
            assert stats_of(llm).hits
        wait_for_leases(server.llm)
        server.llm.engine.scheduler.check()


# ---------------------------------------------------------------- options


URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_role": "kv_both"}, "needs kv_role='kv_producer' for the engine that computes"),
        ({"kv_role": "kv_consumer"}, "prefill_server=None must be a URL such as 'http://"),
        ({"prefill_server": "localhost:8000"}, "prefill_server='localhost:8000' must be a URL"),
        ({"prefill_server": "http://"}, "must be a URL"),
        ({"prefill_server": "ftp://x"}, "must be a URL"),
        ({"prefill_server": "http://a..b"}, "must be a URL"),
        ({"prefill_server": "http://x:99999"}, "must be a URL .*Port out of range"),
        ({"prefill_server": f"{URL}/v1"}, "without a path"),
        ({"prefill_server": "http://me:secret@x"}, "without a path, a query or a name"),
        ({"prefill_server": URL, "min_tokens": 0}, "min_tokens=0"),
        ({"prefill_server": URL, "patience": 0}, "patience=0"),
        ({"prefill_server": URL, "lease_timeout": 3}, r"has no options \['lease_timeout'\]"),
        ({"kv_role": "kv_producer", "prefill_server": URL}, r"no options \['prefill_server'\]"),
        ({"kv_role": "kv_producer", "lease_timeout": 0}, "lease_timeout=0"),
        ({"kv_role": "kv_producer", "kv_ip": "203.0.113.9"}, "cannot be sent from 203.0.113.9"),
        ({"kv_role": "kv_producer", "kv_port": "in use"}, "Address already in use; choose kv_ip"),
    ],
)
def test_bad_options_are_rejected_before_weights_are_read(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path)
    monkeypatch.setattr(ModelRunner, "load", lambda *args: pytest.fail("weights are read"))
    transfer = {"kv_connector": "socket", "kv_role": "kv_consumer"}
    transfer |= {name: value for name, value in options.items() if name.startswith("kv_")}
    extra = {name: value for name, value in options.items() if name not in transfer}
    with socket.create_server(("127.0.0.1", 0)) as in_use:
        if transfer.get("kv_port") == "in use":
            transfer["kv_port"] = in_use.getsockname()[1]
        transfer["kv_connector_extra_config"] = extra
        with pytest.raises(ValueError, match=message):
            LLM(tmp_path, kv_transfer_config=transfer, **OPTIONS)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
    for other in (["--kv-transfer-config", "{}"], ["--kv-offloading-path", "x"]):
        assert main(["serve", "tiny-qwen3", "--port", "0", "--prefill-server", URL, *other]) != 0
        assert (
            f"--prefill-server and {other[0]} both name a KV connector" in capsys.readouterr().err
        )
    arguments = ["serve", "tiny-qwen3", "--port", "0", "--prefill-server", "nothing"]
    assert main(arguments) != 0
    assert "prefill_server='nothing' must be a URL" in capsys.readouterr().err


def test_the_prefill_server_of_nanoserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It needs an API key, and takes a prompt that it must not cut."""
    pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
    monkeypatch.setenv("NANOSERVE_API_KEY", "sesame")
    options: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 100, "max_model_len": 512}
    kv_ip = f"{tempfile.mkdtemp(prefix='kv')}/kv"
    transfer = {"kv_connector": "socket", "kv_ip": kv_ip}
    producer = transfer | {"kv_role": "kv_producer"}
    prefill = AsyncLLM("tiny-qwen3", kv_transfer_config=producer, **options)
    prompt = [*range(300, 700)]
    with LLM("tiny-qwen3", **options) as llm:
        expected = llm.generate(prompt, ONE, use_tqdm=False)[0].outputs[0].token_ids
    with served(prefill, api_key=["sesame"], max_queue=5) as server:
        extra = {"prefill_server": server.url}
        consumer = transfer | {"kv_role": "kv_consumer", "kv_connector_extra_config": extra}
        with LLM("tiny-qwen3", kv_transfer_config=consumer, **options) as llm:
            (output,) = llm.generate(prompt, ONE, use_tqdm=False)
            assert output.outputs[0].token_ids == expected
            assert output.num_cached_tokens == 384
            assert counter(llm, "kv_prefill_failed_requests") == 0
    prefill.shutdown()
