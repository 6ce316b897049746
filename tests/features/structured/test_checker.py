"""What a grammar does to the library that compiles it, it does to a child process alone."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.features.structured import checker
from nanoserve.features.structured.checker import Checker
from nanoserve.features.structured.grammar import Source

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")

DIGITS = Source("regex", "[0-9]+")


def chained(length: int) -> Source:
    """A chain of references that nobody has looked at before the library does."""
    definitions: dict[str, Any] = {
        f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)
    }
    definitions[f"a{length}"] = {"type": "string"}
    return Source("json", json.dumps({"$defs": definitions, "$ref": "#/$defs/a0"}))


def wide(number: int) -> Source:
    """An object whose compilation takes time that is quadratic in the number of its properties."""
    properties = {f"p{i}": {"type": "string"} for i in range(number)}
    return Source("json", json.dumps({"type": "object", "properties": properties}))


@pytest.fixture
def own() -> Iterator[Checker]:
    yield Checker("guidance")


def test_a_crash_of_the_library_is_told_of_its_grammar(own: Checker) -> None:
    assert own.check(DIGITS) is None
    fault = own.check(chained(20_000))
    assert fault is not None and "the library that compiles it crashed" in fault
    assert own.check(DIGITS) is None
    assert "regex parse error" in str(own.check(Source("regex", "(")))


def test_a_process_that_has_ended_is_replaced(own: Checker) -> None:
    assert own.check(DIGITS) is None
    os.kill(own._idle[0]._child.pid, signal.SIGKILL)
    assert own.check(DIGITS) is None
    assert len(own._idle) == 1


def test_a_process_that_does_not_answer_is_ended(
    own: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own.check(DIGITS) is None
    child = own._idle[0]._child
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)  # it has stopped, and is not only about to
    monkeypatch.setattr(checker, "_TIME_LIMIT", 0.1)
    assert "not compiled within 0.1 seconds" in str(own.check(DIGITS))
    assert child.poll() == -signal.SIGKILL


def test_an_interrupted_check_leaves_no_answer_behind(
    own: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own.check(DIGITS) is None
    child = own._idle[0]._child

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checker, "_received", interrupted)
        with pytest.raises(KeyboardInterrupt):
            own.check(Source("regex", "("))
    assert child.poll() is not None and own._idle == [] and own._num_busy == 0
    assert own.check(DIGITS) is None


def test_without_a_process_there_is_an_error_and_no_hang(
    own: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "_PROGRAM", "raise SystemExit")
    for _ in range(10):
        with pytest.raises(ValueError, match="cannot start: it ended at once"):
            own.check(DIGITS)
    monkeypatch.setattr("sys.executable", "/no/such/file")
    with pytest.raises(ValueError, match=r"cannot start: .*No such file"):
        own.check(DIGITS)
    monkeypatch.undo()
    assert own.check(DIGITS) is None


@pytest.mark.size("full")
def test_slow_grammars_are_given_up_and_delay_no_others(own: Checker) -> None:
    """Six at a time, each of which would take 10 seconds."""
    faults: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: faults.append(own.check(wide(10_000)))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    while own._num_large < 2:
        time.sleep(0.01)
    num_before = len(faults)
    assert own.check(DIGITS) is None
    assert num_before == 0 and own._num_large == 2
    for thread in threads:
        thread.join()
    assert len(faults) == 6
    for fault in faults:
        assert "seconds" in str(fault)


def test_an_engine_that_is_dropped_leaves_no_thread() -> None:
    def num_threads() -> int:
        return sum(thread.name == "nanoserve grammars" for thread in threading.enumerate())

    before = num_threads()
    llm = LLM("tiny-qwen3", max_model_len=64, num_kv_blocks=16)
    digits = StructuredOutputsParams(regex="[0-9]{3}")
    llm.generate("A", SamplingParams(structured_outputs=digits), use_tqdm=False)
    assert num_threads() > before
    del llm
    gc.collect()
    end = time.monotonic() + 60
    while num_threads() > before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_chain_ends_its_own_request_alone() -> None:
    """Through the front: it is refused before anything of the batch is queued."""
    with LLM("tiny-qwen3", max_model_len=64, num_kv_blocks=16) as llm:
        chain = StructuredOutputsParams(json=chained(10_000).text)
        with pytest.raises(ValueError, match="levels deep"):
            llm.generate("A", SamplingParams(structured_outputs=chain), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
        (output,) = llm.generate("A", SamplingParams(max_tokens=3), use_tqdm=False)
        assert output.finished
