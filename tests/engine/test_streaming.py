"""Streams of text: thousands of random ones from a scripted executor, and `LLM.stream`."""

import codecs
import gc
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from counting_executor import CountingExecutor, Handle, byte_tokenizer, make_engine

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.engine.executor import StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.request import Request
from nanoserve.sampling_params import RequestOutputKind

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
NUM_BLOCKS = 24
PROMPT = [1, 2, 3]  # of every request that has a script
EOS, SPECIAL = 256, 257
SPECIAL_TEXTS = {EOS: "<|endoftext|>", SPECIAL: "<|工具|>"}
WORDS = ["ab", "the ", "中文", "。\n", "👩‍👩‍👧", "aba"]
FIRST_WORD = SPECIAL + 1
SPACE_AND_HALF_AN_EMOJI = FIRST_WORD + len(WORDS)  # GPT-2's vocabulary and Qwen's have it too
TOKEN_BYTES = (
    [bytes([byte]) for byte in range(256)]
    + [text.encode() for text in SPECIAL_TEXTS.values()]
    + [word.encode() for word in WORDS]
    + [b" \xf0\x9f"]
)

CHARACTERS = [*"abab \n中文的测试。", "é", "e\u0301", "n\u0303", "👍🏽", "☀\ufe0f", "👩‍💻", "🇨🇳"]
BROKEN = [b"\xff", b"\xc3", b"\xe4\xb8", b"\x80", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xef\xbf\xbd"]


def make_tokenizer() -> SimpleNamespace:
    """Token id = byte, then special tokens, then words of several bytes."""
    tokenizer = byte_tokenizer(eos_token_id=EOS)
    backend = tokenizer.backend
    symbol_of = {token_id: symbol for symbol, token_id in backend.get_vocab().items()}
    backend.add_special_tokens(list(SPECIAL_TEXTS.values()))
    backend.add_tokens(
        ["".join(symbol_of[byte] for byte in piece) for piece in TOKEN_BYTES[FIRST_WORD:]]
    )
    assert backend.get_vocab_size() == len(TOKEN_BYTES)
    return tokenizer


class ScriptedExecutor(CountingExecutor):
    """Completion i of a request with seed s gets the tokens of `scripts[s][i]`, one by one."""

    scripts: dict[int, list[list[int]]]

    def collect(self, handle: Handle) -> StepResult:
        batch, num_sampled = handle.batch, handle.batch.header.num_sampled
        changes = {change.slot: change for change in self.sampling}  # the latest of each slot
        positions = batch.positions[batch.output_rows[:num_sampled]].tolist()
        slots = batch.output_slots[:num_sampled].tolist()
        token_ids = []
        for slot, position in zip(slots, positions, strict=True):
            script = self.scripts[changes[slot].seed][changes[slot].completion]
            token_ids.append([script[position + 1 - len(PROMPT)]])
        return StepResult(token_ids)


def make_scripted_engine(scripts: dict[int, list[list[int]]], **options: int) -> GuardedEngine:
    engine = make_engine(make_tokenizer(), num_kv_blocks=NUM_BLOCKS, block_size=4, **options)
    executor = ScriptedExecutor(engine.config, NUM_BLOCKS)
    executor.scripts = scripts
    engine.replace_executor(executor)
    return engine


@dataclass
class Expected:
    """How a completion ends, worked out from its script in one go."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: str | None = None


def spell(token_ids: list[int], params: SamplingParams) -> bytes:
    """The bytes that tokens stand for."""
    shown = (i for i in token_ids if i not in SPECIAL_TEXTS or not params.skip_special_tokens)
    return b"".join(TOKEN_BYTES[i] for i in shown)


def settled_text(token_ids: list[int], params: SamplingParams) -> str:
    """The characters that no later byte can change."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(spell(token_ids, params))


def whole_text(token_ids: list[int], params: SamplingParams) -> str:
    return spell(token_ids, params).decode("utf-8", "replace")


def expect(script: list[int], params: SamplingParams) -> Expected:
    """Stop at the first token past min_tokens that completes a stop string, else at the end."""
    before = ""
    for n, token_id in enumerate(script, start=1):
        if token_id == EOS and not params.ignore_eos:
            return Expected(script[: n - 1], whole_text(script[: n - 1], params), "stop")
        text = settled_text(script[:n], params)
        found = [
            (position, order, stop)
            for order, stop in enumerate(params.stop_strings)
            for position in range(len(text))
            if text.startswith(stop, position) and position + len(stop) > len(before)
        ]
        if found and n > params.min_tokens:
            position, _, stop = min(found)
            end = position + len(stop) if params.include_stop_str_in_output else position
            return Expected(script[:n], text[:end], "stop", stop)
        if n == params.max_tokens:
            return Expected(script[:n], whole_text(script[:n], params), "length")
        before = text
    raise AssertionError("the script is too short")


def may_begin_a_stop(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that could grow into a stop string."""
    return max(
        (
            k
            for k in range(len(text) + 1)
            for s in stops
            if s[:k] == text[len(text) - k :] and k < len(s)
        ),
        default=0,
    )


def random_script(rng: random.Random, length: int, broken: bool) -> list[int]:
    script: list[int] = []
    while len(script) < length:
        kind = rng.random()
        if kind < 0.06:
            script.append(SPECIAL)
        elif kind < 0.25:
            script.append(FIRST_WORD + rng.randrange(len(WORDS)))
        elif kind < 0.4 and broken:
            script += rng.choice(BROKEN)
        else:
            script += rng.choice(CHARACTERS).encode()
    return script


def random_stops(rng: random.Random, script: list[int], params: SamplingParams) -> list[str]:
    """Some that occur, cut out of the text wherever; some that nearly do; some that overlap."""
    text = settled_text(script, params)
    stops = []
    for _ in range(rng.randrange(4) if text else 0):
        start = rng.randrange(len(text))
        piece = text[start : start + rng.randint(1, 9)]
        kind = rng.random()
        if kind < 0.3:
            piece = rng.choice(
                ["abab", "aa", "aba", "中文中文", "。\n", "文的", "\u200d", "\ufe0f"]
            )
        elif kind < 0.5:
            piece += rng.choice("xa中")
        if "\ufffd" not in piece:
            stops.append(piece)
    return stops


@dataclass
class Case:
    """One random request: what it asks for, when it comes and goes, and what it has received."""

    params: SamplingParams
    scripts: list[list[int]]
    broken: bool
    start: int
    abort_after: int | None
    request: Request | None = None
    outputs: list[RequestOutput] = field(default_factory=list)


def random_case(rng: random.Random, seed: int) -> Case:
    broken, length = rng.random() < 0.5, rng.randint(2, 40)
    n = 2 if rng.random() < 0.2 else 1
    scripts = [random_script(rng, length, broken) for _ in range(n)]
    params = SamplingParams(
        n=n,
        seed=seed,
        max_tokens=length,
        min_tokens=rng.choice([0, 0, rng.randint(0, length)]),
        include_stop_str_in_output=rng.random() < 0.5,
        skip_special_tokens=rng.random() < 0.5,
        spaces_between_special_tokens=rng.random() < 0.5,
        output_kind=rng.choice([DELTA, DELTA, CUMULATIVE, RequestOutputKind.FINAL_ONLY]),
    )
    params.stop = random_stops(rng, rng.choice(scripts), params)
    for script in scripts:
        if rng.random() < 0.3:
            script[rng.randint(min(params.min_tokens, length - 1), length - 1)] = EOS
    aborted = n == 1 and rng.random() < 0.15
    return Case(params, scripts, broken, rng.randrange(30), rng.randrange(30) if aborted else None)


def run_cases(engine: GuardedEngine, cases: list[Case]) -> None:
    """Requests come, and some are aborted, between the steps of the others."""
    clock = 0
    while engine.has_unfinished_requests() or any(case.request is None for case in cases):
        for index, case in enumerate(cases):
            if case.start == clock:
                case.request = engine.input_processor.process(str(index), PROMPT, case.params)
                engine.add(case.request)
            if case.abort_after is not None and case.start + case.abort_after == clock:
                output = engine.abort_request(str(index))
                if output is not None:
                    receive(cases, output)
        for output in engine.step():
            receive(cases, output)
        engine.scheduler.check()
        clock += 1


def receive(cases: list[Case], output: RequestOutput) -> None:
    case = cases[int(output.request_id)]
    case.outputs.append(output)
    for completion in output.outputs:
        seq = case.request.sequences[completion.index]
        if completion.finished:  # at once, not when the next step begins
            assert not seq.block_table and seq.slot == -1


def check_completion(case: Case, index: int) -> str:
    """Compare all that came of one completion with its script; returns how it ended."""
    script, params = case.scripts[index], case.params
    pieces = [c for output in case.outputs for c in output.outputs if c.index == index]
    last, is_delta = pieces[-1], params.output_kind is DELTA
    token_ids = [i for piece in pieces for i in piece.token_ids] if is_delta else last.token_ids
    expected = expect(script, params)
    if last.finish_reason == "abort":
        assert len(token_ids) < len(expected.token_ids) or expected.finish_reason == "stop"
        done = script[: len(token_ids)]
        expected = Expected(done, whole_text(done, params), "abort")
    text, num_tokens, text_so_far = "", 0, ""
    for piece in pieces:
        text_so_far = text + piece.text if is_delta else piece.text
        assert text_so_far.startswith(text), "what was shown is taken back"
        assert expected.text.startswith(text_so_far), "what is shown is not in the final text"
        text = text_so_far
        num_tokens = num_tokens + len(piece.token_ids) if is_delta else len(piece.token_ids)
        if not piece.finished:
            settled = settled_text(script[:num_tokens], params)
            ready = settled[: len(settled) - may_begin_a_stop(settled, params.stop_strings)]
            assert ready.startswith(text), "shown before it was safe"
            assert case.broken or text == ready, "held back without need"
    assert text == expected.text, (case.params, pieces, script)
    assert token_ids == expected.token_ids
    assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert sum(piece.finished for piece in pieces) == 1 or not is_delta
    return f"{last.finish_reason} {'string' if last.stop_reason else ''}".strip()


@pytest.mark.small(seed=[0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_random_streams_equal_a_reference_that_sees_everything_at_once(seed: int) -> None:
    """100 requests in a pool that is too small, so that some are preempted on the way."""
    rng = random.Random(seed)
    cases = [random_case(rng, index) for index in range(100)]
    engine = make_scripted_engine({i: case.scripts for i, case in enumerate(cases)})
    run_cases(engine, cases)
    ends = [
        check_completion(case, index)
        for case in cases
        if case.outputs
        for index in range(case.params.n)
    ]
    assert {"stop", "stop string", "length", "abort"} <= set(ends)
    assert ends.count("stop string") >= 15  # else the fuzz tests too little
    assert engine.stats.num_preemptions > 0
    assert engine.scheduler.block_manager.num_free_blocks == NUM_BLOCKS
    assert not engine.output_processor.requests


def complete(tokens: list[int], **params: object) -> list[RequestOutput]:
    """All outputs of one request that gets `tokens`."""
    engine = make_scripted_engine({0: [tokens]})
    engine.add_request("r", PROMPT, SamplingParams(seed=0, **{"max_tokens": len(tokens), **params}))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_a_stop_string_completed_before_min_tokens_does_not_count_later() -> None:
    """Not even if another stop string is so long that the search starts in front of it."""
    (*_, last) = complete([*b"ab-cd-"], stop=["ab", "a long one"], min_tokens=3)
    completion = last.outputs[0]
    assert (completion.text, completion.finish_reason) == ("ab-cd-", "length")


@pytest.mark.parametrize("ending", ["length", "EOS"])
def test_a_stop_string_counts_even_if_half_a_character_follows_it_in_the_last_token(
    ending: str,
) -> None:
    """The text of that token waits for the rest of the character, which never comes."""
    tokens = [*b"Answer:", SPACE_AND_HALF_AN_EMOJI] + [EOS] * (ending == "EOS")
    completion = complete(tokens, stop="wer: ", output_kind=DELTA)[-1].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "wer: ")
    text = "".join(o.outputs[0].text for o in complete(tokens, stop="wer: ", output_kind=DELTA))
    assert text == "Ans"


def test_a_stop_string_counts_on_the_very_token_that_completes_it() -> None:
    """Though this token ends with half a character: nothing more is computed."""
    tokens = [*b"Answer:", SPACE_AND_HALF_AN_EMOJI, *b"\x98\x80 never"]
    completion = complete(tokens, stop="wer: ")[-1].outputs[0]
    assert completion.text == "Ans"
    assert completion.token_ids == tokens[:8]


def test_aborting_does_not_repeat_the_last_piece_of_a_completion_that_had_ended() -> None:
    engine = make_scripted_engine({0: [[*b"hi!"], [*b"a long story"]]})
    params = SamplingParams(
        n=2, seed=0, max_tokens=12, stop="!", include_stop_str_in_output=True, output_kind=DELTA
    )
    engine.add_request("r", PROMPT, params)
    outputs = [output for _ in range(6) for output in engine.step()]
    outputs.append(engine.abort_request("r"))
    texts, token_ids, ends = ["", ""], [[], []], [0, 0]
    for completion in (c for output in outputs for c in output.outputs):
        texts[completion.index] += completion.text
        token_ids[completion.index] += completion.token_ids
        ends[completion.index] += completion.finished
    assert texts[0] == "hi!" and token_ids[0] == [*b"hi!"]
    assert len(texts[1]) > 1 and "a long story".startswith(texts[1])
    assert ends == [1, 1]


def test_special_tokens_are_in_the_text_only_on_request() -> None:
    tokens = [*"中".encode(), SPECIAL, *b"a", SPECIAL]
    for skip, text in ((True, "中a"), (False, "中<|工具|>a<|工具|>")):
        for kind in RequestOutputKind:
            outputs = complete(tokens, skip_special_tokens=skip, output_kind=kind)
            pieces = [output.outputs[0].text for output in outputs]
            assert "".join(pieces) == text if kind is DELTA else pieces[-1] == text
            assert outputs[-1].outputs[0].token_ids[-1] == SPECIAL


def test_a_stop_string_may_be_the_text_of_a_special_token() -> None:
    tokens = [*b"ab", SPECIAL, *b"cd"]
    stopped = complete(tokens, stop="<|工具|>", skip_special_tokens=False)[-1].outputs[0]
    assert (stopped.text, stopped.stop_reason, len(stopped.token_ids)) == ("ab", "<|工具|>", 3)
    skipped = complete(tokens, stop="<|工具|>", skip_special_tokens=True)[-1].outputs[0]
    assert (skipped.text, skipped.finish_reason) == ("abcd", "length")


# -- LLM.stream on the bundled model ------------------------------------------------------------

POOL = 200
QUESTION = "<|im_start|>user\nWhat is a KV cache?<|im_end|>\n<|im_start|>assistant\n"
CHINESE = "<|im_start|>user\n什么是KV缓存？<|im_end|>\n<|im_start|>assistant\n"
LONG = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def bundled() -> Iterator[LLM]:
    with LLM("tiny-qwen3", dtype="float32", num_kv_blocks=POOL, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture
def llm(bundled: LLM) -> Iterator[LLM]:
    yield bundled
    for request_id in list(bundled.engine.output_processor.requests):
        bundled.engine.abort_request(request_id)  # what a failed test left must not fail the next
    bundled.engine.withdraw(list(bundled.engine.loop.outputs._queues))


@pytest.fixture(scope="module")
def answers(bundled: LLM) -> dict[str, tuple[str, list[int]]]:
    outputs = bundled.generate([QUESTION, CHINESE], LONG, use_tqdm=False)
    return {o.prompt: (o.outputs[0].text, o.outputs[0].token_ids) for o in outputs}


def read(stream: Iterator[RequestOutput]) -> tuple[str, list[int]]:
    completions = [output.outputs[0] for output in stream]
    return "".join(c.text for c in completions), [i for c in completions for i in c.token_ids]


def is_idle(llm: LLM) -> bool:
    llm.engine.scheduler.check()
    no_requests = not llm.engine.loop.outputs._queues and not llm.engine.has_unfinished_requests()
    everything_free = llm.engine.scheduler.block_manager.num_free_blocks == POOL
    return no_requests and everything_free and not llm.engine.output_processor.requests


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Turn a stream that never ends into an error."""

    def give_up(*args: object) -> None:
        raise TimeoutError("the stream never ends")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("prompt", [QUESTION, CHINESE])
def test_the_pieces_of_a_stream_make_up_what_generate_returns(llm: LLM, prompt, answers) -> None:
    outputs = list(llm.stream(prompt, LONG))
    assert len(outputs) >= 10
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert read(iter(outputs)) == answers[prompt]
    assert is_idle(llm)


def test_a_stream_leaves_the_callers_params_as_they_were(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, output_kind=CUMULATIVE)
    assert len(list(llm.stream(QUESTION, params))) == 3
    assert params.output_kind is CUMULATIVE


def test_a_stream_ends_before_its_stop_string(llm: LLM, answers) -> None:
    """Chosen from the middle of the answer, across words, so that parts of it arrive early."""
    text, _ = answers[QUESTION]
    stop = text[len(text) // 2 :][:7]
    outputs = list(llm.stream(QUESTION, SamplingParams(temperature=0, max_tokens=24, stop=stop)))
    assert "".join(o.outputs[0].text for o in outputs) == text[: text.index(stop)]
    assert outputs[-1].outputs[0].stop_reason == stop
    assert is_idle(llm)


def test_two_streams_are_read_alternately(llm: LLM, answers) -> None:
    streams = {prompt: llm.stream(prompt, LONG) for prompt in (QUESTION, CHINESE)}
    pieces: dict[str, list[RequestOutput]] = {prompt: [] for prompt in streams}
    while any(streams.values()):
        for prompt, stream in list(streams.items()):
            output = next(stream, None) if stream else None
            if output is None:
                streams[prompt] = None
            else:
                pieces[prompt].append(output)
    for prompt, outputs in pieces.items():
        assert read(iter(outputs)) == answers[prompt]
    assert is_idle(llm)


def test_a_stream_joins_while_another_runs_and_may_overtake_it(llm: LLM, answers) -> None:
    first = llm.stream(QUESTION, LONG)
    begun = [next(first) for _ in range(5)]
    assert read(llm.stream(CHINESE, LONG)) == answers[CHINESE]
    rest = list(first)
    assert read(iter(begun + rest)) == answers[QUESTION]
    assert is_idle(llm)


@pytest.mark.parametrize("how", ["close", "forget", "break", "throw"])
def test_a_stream_that_is_dropped_half_way_is_aborted(llm: LLM, how: str, answers) -> None:
    other = llm.stream(CHINESE, LONG)
    begun = [next(other)]
    stream = llm.stream(QUESTION, LONG)
    for _ in range(3):
        next(stream)
    if how == "close":
        stream.close()
    elif how == "throw":
        with pytest.raises(KeyError):
            stream.throw(KeyError)
    elif how == "break":
        for _ in stream:
            break
    del stream
    gc.collect()
    assert len(llm.engine.output_processor.requests) == 1
    assert read(iter(begun + list(other))) == answers[CHINESE]
    assert is_idle(llm)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_stream_that_is_dropped_unread_is_aborted(llm: LLM, how: str) -> None:
    stream = llm.stream(QUESTION, LONG)
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    assert is_idle(llm)
    assert llm.generate([QUESTION], LONG, use_tqdm=False)


def test_a_failing_step_ends_the_stream_that_made_it_and_no_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, answers
) -> None:
    first, second = llm.stream(QUESTION, LONG), llm.stream(CHINESE, LONG)
    begun = [next(second)]
    next(first)
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.executor, "forward", lambda batch, changes: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(first)
    assert read(iter(begun + list(second))) == answers[CHINESE]
    assert is_idle(llm)


def test_generate_is_refused_while_a_stream_runs_and_does_not_disturb_it(llm: LLM, answers) -> None:
    stream = llm.stream(QUESTION, LONG)
    begun = [next(stream)]
    with pytest.raises(ValueError, match="unfinished"):
        llm.generate([CHINESE], LONG, use_tqdm=False)
    assert read(iter(begun + list(stream))) == answers[QUESTION]
    assert is_idle(llm)


def test_a_stream_is_refused_while_requests_of_the_engine_run(llm: LLM) -> None:
    llm.engine.add_request("r", QUESTION, LONG)
    with pytest.raises(ValueError, match="unfinished"):
        llm.stream(CHINESE, LONG)
    llm.engine.abort_request("r")
    assert is_idle(llm)


def test_a_bad_request_to_stream_is_refused_at_the_call(llm: LLM) -> None:
    with pytest.raises(ValueError, match="empty"):
        llm.stream([], LONG)
    assert is_idle(llm)


def test_a_stream_whose_request_is_aborted_by_the_engine_comes_to_an_end(llm: LLM) -> None:
    stream = llm.stream(QUESTION, LONG)
    next(stream)
    for request_id in list(llm.engine.output_processor.requests):
        llm.engine.abort_request(request_id)
    with no_longer_than(seconds=60):
        list(stream)
    assert is_idle(llm)


@pytest.mark.small(seed=[0])
@pytest.mark.parametrize("seed", range(3))
def test_streams_come_and_go_at_random(llm: LLM, seed: int, answers) -> None:
    rng, running = random.Random(seed), []
    for _ in range(60):
        if rng.random() < 0.2 and len(running) < 12:
            prompt = rng.choice([QUESTION, CHINESE])
            stream = llm.stream(prompt, LONG)
            running.append((prompt, stream, [next(stream)]))
        if not running:
            continue
        index = rng.randrange(len(running))
        prompt, stream, outputs = running[index]
        if rng.random() < 0.1:
            stream.close()
            del running[index]
        else:
            outputs += [output for output in [next(stream, None)] if output]
        text, token_ids = read(iter(outputs))
        assert answers[prompt][0].startswith(text)
        assert answers[prompt][1][: len(token_ids)] == token_ids
    for prompt, stream, outputs in running:
        assert read(iter(outputs + list(stream))) == answers[prompt]
    assert is_idle(llm)
