"""A request that cannot be served as asked is refused before it is queued, and says why."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_executor import VOCAB_SIZE, byte_tokenizer, make_engine
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.engine.guard import GuardedEngine
from nanoserve.utils.checks import shown

INT32_MAX = 2**31 - 1
PENALTIES = [-2.01, 2.01, 3, math.nan, math.inf, -math.inf, "1", None, True, [1.0]]
NO_TEXTS = ["", [""], ["a", ""], 5, [5], [b"a"], [None], {"a"}, True]
BAD_VALUES = [
    *(("max_tokens", value, f"[1, {INT32_MAX}]") for value in (0, -1, 1.5, True, 2**31)),
    *(
        ("temperature", value, "finite and >= 0")
        for value in (-1, math.nan, math.inf, "1", None, True)
    ),
    *(("top_p", value, "(0, 1]") for value in (0, -0.1, 1.1, math.nan, "1")),
    *(("top_k", value, f"[-1, {INT32_MAX}]") for value in (-2, 1.5, 2**31)),
    *(("min_p", value, "[0, 1]") for value in (-0.1, 1.1, math.nan)),
    ("seed", 1.5, "integer"),
    ("seed", 2**64, str(2**64 - 1)),
    *(("stop_token_ids", value, "integers") for value in ([1, 1.5], "12", 5)),
    ("output_kind", "delta", "RequestOutputKind"),
    *(("n", value, "[1, 16384]") for value in (0, -1, 1.0, 2.5, "2", None, True, 2**31)),
    *(("presence_penalty", value, "[-2, 2]") for value in PENALTIES),
    *(("frequency_penalty", value, "[-2, 2]") for value in PENALTIES),
    *(
        ("repetition_penalty", value, "finite and > 0")
        for value in (0, 0.0, -1, math.nan, math.inf, "1", None, True, 10**400)
    ),
    *(
        ("logit_bias", value, "[-100, 100]")
        for value in (
            *({1: 100.5}, {1: -101}, {1: math.nan}, {1: math.inf}, {1: "5"}, {1: None}, {1: True}),
            *({"x": 5}, {1.0: 5}, {True: 5}, {None: 5}, {1: 5, 2: 200}),
            *([1], [(1, 5)], 5, "15", {1, 2}),
        )
    ),
    *(
        ("allowed_token_ids", value, "list of integers, at least one")
        for value in ([], (), [1.5], ["1"], [True], [1, None], "12", 5, {1: 2}, {1})
    ),
    *(("bad_words", value, "list of non-empty strings") for value in [*NO_TEXTS, "abc"]),
    *(("stop", value, "list of non-empty strings") for value in NO_TEXTS[1:]),
    ("stop", "", "omit it or pass a non-empty string"),
    *(
        ("min_tokens", value, f"[0, {INT32_MAX}]")
        for value in (-1, 1.5, "1", None, True, 2**31, math.nan)
    ),
    *(
        (name, value, f"[-1, {INT32_MAX}]")
        for name in ("logprobs", "prompt_logprobs")
        for value in (-2, 1.0, "1", True, 2**31)
    ),
    *(("logprob_token_ids", value, "list of integers") for value in ([1.5], ["1"], 5, {1: 2})),
    *(
        ("extra_args", value, "dictionary whose keys are strings")
        for value in (5, [1], {1: 2}, "a")
    ),
    *(("logits_processors", value, "list of callables") for value in ([5], [None], 5, "f", len)),
    *(
        (name, value, "True or False")
        for name in (
            *("include_stop_str_in_output", "ignore_eos"),
            *("skip_special_tokens", "spaces_between_special_tokens"),
        )
        for value in (None, 0, 1, "True")
    ),
]


@contextmanager
def refuses(engine: GuardedEngine, *told: object) -> Iterator[None]:
    """The block raises a ValueError that contains all of `told`, and leaves no trace."""
    num_steps = engine.stats.num_steps
    with pytest.raises(ValueError) as caught:
        yield
    for part in told:
        assert str(part) in str(caught.value)
    assert not engine.has_unfinished_requests() and not engine.output_processor.requests
    assert engine.stats.num_steps == num_steps
    assert engine.scheduler.block_manager.num_free_blocks == engine.executor.num_kv_blocks
    engine.add_request("good", [5, 6], SamplingParams(temperature=0, max_tokens=2))
    outputs = [output for _ in range(2) for output in engine.step()]
    assert outputs[-1].finished and outputs[-1].request_id == "good"


@pytest.fixture
def engine() -> GuardedEngine:
    return make_engine(byte_tokenizer())


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    make_qwen3(path, vocab_size=VOCAB_SIZE)
    with LLM(path, skip_tokenizer_init=True, num_kv_blocks=8, max_logprobs=VOCAB_SIZE + 9) as llm:
        yield llm


def spoilt(name: str, value: Any) -> SamplingParams:
    """Fields can be assigned to, so a request is checked again when it is made."""
    params = SamplingParams(max_tokens=4)
    setattr(params, name, value)
    return params


@pytest.mark.parametrize(("name", "value", "limit"), BAD_VALUES, ids=str)
def test_a_bad_value_is_refused_with_its_name_and_range(name: str, value: Any, limit: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    assert f"{name}=" in str(caught.value) and limit in str(caught.value)
    if not isinstance(value, dict) or name != "logit_bias":  # there, the bad entry is shown
        assert f"{name}={shown(value)}" in str(caught.value)


def test_a_temperature_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature=1000"):
        SamplingParams(temperature=10**400)


def test_a_misspelt_sampling_parameter_is_told_which_was_meant() -> None:
    with pytest.raises(ValueError, match="'tempereture': did you mean temperature"):
        SamplingParams(tempereture=1)


def test_more_listed_logprobs_than_vllm_allows_are_refused() -> None:
    with pytest.raises(ValueError, match="logprob_token_ids has 129 entries; at most 128"):
        SamplingParams(logprob_token_ids=[*range(129)])


@pytest.mark.parametrize(("name", "value", "limit"), BAD_VALUES, ids=str)
def test_a_value_spoilt_after_construction_is_refused(
    engine: GuardedEngine, name: str, value: Any, limit: str
) -> None:
    with refuses(engine, f"{name}=", limit):
        engine.add_request("bad", "abc", spoilt(name, value))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens=5", "max_tokens=4"]),
        ({"min_tokens": 17}, ["min_tokens=17", "max_tokens=16"]),  # the default
        ({"n": 2, "temperature": 0}, ["n=2", "temperature=0"]),
        ({"n": 2, "temperature": 1e-6}, ["n=2", "temperature=1e-06"]),  # greedy, too
    ],
    ids=str,
)
def test_values_that_contradict_each_other_are_refused(
    engine: GuardedEngine, settings: dict[str, Any], told: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**settings)
    assert all(part in str(caught.value) for part in told)
    params = SamplingParams()
    for name, value in settings.items():
        setattr(params, name, value)
    with refuses(engine, *told):
        engine.add_request("bad", "abc", params)


OUT_OF_VOCABULARY = [
    (name, value(token_id), token_id)
    for name, value in (
        ("allowed_token_ids", lambda token_id: [1, token_id]),
        ("logit_bias", lambda token_id: {1: 2.0, token_id: 5.0}),
        ("stop_token_ids", lambda token_id: [1, token_id]),
    )
    for token_id in (-1, VOCAB_SIZE, 2**40)
]


@pytest.mark.parametrize(("name", "value", "token_id"), OUT_OF_VOCABULARY, ids=str)
def test_a_token_outside_the_vocabulary_is_refused(
    engine: GuardedEngine, name: str, value: Any, token_id: int
) -> None:
    with refuses(engine, name, token_id, f"[0, {VOCAB_SIZE})"):
        engine.add_request("bad", "abc", SamplingParams(**{name: value}))


def test_the_first_and_the_last_token_of_the_vocabulary_are_accepted(engine: GuardedEngine) -> None:
    ends = [0, VOCAB_SIZE - 1]
    params = SamplingParams(allowed_token_ids=ends, logit_bias=dict.fromkeys(ends, 1.0))
    engine.add_request("good", "abc", params)
    assert engine.has_unfinished_requests()


def test_a_bad_word_with_a_token_that_the_model_lacks_is_refused() -> None:
    """A tokenizer may know more tokens than the model has logits."""
    tokenizer = byte_tokenizer()
    tokenizer.encode = lambda text, add_special_tokens=True: [VOCAB_SIZE + len(text)]
    engine = make_engine(tokenizer)
    with refuses(engine, "bad_words", VOCAB_SIZE):
        engine.add_request("bad", [1, 2], SamplingParams(bad_words=["abc"]))


def test_an_eos_that_the_model_lacks_needs_no_holding_back(tmp_path: Path) -> None:
    """It comes from the checkpoint, not from the user, and can never be chosen."""
    make_qwen3(tmp_path, eos_token_id=5000)
    with LLM(tmp_path, skip_tokenizer_init=True, num_kv_blocks=8) as llm:
        params = SamplingParams(min_tokens=2, max_tokens=3)
        (output,) = llm.generate([1, 2], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("max_logprobs", [0, 5])
def test_more_logprobs_than_the_engine_allows_are_refused(name: str, max_logprobs: int) -> None:
    engine = make_engine(max_logprobs=max_logprobs)
    with refuses(engine, f"{name}={max_logprobs + 1}", f"max_logprobs={max_logprobs}"):
        engine.add_request("bad", [1, 2], SamplingParams(**{name: max_logprobs + 1}))
    engine.add_request("good", [1, 2], SamplingParams(**{name: max_logprobs}))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_there_are_tokens_are_refused(llm: LLM, name: str) -> None:
    """This engine's max_logprobs exceeds the vocabulary."""
    with refuses(llm.engine, f"{name}={VOCAB_SIZE + 1}"):
        params = SamplingParams(max_tokens=2, **{name: VOCAB_SIZE + 1})
        llm.generate([1, 2], params, use_tqdm=False)


@pytest.mark.parametrize(
    "settings", [{"stop": "x"}, {"stop": ["x", "y"]}, {"bad_words": ["x"]}], ids=str
)
def test_texts_without_a_tokenizer_are_refused(llm: LLM, settings: dict[str, Any]) -> None:
    with refuses(llm.engine, "stop and bad_words", "tokenizer"):
        llm.generate([1, 2], SamplingParams(**settings), use_tqdm=False)


def test_a_priority_needs_the_priority_policy(llm: LLM, engine: GuardedEngine) -> None:
    with refuses(llm.engine, "priority=1", "scheduling_policy='priority'"):
        llm.generate([[1], [2]], use_tqdm=False, priority=[0, 1])
    with refuses(engine, "priority=-3", "scheduling_policy='priority'"):
        engine.add_request("bad", "abc", SamplingParams(), priority=-3)
    urgent = make_engine(scheduling_policy="priority")
    urgent.add_request("good", [1], SamplingParams(), priority=-3)
    assert urgent.has_unfinished_requests()


@pytest.mark.parametrize("priority", ["high", 1.5, None, True])
def test_a_priority_that_is_no_integer_is_refused(engine: GuardedEngine, priority: Any) -> None:
    with refuses(engine, f"priority={priority!r}", "integer"):
        engine.add_request("bad", "abc", SamplingParams(), priority)


@pytest.mark.parametrize(
    ("priority", "told"),
    [
        ([0], "1 priority"),
        ([0, 0, 0], "3 priority"),
        ([0, 1.5], "1.5"),
        ("01", "int"),
        (0.5, "int"),
    ],
    ids=str,
)
def test_priorities_of_another_number_or_type_are_refused(
    llm: LLM, priority: Any, told: str
) -> None:
    with refuses(llm.engine, "priority", told):
        llm.generate([[1], [2]], use_tqdm=False, priority=priority)


@pytest.mark.parametrize(
    "params",
    [
        spoilt("n", 0),
        spoilt("logit_bias", {VOCAB_SIZE: 1}),
        spoilt("allowed_token_ids", []),
        spoilt("min_tokens", 5),
        spoilt("stop", ["x"]),
        spoilt("prompt_logprobs", VOCAB_SIZE + 10),
    ],
    ids=["n", "logit_bias", "allowed_token_ids", "min_tokens", "stop", "prompt_logprobs"],
)
def test_one_bad_request_in_a_list_queues_none_of_it(llm: LLM, params: SamplingParams) -> None:
    with refuses(llm.engine):
        llm.generate([[1], [2], [3]], [SamplingParams(), params, SamplingParams()], use_tqdm=False)


def test_values_at_the_limits_are_accepted(engine: GuardedEngine) -> None:
    for settings in (
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1e-3},
        {"presence_penalty": np.float32(-2), "repetition_penalty": np.float64(3)},
        {"logit_bias": {1: 100, np.int64(2): -100.0}, "allowed_token_ids": (1,)},
        {"logit_bias": {1: np.float32(0.5), 2: np.int64(3)}},  # numpy's numbers are as good
        {"logit_bias": {}, "bad_words": [], "stop": [], "logits_processors": []},
        {"min_tokens": 4, "max_tokens": 4, "stop": ("a", "b"), "bad_words": ["a", " "]},
        {"min_tokens": 40, "max_tokens": None, "logits_processors": [len]},
        {"n": np.int64(2), "logprobs": 0, "prompt_logprobs": np.int32(20)},
    ):
        engine.add_request(str(settings), "abc", SamplingParams(**settings))
    assert len(engine.output_processor.requests) == 8
