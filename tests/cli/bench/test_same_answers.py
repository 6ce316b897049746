"""benchmarks/same_answers.py: equal answers are equal, and each kind of difference is found."""

import copy
from typing import Any

import pytest
from same_answers import Comparison, distance_of
from same_answers_run import run_configuration
from same_answers_scenario import make_scenario

OPTIONS = {"dtype": "float32", "num_threads": 1, "attention_backend": "torch"}


@pytest.fixture(scope="module")
def configuration() -> dict[str, Any]:
    request = {"id": "a", "prompt": [5, 6, 7], "arrival": 0}
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 4, "logprobs": 1, "n": 2}
    asked = [request | {"params": params}]
    asked.append(asked[0] | {"id": "b", "abort_after": 2, "arrival": 1})
    asked.append(asked[0] | {"id": "c", "prompt": []})
    rounds = [{"kind": "engine", "requests": asked}]
    return {"name": "small", "options": OPTIONS, "rounds": rounds, "is_exact": True}


@pytest.fixture(scope="module")
def answers(configuration: dict[str, Any]) -> dict[str, Any]:
    return run_configuration(configuration)


def fields_of(configuration: dict[str, Any], old: Any, new: Any) -> list[str]:
    found = Comparison(configuration, 0.0, has_same_steps=True)
    found.compare(old, new)
    return [difference.field.split(" (")[0] for difference in found.differences]


def test_answers_equal_themselves(configuration: dict[str, Any], answers: dict[str, Any]) -> None:
    complete, aborted, refused = answers["rounds"][0]
    assert len(complete["completions"]) == 2 and complete["finished"]
    assert aborted["completions"][0]["finish_reason"] == "abort"
    assert refused["refused"][0] == "ValueError"
    assert fields_of(configuration, answers, copy.deepcopy(answers)) == []


@pytest.mark.parametrize("field", ["token_ids", "text", "finish_reason", "logprobs"])
def test_another_completion_is_found(
    configuration: dict[str, Any], answers: dict[str, Any], field: str
) -> None:
    other = copy.deepcopy(answers)
    completion = other["rounds"][0][0]["completions"][1]
    completion[field] = completion[field][:-1]
    assert fields_of(configuration, answers, other) == [field]


def test_an_aborted_answer_may_be_shorter_but_not_another(
    configuration: dict[str, Any], answers: dict[str, Any]
) -> None:
    other = copy.deepcopy(answers)
    completion = other["rounds"][0][1]["completions"][0]
    completion["token_ids"].pop()
    assert fields_of(configuration, answers, other) == []
    completion["token_ids"][0] += 1
    assert fields_of(configuration, answers, other) == ["token_ids"]


def test_another_error_and_a_missing_round_are_found(
    configuration: dict[str, Any], answers: dict[str, Any]
) -> None:
    other = copy.deepcopy(answers)
    other["rounds"][0][2]["refused"][1] = "no"
    assert fields_of(configuration, answers, other) == ["refused"]
    assert fields_of(configuration, answers, {"rounds": []}) == ["the round did not end"]


def test_log_probabilities_have_a_distance() -> None:
    old, new = [[[5, -1.0], [6, -2.0]]], [[[5, -1.5], [7, -2.0]]]
    assert distance_of(old, new) == 0.5
    assert distance_of(old, None) == distance_of(old, [[[7, -1.0], [6, -2.0]]]) == float("inf")


def test_a_seed_makes_one_scenario() -> None:
    scenario = make_scenario(1)
    assert scenario == make_scenario(1) != make_scenario(2)
    assert sum(len(r["requests"]) for one in scenario for r in one["rounds"]) >= 3000
