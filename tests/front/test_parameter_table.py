"""Every list of sampling parameters is made from one table."""

import importlib
from dataclasses import fields
from typing import Any, get_args

import pytest
from fresh_modules import fresh_modules

pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")  # one list is of its bodies

from nanoserve import SamplingParams
from nanoserve.checkpoint.model_config import default_sampling
from nanoserve.cli.chat import command as chat
from nanoserve.compat.sampling import FOREIGN
from nanoserve.features.speculative.draft_model import _simplified
from nanoserve.sampling import diagnostics
from nanoserve.serve.http import protocol
from nanoserve.utils.parameter_table import PARAMETERS, Stage, names_of, stages_before

# What the lists were when each was kept by hand.
OF_BODIES = {
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature"),
    *("top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "bad_words", "ignore_eos"),
    *("include_stop_str_in_output", "max_tokens", "min_tokens", "prompt_logprobs"),
    *("allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
    "num_speculative_tokens",
}
CHANGE_LOGITS = [
    *("allowed_token_ids", "bad_words", "min_tokens", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("logits_processors", "structured_outputs"),
]
RECOMMENDED = {
    **{"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"},
    **{"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"},
}
FLAGS = {"temperature": float, "top_p": float, "top_k": int, "max_tokens": int, "seed": int}
MAY_BE_NONE = {
    *("seed", "max_tokens", "logprobs", "num_speculative_tokens", "prompt_logprobs"),
    *("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids"),
    *("logits_processors", "logprob_token_ids", "extra_args", "structured_outputs"),
}
# Values at which a parameter does something, and at which it does nothing.
SET: dict[str, Any] = {
    **{"allowed_token_ids": [1], "bad_words": ["a"], "min_tokens": 1, "logit_bias": {1: 2.0}},
    **{"repetition_penalty": 0.9, "frequency_penalty": -1, "presence_penalty": 0.1},
    **{"logits_processors": [max], "top_k": 1, "top_p": 0.5, "min_p": 0.1},
}
UNSET: dict[str, Any] = {
    **{"bad_words": [], "min_tokens": 0, "logit_bias": {}, "repetition_penalty": 1.0},
    **{"frequency_penalty": 0, "presence_penalty": -0.0, "logits_processors": []},
    **{"top_k": -1, "top_p": 1, "min_p": 0.0},
}


def test_a_parameter_is_a_field_and_a_row() -> None:
    assert {*PARAMETERS} == {field.name for field in fields(SamplingParams)}


def test_the_lists_are_those_that_were_kept_by_hand() -> None:
    assert {*protocol._SAME} == OF_BODIES
    assert [*diagnostics._CHANGES] == CHANGE_LOGITS
    assert names_of("filter") == ("min_p", "top_k", "top_p")
    assert names_of("temperature") == ("temperature",)
    assert chat._FLAGS == FLAGS
    assert {name for name, row in PARAMETERS.items() if row.optional} == MAY_BE_NONE
    assert {row.stage for row in PARAMETERS.values()} == {None, *get_args(Stage)}
    assert stages_before("temperature") == ("mask", "bias", "penalty", "processor", "grammar")
    assert not {*FOREIGN} & {*PARAMETERS} and "prompt" not in FOREIGN


def test_every_parameter_of_bodies_is_a_field_of_theirs() -> None:
    assert {*protocol.GenerationBody.model_fields} >= OF_BODIES


def test_a_generation_config_recommends_what_it_did() -> None:
    generation = {name: number for number, name in enumerate(RECOMMENDED)}
    found = default_sampling({**generation, "num_beams": 4, "min_tokens": 2, "max_tokens": 9})
    assert found == {ours: generation[theirs] for theirs, ours in RECOMMENDED.items()}


@pytest.mark.parametrize("name", SET)
def test_a_parameter_acts_in_its_stage_unless_it_is_neutral(name: str) -> None:
    is_filter = name in ("top_k", "top_p", "min_p")
    for value, is_set in ((SET[name], True), *([(UNSET[name], False)] if name in UNSET else [])):
        params = SamplingParams(**{name: value})
        assert params.filters_logits == (is_filter and is_set)
        assert params.changes_logits == (not is_filter and is_set)
        assert params.has_penalties == (name.endswith("penalty") and is_set)


def test_a_draft_model_keeps_temperature_and_filters() -> None:
    kept = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    others = {"presence_penalty": 1, "seed": 3, "stop": ["a"], "logprobs": 2, "max_tokens": 90}
    assert _simplified(SamplingParams(**kept, **others)) == SamplingParams(**kept)


def test_a_row_that_is_changed_is_seen_everywhere() -> None:
    """As a new row would be: here two parameters get another range, stage and home."""
    with fresh_modules("nanoserve"):
        table = importlib.import_module("nanoserve.utils.parameter_table")
        table.PARAMETERS["num_speculative_tokens"] = table.Parameter(
            table.integer(0, 5), "filter", optional=True, recommended_as="num_drafts", flag=int
        )
        table.PARAMETERS["detokenize"] = table.Parameter(table.switch, "mask", is_http=True)
        params = importlib.import_module("nanoserve.sampling_params").SamplingParams
        draft_model = importlib.import_module("nanoserve.features.speculative.draft_model")
        model_config = importlib.import_module("nanoserve.checkpoint.model_config")
        body = importlib.import_module("nanoserve.serve.http.protocol")
        errors = importlib.import_module("nanoserve.sampling.diagnostics")
        flags = importlib.import_module("nanoserve.cli.chat.command")._FLAGS
        with pytest.raises(ValueError, match=r"num_speculative_tokens=6 must be .* in \[0, 5\]"):
            params(num_speculative_tokens=6)
        given = params(num_speculative_tokens=4)
        assert given.filters_logits and not params(num_speculative_tokens=0).filters_logits
        assert draft_model._simplified(given).num_speculative_tokens == 4
        recommended = model_config.default_sampling({"num_drafts": 3})
        assert recommended == {"num_speculative_tokens": 3}
        assert flags == FLAGS | {"num_speculative_tokens": int}
        assert {*body._SAME} == OF_BODIES - {"num_speculative_tokens"} | {"detokenize"}
        assert {*errors._CHANGES} == {*CHANGE_LOGITS, "detokenize"}
        assert params().changes_logits and not params(detokenize=False).changes_logits
