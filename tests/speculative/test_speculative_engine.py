"""Guesses in a whole engine: what is counted, recorded and refused."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from proposers import Oracle, Wrong
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.speculative.ngram import NgramProposer
from nanoserve.speculative.scheduler import SpeculativeScheduler
from nanoserve.trace.reader import read_trace

QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
ALWAYS = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}


def answer_of(llm: LLM, params: SamplingParams = GREEDY) -> tuple[list[int], str, str | None]:
    (completion,) = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs
    return completion.token_ids, completion.text, completion.finish_reason


OPTIONS: dict[str, Any] = {"tokenizer": "tiny-qwen3", "attention_backend": "torch"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_qwen3(path, vocab_size=2048)
    return path


@pytest.fixture(scope="module")
def plain(path: Path) -> Any:
    with LLM(path, **OPTIONS) as llm:
        yield llm


def guessing(path: Path) -> LLM:
    return LLM(path, speculative_config=ALWAYS, **OPTIONS)


def test_an_answer_that_was_given_before_takes_a_fraction_of_the_steps(
    plain: LLM, path: Path
) -> None:
    with guessing(path) as llm:
        expected = answer_of(plain)
        assert answer_of(llm) == expected
        before = llm.stats
        assert answer_of(llm) == expected
        stats = llm.stats
    num_tokens = len(expected[0])
    num_right = stats.num_accepted_tokens - before.num_accepted_tokens
    # Each step yields one token, and one for each right guess.
    assert stats.num_steps - before.num_steps == num_tokens - num_right
    assert num_right > 0.6 * num_tokens
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert stats.num_draft_tokens >= stats.num_accepted_tokens and stats.num_drafts > 0
    at = stats.num_accepted_tokens_per_pos
    assert len(at) == 4 and all(a >= b for a, b in pairwise(at))


def test_perfect_guesses_leave_a_step_for_every_five_tokens(plain: LLM, path: Path) -> None:
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=21, ignore_eos=True)
    expected = answer_of(plain, params)
    with guessing(path) as llm:
        llm.engine.scheduler.proposer = Oracle(plain)
        assert answer_of(llm, params) == expected
        # The first token comes with the prompt, the others in runs of five.
        assert llm.stats.num_steps == 1 + 20 / 5
        assert llm.stats.num_accepted_tokens == 20 * 4 / 5


def test_a_request_may_ask_for_fewer_guesses_or_none(plain: LLM, path: Path) -> None:
    with guessing(path) as llm:
        llm.engine.scheduler.proposer = Oracle(plain)
        for asked, num_steps in ((0, 21), (1, 1 + 10), (3, 1 + 5), (9, 1 + 4)):
            before = llm.stats.num_steps
            params = SamplingParams(
                temperature=0, max_tokens=21, ignore_eos=True, num_speculative_tokens=asked
            )
            answer_of(llm, params)
            assert llm.stats.num_steps - before == num_steps, asked


def test_a_processor_of_its_own_keeps_a_request_from_guessing(plain: LLM, path: Path) -> None:
    calls: list[int] = []

    def processor(output_token_ids: list[int], logits: Any) -> Any:
        calls.append(len(output_token_ids))
        return logits

    with guessing(path) as llm:
        llm.engine.scheduler.proposer = Oracle(plain)
        params = SamplingParams(temperature=0, max_tokens=10, logits_processors=[processor])
        answer_of(llm, params)
        assert llm.stats.num_draft_tokens == 0
    assert calls == list(range(10))  # in order, each once


def test_wrong_guesses_are_given_up_where_they_do_not_pay() -> None:
    with LLM("tiny-qwen3", speculative_config={"method": "ngram"}) as llm:
        llm.engine.scheduler.proposer = Wrong(2048)
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        answer_of(llm, params)
        stats = llm.stats
    assert stats.num_steps - stats.num_accepted_tokens >= 190
    assert stats.num_draft_tokens < 40  # of some 1600 that could be had


def test_a_stream_gets_its_tokens_one_by_one(plain: LLM, path: Path) -> None:
    one_token = SamplingParams(temperature=0, max_tokens=1)
    prompt = plain.chat(QUESTION, one_token, use_tqdm=False)[0].prompt
    pieces = [(o.outputs[0].text, o.outputs[0].token_ids) for o in plain.stream(prompt, GREEDY)]
    with guessing(path) as llm:
        llm.engine.scheduler.proposer = Oracle(plain)
        found = [(o.outputs[0].text, o.outputs[0].token_ids) for o in llm.stream(prompt, GREEDY)]
        assert llm.stats.num_accepted_tokens > 20
    assert found == pieces


def test_a_trace_tells_right_guesses_from_wrong_ones(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    options = {"dtype": "float32", "speculative_config": ALWAYS, "trace": path}
    with LLM("tiny-qwen3", **options) as llm:
        token_ids, text, _ = answer_of(llm)
        answer_of(llm)
        stats = llm.stats
    rows = [row for step in read_trace(path).steps for row in step["rows"]]
    guessed = [row for row in rows if "guesses" in row]
    assert len(guessed) == stats.num_drafts
    assert sum(len(row["guesses"]) for row in guessed) == stats.num_draft_tokens
    assert sum(row["right"] for row in guessed) == stats.num_accepted_tokens
    told = [[], []]
    for row in rows:
        right = [token_id for token_id, _ in row.get("guesses", [])[: row.get("right", 0)]]
        told[row["seq"] - 1] += [*right, row["token"]]
        assert row["kind"] == "decode" or "guesses" not in row
    assert [tokens[: len(token_ids)] for tokens in told] == [token_ids, token_ids]
    texts = [
        text
        for row in rows
        if row["seq"] == 2
        for text in [*(t for _, t in row.get("guesses", [])[: row.get("right", 0)]), row["text"]]
    ]
    assert "".join(texts).startswith(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ngram", "must be a dictionary"),
        ({}, "has no 'method'"),
        ({"method": "eagle"}, "method='eagle' is vLLM's"),
        ({"method": "ngram", "k": 4}, r"unknown option\(s\) \['k'\] in speculative_config"),
        ({"method": "ngram", "num_speculative_tokens": 0}, r"must be an integer in \[1, 32\]"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be an integer"),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2},
            "prompt_lookup_min=5 exceeds prompt_lookup_max=2",
        ),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(
    options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("no such model", speculative_config=options)


def test_processors_of_the_engine_do_not_go_with_guesses() -> None:
    with pytest.raises(ValueError, match="logits_processors of the engine"):
        LLM("tiny-qwen3", speculative_config=ALWAYS, logits_processors=(print,))


def test_a_negative_number_of_guesses_is_refused() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=-1"):
        SamplingParams(num_speculative_tokens=-1)


def test_a_step_without_rows_asks_nobody() -> None:
    """As when all that run wait for a step that is still under way."""
    config = EngineConfig("none", speculative_config={"method": "ngram"}).for_device("cpu")
    scheduler = SpeculativeScheduler(config, num_kv_blocks=8, max_model_len=64)
    scheduler.proposer = NgramProposer(3, 4)
    assert not scheduler.schedule().rows
