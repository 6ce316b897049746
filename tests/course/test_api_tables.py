"""The tables of the API are whole, and say something of each name."""

import re
from dataclasses import fields

import api_tables

from nanoserve import SamplingParams
from nanoserve.compat.options import FOREIGN, RENAMED
from nanoserve.compat.request_names import OF_VLLM
from nanoserve.config import EngineConfig


def test_each_parameter_has_a_default_and_a_meaning() -> None:
    rows = api_tables.sampling_parameters()
    names = [name.strip("`") for name, _, _ in rows]
    assert sorted(names) == sorted(field.name for field in fields(SamplingParams))
    assert all(default and len(meaning) > 10 for _, default, meaning in rows)


def test_each_name_of_vllms_says_what_becomes_of_it() -> None:
    told = {name.strip("`"): (what, instead) for name, what, instead in api_tables.vllm_options()}
    ours = {field.name for field in fields(EngineConfig)} - {*api_tables.own_options()}
    assert told.keys() == ours | FOREIGN.keys() | RENAMED.keys()
    assert all(what.startswith("have") or instead for what, instead in told.values())
    assert not any(re.search(r"but for $", what) for what, _ in told.values())
    parameters = {name.strip("`") for name, _, _ in api_tables.vllm_parameters()}
    assert parameters > OF_VLLM
