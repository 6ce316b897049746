"""`--enable-dev-endpoints`, and the methods of `AsyncLLM` behind these endpoints."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
from serving import JSON, Served, ask, served

from nanoserve import SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.cli.serve import parse_args
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.engine_thread import EngineAsleepError
from nanoserve.serve.http.settings import ServerSettings

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 300, "max_model_len": 512}
BODY = {"model": "tiny", "prompt": "The KV cache", "max_tokens": 8, "temperature": 0}
LONG = BODY | {"max_tokens": 300, "ignore_eos": True}
LEVELS = [1, 2]


@pytest.fixture(scope="module", params=[False, True], ids=["thread", "process"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    llm = AsyncLLM("tiny-qwen3", engine_process=request.param, **OPTIONS)
    with served(llm, enable_dev_endpoints=True) as one:
        yield one
    llm.shutdown()


def post(server: Served, path: str, headers: Any = None, body: bytes = b"") -> tuple[int, Any]:
    status, _, answer = ask(server, path, body, headers)
    return status, answer


def get(server: Served, path: str) -> Any:
    status, _, answer = ask(server, path, b"", None, "GET")
    assert status == 200
    return answer


def text_of(server: Served, body: dict[str, Any] = BODY) -> str:
    status, _, answer = ask(server, "/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


class Asking(threading.Thread):
    """A request in another thread."""

    def __init__(self, server: Served, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._server, self._body = server, body
        self.start()

    def run(self) -> None:
        _, _, self.answer = ask(self._server, "/v1/completions", self._body)

    def choice(self) -> dict[str, Any]:
        self.join(60)
        assert not self.is_alive()
        return self.answer["choices"][0]


def test_a_pause_keeps_or_aborts_what_runs(server: Served) -> None:
    expected = text_of(server, LONG)
    assert get(server, "/is_paused") == {"is_paused": False}
    asking = Asking(server, LONG)
    time.sleep(0.1)
    assert post(server, "/pause?mode=keep") == (200, {"status": "paused"})
    assert get(server, "/is_paused") == {"is_paused": True}
    waiting = Asking(server, BODY)
    time.sleep(0.3)
    assert waiting.is_alive()
    assert post(server, "/resume") == (200, {"status": "resumed"})
    assert asking.choice()["text"] == expected
    assert waiting.choice()["text"]
    asking = Asking(server, LONG)
    time.sleep(0.1)
    assert post(server, "/pause?clear_cache=true", JSON, b"{}")[0] == 200
    asking.join(60)
    assert not asking.is_alive()  # ended by the pause, if it had not ended before
    assert post(server, "/resume")[0] == 200
    assert text_of(server, LONG) == expected


@pytest.mark.parametrize("level", LEVELS)
def test_it_sleeps_and_answers_the_same_afterwards(server: Served, level: int) -> None:
    expected = text_of(server)
    assert get(server, "/is_sleeping") == {"is_sleeping": False}
    assert post(server, f"/sleep?level={level}")[0] == 200
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else BODY
        status, headers, answer = ask(server, path, body)
        assert status == 503 and headers["retry-after"]
        assert answer["error"]["code"] == "engine_asleep"
        assert "wake_up() first; missing: weights, kv_cache" in answer["error"]["message"]
    for path in ("/health", "/metrics", "/v1/models"):  # these need no weights
        assert ask(server, path, b"", None, "GET")[0] == 200
    assert post(server, "/wake_up?tags=weights")[0] == 200
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    assert "missing: kv_cache" in ask(server, "/v1/completions", BODY)[2]["error"]["message"]
    assert post(server, "/wake_up?tags=kv_cache&tags=weights")[0] == 200
    assert get(server, "/is_sleeping") == {"is_sleeping": False}
    assert text_of(server) == expected
    assert post(server, "/wake_up")[0] == 200  # awake already


def test_sleep_aborts_what_runs(server: Served) -> None:
    asking = Asking(server, LONG)
    time.sleep(0.1)
    assert post(server, "/sleep")[0] == 200
    asking.join(60)
    assert not asking.is_alive()
    assert post(server, "/wake_up")[0] == 200
    assert text_of(server)


def test_the_prefix_cache_is_reset(server: Served) -> None:
    long = BODY | {"prompt": "The KV cache keeps keys and values. " * 8}

    def num_cached() -> int:
        usage = ask(server, "/v1/completions", long)[2]["usage"]
        return (usage["prompt_tokens_details"] or {})["cached_tokens"]

    num_cached()
    for query in ("reset_running_requests=true", "reset_connector=true", "reset_connector=false"):
        assert num_cached() > 0
        assert post(server, f"/reset_prefix_cache?{query}")[0] == 200
        assert num_cached() == 0


def test_weights_are_replaced_awake_and_asleep(server: Served, tmp_path: Path) -> None:
    folder, before = bundled_checkpoint("tiny-qwen3"), text_of(server)
    weights = load_file(folder / "model.safetensors")
    other = {name: weight * (3 if "norm" in name else 1) for name, weight in weights.items()}
    save_file(other, tmp_path / "model.safetensors")
    assert post(server, f"/update_weights?path={tmp_path}&version=7") == (
        200,
        {"weights_version": 7},
    )
    assert text_of(server) != before
    assert post(server, "/sleep?level=2")[0] == 200
    assert post(server, f"/update_weights?path={folder}&version=step-8")[1] == {
        "weights_version": "step-8"
    }
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    assert post(server, "/wake_up?tags=kv_cache")[0] == 200
    assert text_of(server) == before


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/sleep?level=3", "level=3 must be 1 or 2"),
        ("/sleep?level=0", "level=0 must be 1 or 2"),
        ("/sleep?level=x", "level='x' must be an integer"),
        ("/sleep?level=1&level=2", "level is given 2 times"),
        ("/sleep?levels=1", "'levels' is not an argument of /sleep: use level"),
        ("/wake_up?tags=all", "must be a list of"),
        ("/pause?mode=wait", "mode='wait'"),
        ("/pause?clear_cache=2", "clear_cache='2' must be true or false"),
        ("/update_weights", "path is missing"),
        ("/update_weights?path=no/such/folder", "is neither a folder nor a GGUF file"),
        ("/update_weights?path=.&mode=wait", "mode='wait' is not supported"),
        ("/resume?now=1", "'now' is not an argument of /resume: use none"),
        ("/reset_prefix_cache?reset_connector=2", "reset_connector='2' must be true or false"),
        ("/reset_prefix_cache?reset_external=true", "'reset_external' is not an argument"),
    ],
)
def test_bad_arguments_are_400_with_the_reason(server: Served, path: str, told: str) -> None:
    if "tags" in path:
        assert post(server, "/sleep")[0] == 200
    status, answer = post(server, path)
    if "tags" in path:
        assert post(server, "/wake_up")[0] == 200
    assert status == 400 and told in answer["error"]["message"]
    assert get(server, "/is_sleeping") == {"is_sleeping": False}
    assert get(server, "/is_paused") == {"is_paused": False}
    assert text_of(server)


def test_bodies_and_other_methods_and_sites_are_rejected(server: Served) -> None:
    status, answer = post(server, "/sleep", JSON, b'{"level": 2}')
    assert status == 400 and "send no body" in answer["error"]["message"]
    assert ask(server, "/sleep", b"", None, "GET")[0] == 405
    other = {"origin": "https://example.org"}
    status, answer = post(server, "/sleep", other)
    assert status == 403 and "https://example.org" in answer["error"]["message"]
    assert post(server, "/resume", {"origin": f"http://127.0.0.1:{server.port}"})[0] == 200
    assert get(server, "/is_sleeping") == {"is_sleeping": False}


def test_a_key_is_needed_where_there_is_one() -> None:
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)
    with served(llm, enable_dev_endpoints=True, api_key=["secret"]) as one:
        assert post(one, "/sleep")[0] == 401
        assert ask(one, "/is_sleeping", b"", None, "GET")[0] == 401
        key = {"authorization": "Bearer secret"}
        assert post(one, "/pause", key)[0] == 200
        assert ask(one, "/is_paused", b"", key, "GET")[2] == {"is_paused": True}
    llm.shutdown()


def test_the_flag_is_off_by_default() -> None:
    assert not ServerSettings().enable_dev_endpoints
    assert "enable_dev_endpoints" not in parse_args([])
    assert parse_args(["--enable-dev-endpoints"]).enable_dev_endpoints
    with pytest.raises(ValueError, match="enable_dev_endpoints"):
        ServerSettings(enable_dev_endpoints="yes")  # type: ignore[arg-type]


def test_async_llm_sleeps() -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)

    async def ask_it() -> Any:
        outputs = [output async for output in llm.generate("The KV cache", params)]
        return outputs[-1].outputs[0]

    async def run() -> None:
        expected = await ask_it()
        running = asyncio.create_task(ask_it())
        while not llm._readers:
            await asyncio.sleep(0)
        await llm.sleep(2)
        assert (await running).finish_reason == "abort"
        assert await llm.is_sleeping()
        with pytest.raises(EngineAsleepError, match="missing: weights, kv_cache"):
            await ask_it()
        with pytest.raises(ValueError, match="level=7"):
            await llm.sleep(7)
        assert await llm.is_sleeping()
        await llm.wake_up(["kv_cache"])
        await llm.wake_up()
        assert (await ask_it()).token_ids == expected.token_ids
        with pytest.raises(ValueError, match="mode='keep'"):
            await llm.sleep(mode="keep")
        assert not await llm.is_sleeping()
        assert await llm.reset_prefix_cache(reset_running_requests=True)
        assert await llm.reset_prefix_cache(reset_connector=True)

    asyncio.run(run())
    llm.shutdown()
