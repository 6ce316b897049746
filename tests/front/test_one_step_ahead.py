"""With one step ahead (`async_scheduling`) the front door gives what it gives without."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from nanoserve import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanoserve.outputs import Logprob

QUESTIONS = [
    "What is a KV cache?",
    "块表是什么？",
    "What is 47 + 85?",
    "Explain chunked prefill.",
    "Who are you?",
    "What is preemption?",
]
NUM_KV_BLOCKS = 200


def every_third_up(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Depends on how many tokens there are, and on the last one: one too few would show."""
    last = output_token_ids[-1] if output_token_ids else 0
    logits[(len(output_token_ids) + last) % 3 :: 3] += 10
    return logits


class NoRepeats:
    """Of the engine: the token that came last may not come again."""

    def __call__(self, logits: torch.Tensor, states: list[Any]) -> None:
        for row, state in enumerate(states):
            if state.output_token_ids:
                logits[row, state.output_token_ids[-1]] = -torch.inf


# temperature and max_tokens are 0 and 12 unless something else stands here.
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "to the end of the answer": {"max_tokens": 150},
    "one token": {"max_tokens": 1},
    "seeded": {"temperature": 2.0, "seed": 5},  # the model is sure of itself
    "seeded, n=2": {"temperature": 2.5, "top_p": 0.95, "seed": 7, "n": 2},
    "n=3, the engine's seed": {"temperature": 3.0, "top_k": 50, "n": 3},
    "min_p": {"temperature": 3.0, "min_p": 0.001, "seed": 9},
    "logprobs": {"logprobs": 3},
    "logprobs of what is drawn": {"temperature": 2.0, "seed": 3, "n": 2, "logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "penalties": {
        "repetition_penalty": 2.5,
        "frequency_penalty": 2.0,
        "presence_penalty": 1.5,
        "max_tokens": 24,
    },
    "penalties, drawn": {"frequency_penalty": 1.5, "temperature": 2.0, "seed": 2, "n": 2},
    "bad_words": {"bad_words": ["cache", "the", "is a", "块"]},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": [*range(0, 2048, 3)], "max_tokens": 20},
    "stop tokens": {"stop_token_ids": [*range(0, 2048, 7)]},
    "stop strings": {"stop": ["e", "的"]},
    "stop strings, kept": {"stop": [" a", "一"], "include_stop_str_in_output": True},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 40},
    "allowed_token_ids": {"allowed_token_ids": [*range(300, 400)]},
    "logit_bias": {"logit_bias": {310: 40.0, 311: 39.5}},
    "logits processor": {"logits_processors": [every_third_up]},
    "logits processor, drawn": {
        "logits_processors": [every_third_up],
        "temperature": 2.0,
        "seed": 4,
        "n": 2,
        "logprobs": 1,
    },
}


def params_of(name: str) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **WISHES[name]})


class Pair(NamedTuple):
    """Two engines that differ in nothing else."""

    in_turn: LLM
    ahead: LLM

    def both(self, ask: Callable[[LLM], Any]) -> tuple[Any, Any]:
        answers = ask(self.in_turn), ask(self.ahead)
        for llm in self:
            llm.engine.scheduler.check()
            assert not llm.engine.has_unfinished_requests() and not llm.engine.scheduler.held
            pool = llm.engine.scheduler.block_manager
            assert pool.num_free_blocks == pool.num_blocks
        return answers

    def assert_same_generated(self, prompts: Any, params: Any) -> list[RequestOutput]:
        """What both generate is the same; returns it."""
        expected, found = self.both(lambda llm: llm.generate(prompts, params, use_tqdm=False))
        for a, b in zip(expected, found, strict=True):
            assert_same(a, b)
        return found


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"num_kv_blocks": NUM_KV_BLOCKS},
    "processors of the engine": {
        "num_kv_blocks": NUM_KV_BLOCKS,
        "logits_processors": (NoRepeats(),),
    },
    "no prefix cache": {"num_kv_blocks": NUM_KV_BLOCKS, "enable_prefix_caching": False},
    "a small pool": {  # prompts in chunks, and not enough blocks for all
        "num_kv_blocks": 44,
        "block_size": 4,
        "max_model_len": 170,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 40,
        "long_prefill_token_threshold": 13,
    },
}


def open_pair(**options: Any) -> Iterator[Pair]:
    options |= {"dtype": "float32", "device": "cpu"}
    with (
        LLM("tiny-qwen3", **options) as in_turn,
        LLM("tiny-qwen3", async_scheduling=True, **options) as ahead,
    ):
        yield Pair(in_turn, ahead)


@pytest.fixture(scope="module", params=OPTIONS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from open_pair(**OPTIONS[request.param])


# `plain_pair` is "plain", and without a prefix cache there is less to go wrong.
SMALL_POOL, PROCESSORS = "a small pool", "processors of the engine"
BOTH = pytest.mark.small(pair=[PROCESSORS, SMALL_POOL])
IN_SMALL_POOL = pytest.mark.small(pair=[SMALL_POOL])
WITH_PROCESSORS = pytest.mark.small(pair=[PROCESSORS])


@pytest.fixture(scope="module")
def plain_pair() -> Iterator[Pair]:
    yield from open_pair(num_kv_blocks=NUM_KV_BLOCKS)


@pytest.fixture(scope="module")
def answers_to(plain_pair: Pair) -> Callable[[str], list[RequestOutput]]:
    """Return what both of the plain pair say to all questions with a wish, asked for once."""

    @cache
    def ask(name: str) -> list[RequestOutput]:
        return plain_pair.assert_same_generated(prompts_for(plain_pair), params_of(name))

    return ask


def prompts_for(pair: Pair) -> list[str]:
    tokenizer = pair.ahead.engine.tokenizer
    return [tokenizer.apply_chat_template([said]) for said in map(user, QUESTIONS)]


def user(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def assert_same(expected: RequestOutput, found: RequestOutput) -> None:
    """Tokens, texts and reasons; log-probabilities as far as other batches round alike."""
    assert (found.prompt, found.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)
    assert found.finished == expected.finished
    assert_same_logprobs(expected.prompt_logprobs, found.prompt_logprobs)
    assert len(found.outputs) == len(expected.outputs)
    for a, b in zip(expected.outputs, found.outputs, strict=True):
        told = [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in (a, b)]
        assert told[0] == told[1]
        assert_same_logprobs(a.logprobs, b.logprobs)
        if a.cumulative_logprob is not None:
            assert b.cumulative_logprob == pytest.approx(a.cumulative_logprob, abs=1e-3)


def assert_same_logprobs(
    expected: list[dict[int, Logprob] | None] | None, found: list[dict[int, Logprob] | None] | None
) -> None:
    assert (expected is None) == (found is None)
    for a, b in zip(expected or [], found or [], strict=True):
        assert (a is None) == (b is None)
        for token_id, logprob in (a or {}).items():
            assert b[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-4)
            assert b[token_id].rank == logprob.rank
            assert b[token_id].decoded_token == logprob.decoded_token


# ---------------------------------------------------------------- generate, chat, beam_search


# All of them are in one batch below.
@pytest.mark.small(name=["greedy", "seeded, n=2", "logprobs of what is drawn", "stop strings"])
@pytest.mark.parametrize("name", WISHES)
def test_each_wish_alone(answers_to: Callable[[str], list[RequestOutput]], name: str) -> None:
    assert all(len(output.outputs) == params_of(name).n for output in answers_to(name))


@BOTH
def test_all_wishes_in_one_batch(pair: Pair) -> None:
    prompts = prompts_for(pair)
    params = [params_of(name) for name in WISHES]
    outputs = pair.assert_same_generated([prompts[i % 6] for i in range(len(WISHES))], params)
    reasons = {completion.finish_reason for output in outputs for completion in output.outputs}
    assert reasons == {"stop", "length"}
    in_turn, ahead = (llm.stats for llm in pair)
    assert ahead.num_output_tokens == in_turn.num_output_tokens
    if pair.ahead.engine.config.block_size == 4:
        assert ahead.num_preemptions > 0 and in_turn.num_preemptions > 0


@pytest.mark.size("full")  # it is about the wishes, which are the same at each size
def test_the_wishes_are_heard(answers_to: Callable[[str], list[RequestOutput]]) -> None:
    """Else there would be nothing to compare: each gives other tokens than greedy."""
    greedy = [[c.token_ids for c in output.outputs] for output in answers_to("greedy")]
    as_they_are = {"greedy", "logprobs", "prompt_logprobs"}
    for name in set(WISHES) - as_they_are:
        tokens = [[c.token_ids for c in output.outputs] for output in answers_to(name)]
        assert tokens != greedy, name


@IN_SMALL_POOL
def test_chat_and_a_second_turn_from_the_prefix_cache(pair: Pair) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    conversations = [[user(question)] for question in QUESTIONS]
    for _ in range(2):
        expected, found = pair.both(lambda llm: llm.chat(conversations, params, use_tqdm=False))
        for a, b, conversation in zip(expected, found, conversations, strict=True):
            assert_same(a, b)
            answer = {"role": "assistant", "content": a.outputs[0].text}
            conversation += [answer, user("What is prefix caching?")]
    assert "KV" in conversations[0][1]["content"]


@pytest.mark.parametrize("width", [1, 3])
@IN_SMALL_POOL
def test_beam_search(pair: Pair, width: int) -> None:
    params = BeamSearchParams(width, 10, length_penalty=0.7)
    expected, found = pair.both(lambda llm: llm.beam_search(prompts_for(pair), params))
    for a, b in zip(expected, found, strict=True):
        for one, other in zip(a.sequences, b.sequences, strict=True):
            assert (one.tokens, one.text, one.finish_reason) == (
                other.tokens,
                other.text,
                other.finish_reason,
            )
            assert other.score == pytest.approx(one.score, abs=1e-4)


# ---------------------------------------------------------------- stream


# The others are also among the streams that are read in turn.
@pytest.mark.small(name=["greedy", "stop strings", *(n for n in WISHES if params_of(n).n > 1)])
@pytest.mark.parametrize("name", WISHES)
def test_a_stream_comes_in_the_same_pieces(plain_pair: Pair, name: str) -> None:
    prompt = prompts_for(plain_pair)[0]
    expected, found = plain_pair.both(lambda llm: list(llm.stream(prompt, params_of(name))))
    if params_of(name).n == 1:
        for a, b in zip(expected, found, strict=True):
            assert_same(a, b)
    for index in range(params_of(name).n):  # completions may share a piece or not
        one, other = (
            [c for output in stream for c in output.outputs if c.index == index]
            for stream in (expected, found)
        )
        assert [(c.text, c.token_ids, c.finish_reason) for c in one] == [
            (c.text, c.token_ids, c.finish_reason) for c in other
        ]
    assert found[-1].finished


@IN_SMALL_POOL
def test_streams_that_are_read_in_turn(pair: Pair) -> None:
    """All wishes at once, a piece of each after the other; of some, nothing is left to read."""
    names = [name for name in WISHES if params_of(name).n == 1]
    prompts = prompts_for(pair)

    def read(llm: LLM) -> dict[str, list[RequestOutput]]:
        streams = {
            name: llm.stream(prompts[i % 6], params_of(name)) for i, name in enumerate(names)
        }
        pieces: dict[str, list[RequestOutput]] = {name: [] for name in names}
        while streams:
            for name in list(streams):
                output = next(streams[name], None)
                if output is None:
                    del streams[name]
                else:
                    pieces[name].append(output)
        return pieces

    expected, found = pair.both(read)
    for name in names:
        for a, b in zip(expected[name], found[name], strict=True):
            assert_same(a, b)
        assert found[name][-1].finished


@WITH_PROCESSORS
def test_a_dropped_stream_leaves_the_engine_free(pair: Pair) -> None:
    """At once, although a step of it may still be under way."""
    prompts, greedy = prompts_for(pair), params_of("greedy")
    for llm in pair:
        for num_read in range(4):
            stream = llm.stream(prompts[0], greedy)
            for _ in range(num_read):
                next(stream)
            stream.close()
            llm.generate(prompts[1], greedy, use_tqdm=False)  # refused while requests are left
    pair.assert_same_generated(prompts, greedy)


# ---------------------------------------------------------------- what raises, and what ends early


class Failure(Exception):
    pass


def failing_after(num_tokens: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def processor(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) >= num_tokens:
            raise Failure(f"after {len(output_token_ids)} tokens")
        return logits

    return processor


@pytest.mark.small(num_tokens=[1])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@IN_SMALL_POOL
def test_a_request_whose_own_processor_raises_ends_alone(pair: Pair, num_tokens: int) -> None:
    prompts = prompts_for(pair)
    names = ["greedy", "logprobs", "logits processor, drawn", "prompt_logprobs", "seeded, n=2"]
    alone = pair.assert_same_generated(prompts[1:], [params_of(name) for name in names])
    settings = {"logits_processors": [failing_after(num_tokens)], "logprobs": 1, "max_tokens": 12}
    failing = SamplingParams(**settings, temperature=0.5, seed=1, n=2)
    with_it = pair.assert_same_generated(prompts, [failing, *(params_of(name) for name in names)])
    failed, *others = with_it
    assert failed.finished and str(failed.error) == f"after {num_tokens} tokens"
    assert {completion.finish_reason for completion in failed.outputs} == {"error"}
    assert max(len(completion.token_ids) for completion in failed.outputs) == num_tokens
    for before, output in zip(alone, others, strict=True):
        assert output.error is None
        assert_same(before, output)


@pytest.mark.parametrize("num_tokens", [0, 3])
@WITH_PROCESSORS
def test_a_stream_raises_what_its_processor_raises(pair: Pair, num_tokens: int) -> None:
    params = SamplingParams(temperature=0, logits_processors=[failing_after(num_tokens)])

    def read(llm: LLM) -> list[list[int]]:
        pieces = []
        with pytest.raises(Failure, match=f"after {num_tokens} tokens"):
            for output in llm.stream(prompts_for(pair)[0], params):
                pieces.append(output.outputs[0].token_ids)
        return pieces

    expected, found = pair.both(read)
    assert found == expected and sum(map(len, found)) == num_tokens


def test_what_a_processor_of_the_engine_raises_ends_the_call_and_not_the_engine() -> None:
    failing = []

    def of_engine(logits: torch.Tensor, states: list[Any]) -> None:
        if failing and max(len(state.output_token_ids) for state in states) == 4:
            raise Failure("of the engine")

    for pair in open_pair(num_kv_blocks=NUM_KV_BLOCKS, logits_processors=(of_engine,)):
        prompts, greedy = prompts_for(pair), params_of("greedy")
        before = pair.assert_same_generated(prompts, greedy)
        failing.append(True)
        for llm in pair:
            with pytest.raises(Failure, match="of the engine"):
                llm.generate(prompts, greedy, use_tqdm=False)
        failing.clear()
        for a, b in zip(before, pair.assert_same_generated(prompts, greedy), strict=True):
            assert_same(a, b)
