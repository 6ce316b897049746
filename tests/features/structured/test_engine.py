"""Guided requests in an engine: how they begin, wait, end and fail."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.engine.guard import GuardedEngine

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
from nanoserve.features.structured import extension as structured_extension
from nanoserve.features.structured.compiler import Compiler
from nanoserve.features.structured.extension import StructuredOutputs
from nanoserve.features.structured.grammar import Source

PROMPT = [5, 6, 7]
EOS = 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guided")
    make_qwen3(path, vocab_size=2048)
    return path


def open_llm(path: Path, **options: Any) -> LLM:
    options = {"num_kv_blocks": 64, "max_model_len": 256} | options
    return LLM(path, tokenizer="tiny-qwen3", **options)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with open_llm(path) as llm:
        yield llm
        assert not llm.engine.output_processor.requests
        assert not any(e._guided or e._forced for e in structured_outputs_of(llm))
        llm.engine.scheduler.check()


def structured_outputs_of(llm: LLM) -> list[StructuredOutputs]:
    """Return the extension that knows grammars; an engine has none before the first of them."""
    return [e for e in llm.engine.extensions if isinstance(e, StructuredOutputs)]


def guided(max_tokens: int = 60, **given: Any) -> SamplingParams:
    names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    guide = {name: given.pop(name) for name in names if name in given}
    given.setdefault("temperature", 0)
    return SamplingParams(
        max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**guide), **given
    )


def step(engine: GuardedEngine) -> dict[str, Any]:
    """What has finished in it."""
    return {output.request_id: output for output in engine.step() if output.finished}


def answer(llm: LLM, params: SamplingParams) -> Any:
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.error is None, output.error
    return output.outputs[0]


def test_the_extension_comes_with_the_first_grammar_and_not_before(llm: LLM) -> None:
    llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)
    assert llm.engine.extensions == []
    for _ in range(2):
        answer(llm, guided(choice=["yes"]))
        assert len(structured_outputs_of(llm)) == len(llm.engine.extensions) == 1
    plain = llm.generate([PROMPT], SamplingParams(max_tokens=9, temperature=0), use_tqdm=False)
    assert plain[0].outputs[0].finish_reason == "length"


def test_it_may_come_while_others_run(path: Path) -> None:
    """With a step under way, and a running set that goes on."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for ahead in (False, True):
        with open_llm(path, async_scheduling=ahead) as llm:
            expected = answer(llm, params).token_ids
            engine, finished = llm.engine, {}
            for number in range(3):
                engine.add_request(f"plain {number}", PROMPT, params)
            for _ in range(5):
                engine.step()
            engine.add_request("guided", PROMPT, guided(regex="[0-9]{3}"))
            while engine.has_unfinished_requests():
                finished |= step(engine)
            for number in range(3):
                assert finished[f"plain {number}"].outputs[0].token_ids == expected
            assert finished["guided"].outputs[0].text.isdigit()
            assert engine.stats.num_output_tokens >= 4 * 40


def test_what_has_come_to_its_end_stops(llm: LLM) -> None:
    for params in (
        guided(choice=["block table"]),
        guided(choice=["block table"], ignore_eos=True),
        guided(choice=["block table"], min_tokens=50),  # the grammar goes before it
        guided(regex="block table", temperature=1.0, seed=1, top_p=0.9),
    ):
        output = answer(llm, params)
        assert output.text == "block table" and output.finish_reason == "stop"
        assert output.stop_reason is None
    # Also if there would have been no room for more.
    num_tokens = len(output.token_ids)
    output = answer(llm, guided(num_tokens, choice=["block table"]))
    assert output.text == "block table" and output.finish_reason == "stop"
    output = answer(llm, guided(num_tokens - 1, choice=["block table"]))
    assert output.finish_reason == "length" and "block table".startswith(output.text)


def test_eos_comes_only_where_the_grammar_may_end(llm: LLM) -> None:
    """However much the model wants to stop."""
    eager = {"logit_bias": {EOS: 100}}
    output = answer(llm, guided(regex="[a-z]{5,}", **eager))
    assert len(output.text) >= 5 and output.finish_reason == "stop"
    fewest = answer(llm, guided(regex="[a-z]*", **eager))
    assert fewest.text == "" and fewest.token_ids == [] and fewest.finish_reason == "stop"
    other = answer(llm, guided(regex="[a-z]{5,}", stop_token_ids=[0], logit_bias={0: 100}))
    assert len(other.text) >= 5 and other.finish_reason == "stop" and other.stop_reason == 0


def test_a_stop_string_ends_it_amid_its_grammar(llm: LLM) -> None:
    whole = answer(llm, guided(choice=["prefix cache hit"]))
    cut = answer(llm, guided(choice=["prefix cache hit"], stop="cache"))
    assert whole.text == "prefix cache hit"
    assert cut.text == "prefix " and cut.finish_reason == "stop" and cut.stop_reason == "cache"


def test_each_completion_has_a_grammar_of_its_own(llm: LLM) -> None:
    params = guided(regex="[0-9]{4}(cat|dog)s?", temperature=2.0, seed=7, n=6)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    texts = [completion.text for completion in output.outputs]
    assert len(set(texts)) > 3
    assert all(text[:4].isdigit() and text[4:7] in ("cat", "dog") for text in texts)


def test_where_nothing_is_left_only_that_request_fails(llm: LLM) -> None:
    digits = [i for i in range(2048) if llm.engine.tokenizer.decode([i]).isdigit()]
    params = [
        guided(regex="[0-9]{4}"),
        guided(regex="[0-9]{4}", allowed_token_ids=[EOS, 300]),
        guided(regex="[0-9]{4}", logit_bias=dict.fromkeys(digits, -100)),
        guided(regex="[0-9]{4}", allowed_token_ids=[EOS, 300], temperature=1.0, top_k=5, seed=1),
    ]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, True, False]
    for failed in (outputs[1], outputs[3]):
        assert failed.outputs[0].finish_reason == "error"
        for name in ("allowed_token_ids", "structured_outputs"):
            assert name in str(failed.error)
    assert outputs[0].outputs[0].text.isdigit() and outputs[2].outputs[0].text.isdigit()


def test_a_grammar_that_grows_too_complex_fails_its_own_request(llm: LLM) -> None:
    params = [guided(200, regex=r"((a{0,100}){0,100}){0,100}", ignore_eos=True), guided(regex="a")]
    outputs = llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert "structured_outputs" in str(outputs[0].error)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].text == "a"


def test_it_needs_a_tokenizer(path: Path) -> None:
    with LLM(path, skip_tokenizer_init=True, num_kv_blocks=8) as llm:
        with pytest.raises(ValueError, match=r"structured_outputs.*tokenizer"):
            llm.generate([PROMPT], guided(regex="a"), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()


def test_bad_grammars_are_refused_before_anything_is_queued(llm: LLM) -> None:
    good, bad = guided(regex="a"), guided(regex="(")
    with pytest.raises(ValueError, match="unclosed group"):
        llm.generate([PROMPT] * 2, [good, bad], use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="unclosed group"):
        llm.engine.add_request("r", PROMPT, bad)


# ---------------------------------------------------------------- compiled aside


class Late:
    """A compiler whose grammars come when the test says so."""

    def __init__(self, llm: LLM) -> None:
        answer(llm, guided(regex="x"))  # from now on the engine has the extension
        compiler = structured_outputs_of(llm)[0]._compiler
        self._compile, compiler.compile = compiler.compile, self.compile
        self.waiting: list[tuple[Source, Future[Any]]] = []

    def compile(self, source: Source) -> "Future[Any]":
        future: Future[Any] = Future()
        self.waiting.append((source, future))
        return future

    def deliver(self) -> None:
        source, future = self.waiting.pop(0)
        future.set_result(self._compile(source).result(timeout=30))


def test_a_request_waits_for_its_grammar_and_nobody_for_it(llm: LLM) -> None:
    late, engine = Late(llm), llm.engine
    engine.add_request("guided", PROMPT, guided(regex="[0-9]{3}", n=2, temperature=1.0, seed=1))
    engine.add_request("plain", PROMPT, SamplingParams(max_tokens=5, temperature=0))
    finished = {}
    while "plain" not in finished:
        finished |= step(engine)
    assert "guided" not in finished and engine.has_unfinished_requests()
    for _ in range(3):
        assert engine.step() == []  # it waits a little, and has nothing to compute
    late.deliver()
    while engine.has_unfinished_requests():
        finished |= step(engine)
    assert [len(one.text) for one in finished["guided"].outputs] == [3, 3]


def test_a_request_that_waits_for_a_grammar_can_be_aborted(llm: LLM) -> None:
    late, engine = Late(llm), llm.engine
    engine.add_request("a", PROMPT, guided(regex="[0-9]{3}", n=2, temperature=1.0))
    engine.step()
    output = engine.abort_request("a")
    assert {one.finish_reason for one in output.outputs} == {"abort"}
    assert not engine.has_unfinished_requests()
    late.deliver()
    engine.step()
    (extension,) = structured_outputs_of(llm)
    assert all(seq.finished for seq in extension._compilations)
    answer(llm, SamplingParams(max_tokens=2))
    assert not extension._compilations


def test_there_is_a_time_limit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    Late(llm)  # which compiles one, in whatever time it takes
    monkeypatch.setattr(structured_extension, "_TIME_LIMIT", 0.05)
    began = time.monotonic()
    (output,) = llm.generate([PROMPT], guided(regex="[0-9]{3}"), use_tqdm=False)
    assert time.monotonic() - began < 15  # and not the 20 s that it is by default
    assert "within 0.05 seconds" in str(output.error) and isinstance(output.error, ValueError)


def test_a_failure_of_the_compiler_ends_the_request_alone(llm: LLM) -> None:
    late, engine = Late(llm), llm.engine
    engine.add_request("a", PROMPT, guided(regex="[0-9]{3}"))
    engine.add_request("b", PROMPT, guided(regex="[0-9]{3}"))
    late.waiting.pop(0)[1].set_exception(MemoryError("out of it"))
    late.deliver()
    finished = {}
    while engine.has_unfinished_requests():
        finished |= step(engine)
    assert isinstance(finished["a"].error, MemoryError)
    assert finished["b"].outputs[0].text.isdigit()


def test_closing_while_grammars_are_compiled(path: Path) -> None:
    with open_llm(path) as llm:
        Late(llm)
        llm.engine.add_request("a", PROMPT, guided(regex="[0-9]{3}"))
        llm.engine.step()
    with pytest.raises(ValueError, match="closed"):
        llm.engine.add_request("b", PROMPT, guided(regex="[0-9]{3}"))


class Backend:
    """Counts, waits and fails as it is told."""

    def __init__(self) -> None:
        self.compiled: list[Source] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def compile(self, source: Source) -> Any:
        assert self.may_go.wait(60)
        self.compiled.append(source)
        if source.text == "bad":
            raise ValueError("bad")
        return self

    num_bytes = 40


def test_equal_grammars_are_compiled_once_and_the_latest_are_kept() -> None:
    backend = Backend()
    compiler = Compiler(lambda: backend, most_bytes=100)
    first, second, third = (Source("regex", text) for text in "abc")
    backend.may_go.clear()
    one, same = compiler.compile(first), compiler.compile(first)
    backend.may_go.set()
    assert one.result(60) is same.result(60) is backend
    for source in (second, first, third, first):  # the second goes: there is room for two
        compiler.compile(source).result(60)
    assert backend.compiled == [first, second, third]
    compiler.compile(second).result(60)
    assert backend.compiled == [first, second, third, second]
    bad = Source("regex", "bad")
    for _ in range(2):  # what has failed is tried again
        with pytest.raises(ValueError, match="bad"):
            compiler.compile(bad).result(60)
    assert backend.compiled.count(bad) == 2
    compiler.close()
