"""A line that ends the engine gets an error for an answer, and all others get theirs."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batch_files import answers, line, texts, write

pytest.importorskip("fastapi", reason="a batch needs pip install 'nanoserve[serve]'")

from nanoserve.cli.main import main
from nanoserve.serve.batch.local_runner import answer_here
from nanoserve.serve.batch.request_executor import Answered, Answerer
from nanoserve.serve.batch.requests import BatchLine
from nanoserve.serve.batch.restarts import RestartingAnswerer
from nanoserve.serve.engine_thread import EngineDeadError

GREEDY = {"temperature": 0, "max_tokens": 4}


class Engines:
    """Makes answerers whose engines end of some lines, at some moment."""

    def __init__(self, deadly: set[int], seed: int = 0, most: int | None = None) -> None:
        self.deadly, self.num_made, self.num_closed = deadly, 0, 0
        self._rng, self._most = random.Random(seed), most

    def make(self) -> Any:
        self.num_made += 1
        if self._most is not None and self.num_made > self._most:
            raise ValueError("there is no room for another one")
        config = SimpleNamespace(max_num_seqs=4)
        one = SimpleNamespace(llm=SimpleNamespace(engine=SimpleNamespace(config=config)))
        is_dead = False

        async def answer(asked: BatchLine) -> Answered:
            nonlocal is_dead
            for _ in range(self._rng.randrange(6)):
                await asyncio.sleep(0)
                if is_dead:
                    raise EngineDeadError("ended")
            is_dead = is_dead or asked.number in self.deadly
            if is_dead:
                raise EngineDeadError("ended")
            return Answered(asked.number, b"x", "")

        def close() -> None:
            self.num_closed += 1

        one.answer, one.close = answer, close
        return one


def answer_all(engines: Engines, number: int, taken: list[Answered]) -> int:
    one = RestartingAnswerer(engines.make)
    try:
        return asyncio.run(answer_here(one, lines(number), taken.append, 5))
    finally:
        one.close()


def lines(number: int) -> Iterator[BatchLine]:
    return (BatchLine(i, f"{i}", {}, f"batch_req_{i:032}") for i in range(1, number + 1))


@pytest.mark.parametrize("seed", range(20))
def test_the_line_that_ends_engines_is_found(seed: int) -> None:
    rng = random.Random(seed)
    number = rng.choice((1, 2, 30, 60))
    deadly = {rng.randint(1, number) for _ in range(rng.choice((0, 1, 2, 2)))}
    engines, taken = Engines(deadly, seed), []
    assert answer_all(engines, number, taken) == 0
    assert sorted(one.number for one in taken) == list(range(1, number + 1))
    assert {one.number for one in taken if one.content != b"x"} == deadly
    for one in taken:
        if one.number in deadly:
            answer = json.loads(one.content)
            assert answer["custom_id"] == f"{one.number}"
            assert answer["response"]["status_code"] == 500
            assert "the engine crashes on this line" in answer["error"]["message"]
            assert f"custom_id='{one.number}'" in one.error
    assert engines.num_made == engines.num_closed <= 1 + 6 * len(deadly)


def test_engines_that_end_whatever_they_answer_end_the_job() -> None:
    """Without errors for lines that are none of theirs."""
    engines, taken = Engines(set(range(1000))), []  # 0 is the smallest request
    with pytest.raises(EngineDeadError):
        answer_all(engines, 50, taken)
    assert taken == []
    assert engines.num_made == engines.num_closed == 2


def test_an_engine_that_cannot_be_started_again_ends_the_job() -> None:
    engines, taken = Engines({5}, most=1), []
    with pytest.raises(ValueError, match="no room"):
        answer_all(engines, 50, taken)
    assert len(taken) < 50 and engines.num_closed >= 1


@pytest.mark.parametrize("num_killed", [0, 1, 2])
def test_an_engine_that_is_killed_while_it_starts_is_started_once_more(num_killed: int) -> None:
    """Both the first engine and the one after line 5 has ended it."""
    engines, taken, starts = Engines({5}), [], 0

    def make() -> Any:
        nonlocal starts
        starts += 1
        if starts % (num_killed + 1):
            raise EngineDeadError("the engine's process has ended with status -9")
        return engines.make()

    if num_killed == 2:
        with pytest.raises(EngineDeadError, match="status -9"):
            RestartingAnswerer(make)
        assert starts == 2
        return
    one = RestartingAnswerer(make)
    assert asyncio.run(answer_here(one, lines(20), taken.append, 5)) == 0
    one.close()
    assert sorted(answered.number for answered in taken) == list(range(1, 21))
    assert starts == (num_killed + 1) * engines.num_made > num_killed + 1


@pytest.mark.size("full")
def test_an_engine_process_that_is_killed(tmp_path: Path) -> None:
    """The answers of all other lines are as if that line was not there."""
    requests = [line(f"{i}", prompt=f"A cache of {i} blocks", **GREEDY) for i in range(8)]
    source = write(tmp_path / "in.jsonl", requests)
    options = ["--dtype", "float32", "--max-num-seqs", "2", "--num-kv-blocks", "100"]
    options += ["--max-model-len", "256"]
    assert main(["batch", str(source), str(tmp_path / "right.jsonl"), *options]) == 0

    class Killed(Answerer):
        async def answer(self, asked: BatchLine) -> Answered:
            if asked.custom_id == "3":
                os.kill(self.llm.owner._process.pid, signal.SIGKILL)
            return await super().answer(asked)

    out = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanoserve.serve.batch.request_executor.Answerer", Killed)
        assert main(["batch", str(source), str(out), *options]) == 1
    found, right = texts(out), texts(tmp_path / "right.jsonl")
    assert answers(out)["3"]["error"]["code"] == "engine_ended"
    del found["3"], right["3"]
    assert found == right
    # The line has its answer: the same command has nothing left to do.
    assert main(["batch", str(source), str(out), *options]) == 1
    assert len(answers(out)) == 8


def test_a_schema_that_would_end_a_process_is_a_bad_line(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    definitions: dict[str, Any] = {
        f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(10_000)
    }
    schema = {"$defs": definitions | {"a10000": {"type": "string"}}, "$ref": "#/$defs/a0"}
    requests = [line("a", prompt="A", **GREEDY), line("b", prompt="B", **GREEDY)]
    requests.insert(1, line("deep", prompt="A", guided_json=schema, **GREEDY))
    source = write(tmp_path / "in.jsonl", requests)
    assert main(["batch", str(source), str(tmp_path / "out.jsonl")]) == 1
    found = answers(tmp_path / "out.jsonl")
    assert [found[name]["response"]["status_code"] for name in ("a", "deep", "b")] == [
        200,
        400,
        200,
    ]
    assert "levels deep" in found["deep"]["error"]["message"]
    assert f"{source}:2: custom_id='deep'" in capsys.readouterr().err
