"""Draft tokens in a whole engine: what is counted, recorded and refused."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from counting_executor import CountingExecutor, Handle, make_engine, run
from proposers import Oracle, speculation_of
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.extension import Speculation
from nanoserve.features.speculative.proposer import TextProposer
from nanoserve.features.trace.reader import read_trace

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


def drafting(path: Path) -> LLM:
    return LLM(path, speculative_config=ALWAYS, **OPTIONS)


def test_an_answer_that_was_given_before_takes_a_fraction_of_the_steps(
    plain: LLM, path: Path
) -> None:
    with drafting(path) as llm:
        expected = answer_of(plain)
        assert answer_of(llm) == expected
        before = llm.stats
        assert answer_of(llm) == expected
        stats = llm.stats
    num_tokens = len(expected[0])
    num_accepted = stats.num_accepted_tokens - before.num_accepted_tokens
    # Each step yields one token, and one for each accepted draft token.
    assert stats.num_steps - before.num_steps == num_tokens - num_accepted
    assert num_accepted > 0.6 * num_tokens
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert stats.num_draft_tokens >= stats.num_accepted_tokens and stats.num_drafts > 0
    at = stats.num_accepted_tokens_per_pos
    assert len(at) == 4 and all(a >= b for a, b in pairwise(at))


def test_perfect_drafts_leave_a_step_for_every_five_tokens(plain: LLM, path: Path) -> None:
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=21, ignore_eos=True)
    expected = answer_of(plain, params)
    with drafting(path) as llm:
        speculation_of(llm).proposer = Oracle(plain)
        assert answer_of(llm, params) == expected
        # The first token comes with the prompt, the others in runs of five.
        assert llm.stats.num_steps == 1 + 20 / 5
        assert llm.stats.num_accepted_tokens == 20 * 4 / 5


def test_a_request_may_have_fewer_draft_tokens_or_none(plain: LLM, path: Path) -> None:
    with drafting(path) as llm:
        speculation_of(llm).proposer = Oracle(plain)
        for most, num_steps in ((0, 21), (1, 1 + 10), (3, 1 + 5), (9, 1 + 4)):
            before = llm.stats.num_steps
            params = SamplingParams(
                temperature=0, max_tokens=21, ignore_eos=True, num_speculative_tokens=most
            )
            answer_of(llm, params)
            assert llm.stats.num_steps - before == num_steps, most


def test_a_request_with_a_processor_of_its_own_has_no_draft_tokens(plain: LLM, path: Path) -> None:
    calls: list[int] = []

    def processor(output_token_ids: list[int], logits: Any) -> Any:
        calls.append(len(output_token_ids))
        return logits

    with drafting(path) as llm:
        speculation_of(llm).proposer = Oracle(plain)
        params = SamplingParams(temperature=0, max_tokens=10, logits_processors=[processor])
        answer_of(llm, params)
        assert llm.stats.num_draft_tokens == 0
    assert calls == list(range(10))  # in order, each once


class Repeating(TextProposer):
    """Drafts the last token again, which the counting executor never samples."""

    def draft(self, seq: Sequence, most: int) -> list[int]:
        return [seq.token_ids[-1]] * most


class Timed(CountingExecutor):
    """A step takes a second, and a tenth of one for each token."""

    seconds = 0.0

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Handle:
        Timed.seconds += 1 + 0.1 * batch.header.num_tokens
        return super().forward(batch, inputs)


def test_rejected_drafts_end_where_they_do_not_pay() -> None:
    options = {"speculative_config": {"method": "ngram"}, "async_scheduling": False}
    engine = make_engine(clock=lambda: Timed.seconds, **options)
    engine.replace_executor(Timed(engine.config))
    engine.add_extension(Speculation(engine, lambda *_: Repeating()))
    engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=200))
    run(engine)
    assert engine.stats.num_steps == 200 and engine.stats.num_accepted_tokens == 0
    assert 0 < engine.stats.num_draft_tokens < 40  # of some 1600 that could be had


def test_a_stream_gets_the_tokens_of_a_step_in_one_output(plain: LLM, path: Path) -> None:
    one_token = SamplingParams(temperature=0, max_tokens=1)
    prompt = plain.chat(QUESTION, one_token, use_tqdm=False)[0].prompt
    params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    expected = [(o.outputs[0].text, o.outputs[0].token_ids) for o in plain.stream(prompt, params)]
    with drafting(path) as llm:
        speculation_of(llm).proposer = Oracle(plain)
        found = [(o.outputs[0].text, o.outputs[0].token_ids) for o in llm.stream(prompt, params)]
        assert llm.stats.num_accepted_tokens == 32
    assert [len(token_ids) for _, token_ids in expected] == [1] * 41
    assert [len(token_ids) for _, token_ids in found] == [1] + [5] * 8
    assert joined(found) == joined(expected)


def joined(pieces: list[tuple[str, list[int]]]) -> tuple[str, list[int]]:
    return "".join(text for text, _ in pieces), [i for _, ids in pieces for i in ids]


def test_a_trace_shows_accepted_and_rejected_draft_tokens(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    options = {"dtype": "float32", "speculative_config": ALWAYS, "trace": path}
    with LLM("tiny-qwen3", **options) as llm:
        token_ids, text, _ = answer_of(llm)
        answer_of(llm)
        stats = llm.stats
    rows = [row for step in read_trace(path).steps for row in step["rows"]]
    drafted = [row for row in rows if "guesses" in row]
    assert len(drafted) == stats.num_drafts
    assert sum(len(row["guesses"]) for row in drafted) == stats.num_draft_tokens
    assert sum(row["right"] for row in drafted) == stats.num_accepted_tokens
    tokens_of = [[], []]
    for row in rows:
        accepted = [token_id for token_id, _ in row.get("guesses", [])[: row.get("right", 0)]]
        tokens_of[row["seq"] - 1] += [*accepted, row["token"]]
        assert row["kind"] == "decode" or "guesses" not in row
    assert [tokens[: len(token_ids)] for tokens in tokens_of] == [token_ids, token_ids]
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


def test_processors_of_the_engine_do_not_go_with_draft_tokens() -> None:
    with pytest.raises(ValueError, match="logits_processors of the engine"):
        LLM("tiny-qwen3", speculative_config=ALWAYS, logits_processors=(print,))


def test_a_negative_number_of_draft_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=-1"):
        SamplingParams(num_speculative_tokens=-1)


class Untouched:
    """A proposer that must not be called."""

    is_model = needs_hidden = False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


def test_a_step_without_rows_calls_no_proposer() -> None:
    """As when all that run wait for a step that is still under way."""
    for adaptive in (False, True):
        drafts = {"method": "ngram", "adaptive": adaptive}
        config = EngineConfig("none", speculative_config=drafts).for_device("cpu")
        extensions: list[Speculation] = []
        scheduler = Scheduler(config, 8, 64, extensions)
        engine: Any = SimpleNamespace(
            config=config, scheduler=scheduler, executor=None, observers=[]
        )
        extensions.append(Speculation(engine, lambda *_: Untouched()))
        assert not scheduler.schedule().rows


def test_a_gpu_drafts_as_many_as_fill_a_tile_unless_a_number_is_given() -> None:
    for given, on_cpu, on_gpu in ((None, 8, 7), (8, 8, 8), (3, 3, 3)):
        drafts = {"method": "ngram", "num_speculative_tokens": given}
        config = EngineConfig("m", speculative_config=drafts)
        for kind, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
            chosen = config.for_device(kind)
            again = chosen.for_device("cpu" if kind == "cuda" else "cuda")
            for each in (chosen, again):  # once for all
                assert each.speculative_config.num_speculative_tokens == expected


@pytest.mark.parametrize(
    ("options", "given", "is_eager"),
    [
        ({}, None, False),
        ({}, True, True),
        ({"attention_backend": "triton"}, None, False),
        # What has not run on a GPU has to be asked for.
        ({"tensor_parallel_size": 2}, None, True),
        ({"tensor_parallel_size": 2}, False, False),
        ({"pipeline_parallel_size": 2}, None, True),
        # And what has no graphs has none by itself.
        ({"enforce_eager": True}, None, True),
        ({"attention_backend": "torch"}, None, True),
        ({"max_num_batched_tokens": 7, "max_num_seqs": 7}, None, True),
    ],
    ids=str,
)
def test_a_gpu_records_graphs_of_steps_with_draft_tokens(
    options: dict[str, Any], given: bool | None, is_eager: bool
) -> None:
    drafts = {"method": "ngram", "enforce_eager": given}
    config = EngineConfig("m", speculative_config=drafts, **options)
    assert config.for_device("cuda").speculative_config.enforce_eager is is_eager
    if given is None:
        assert config.for_device("cpu").speculative_config.enforce_eager
