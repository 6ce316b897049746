"""A connector of one's own: the same tokens as without it, whatever it does."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_workload import KINDS, OPTIONS, SIZE, answers
from shelf_connector import Broken, Shelf
from tiny_checkpoints import make_qwen3
from windowed_models import make_windowed

from nanoserve import LLM, SamplingParams
from nanoserve.engine.plan import Plan
from nanoserve.features.kv_transfer.calls import TransferStats
from nanoserve.features.kv_transfer.connector import (
    register_kv_connector,
)
from nanoserve.features.kv_transfer.load_rate import LoadRate
from nanoserve.features.kv_transfer.loads import ConnectorLoads
from nanoserve.features.kv_transfer.staging import Staging
from nanoserve.worker.model_runner import ModelRunner

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PROMPT = [*range(61)]  # 15 full blocks, and the last token


register_kv_connector("shelf", "shelf_connector:Shelf")
SHELF: dict[str, Any] = {"kv_transfer_config": {"kv_connector": "shelf"}}


@pytest.fixture(autouse=True)
def empty_shelf() -> None:
    Shelf.blocks.clear()


def loads_of(llm: LLM) -> ConnectorLoads:
    (loads,) = [each for each in llm.engine.extensions if isinstance(each, ConnectorLoads)]
    return loads


def stats_of(llm: LLM) -> TransferStats:
    return loads_of(llm).stats


def fill(path: Path, **options: Any) -> list[int]:
    """Compute `PROMPT` in an engine of its own, whose blocks go to the shelf."""
    with LLM(path, **OPTIONS, **SHELF, **options) as llm:
        (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.mark.small(kind=["plain", "async"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "two stages"])
@pytest.mark.parametrize("size", [None, SIZE], ids=["connector", "connector and host tier"])
def test_the_same_tokens_as_without_it(kind: str, size: float | None, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    options = {**OPTIONS, **KINDS[kind]}
    with LLM(tmp_path, **options) as llm:
        expected = answers(llm)
    for is_first in (True, False):
        with LLM(tmp_path, **options, **SHELF, kv_offloading_size=size) as llm:
            assert answers(llm) == expected
            stats = stats_of(llm)
            assert stats.num_failed == stats.num_late == 0
            assert stats.num_stored > 100 if is_first else stats.hits > 50


@pytest.mark.small(name=["gemma2"])
@pytest.mark.parametrize(("name", "num_groups"), [("mistral", 1), ("gemma2", 3)])
def test_groups_of_layers(name: str, num_groups: int, tmp_path: Path) -> None:
    make_windowed(name, tmp_path)
    options = OPTIONS | {"num_kv_blocks": 130}
    with LLM(tmp_path, **options) as llm:
        expected = answers(llm)
    for _ in range(2):
        with LLM(tmp_path, **options, **SHELF) as llm:
            assert answers(llm) == expected
            hits = stats_of(llm).hits
    assert hits
    assert len({key.group for key in Shelf.blocks}) == num_groups


def test_another_engine_loads_what_one_has_computed(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    expected = fill(tmp_path)
    with LLM(tmp_path, **OPTIONS, **SHELF) as llm:
        (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens == 60 and llm.stats.num_computed_tokens == 1
        assert stats_of(llm).hits == 60


def test_sequences_with_one_prompt_load_it_once(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    expected = fill(tmp_path)
    with LLM(tmp_path, **OPTIONS, **SHELF) as llm:
        outputs = llm.generate([PROMPT] * 5, ONE, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [expected] * 5
        assert [output.num_cached_tokens for output in outputs] == [60] * 5
        assert stats_of(llm).num_loaded == 15


def test_two_ranks_have_one_block(tmp_path: Path) -> None:
    """Each copies its share. After a sleep other processes have taken their places."""
    make_qwen3(tmp_path)
    ranks = {"tensor_parallel_size": 2}
    expected = fill(tmp_path, **ranks)
    (size,) = {len(content) for content in Shelf.blocks.values()}
    with LLM(tmp_path, **OPTIONS, **SHELF, **ranks) as llm:
        for num_cached in (60, 0):
            (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
            assert output.outputs[0].token_ids == expected
            assert output.num_cached_tokens == num_cached
            llm.sleep(2)
            llm.wake_up()
    Shelf.blocks.clear()
    assert fill(tmp_path) == expected
    assert {len(content) for content in Shelf.blocks.values()} == {size}


@pytest.mark.parametrize("difference", ["weights", "salt", "block size", "data type", "ranks"])
def test_other_kv_is_not_found(difference: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    fill(tmp_path)
    options: dict[str, Any] = {**OPTIONS, **SHELF}
    salt = "another tenant" if difference == "salt" else None
    if difference == "weights":
        make_qwen3(tmp_path, seed=1)
    elif difference == "block size":
        options["block_size"] = 8
    elif difference == "data type":
        options["kv_cache_dtype"] = "int8"
    elif difference == "ranks":
        options["tensor_parallel_size"] = 2
    with LLM(tmp_path, **options) as llm:
        prompt = {"prompt_token_ids": PROMPT, **({"cache_salt": salt} if salt else {})}
        llm.generate(prompt, ONE, use_tqdm=False)
        assert stats_of(llm).num_loaded == 0


def test_a_copy_of_the_model_finds_the_same(tmp_path: Path) -> None:
    make_qwen3(tmp_path / "a")
    make_qwen3(tmp_path / "b")
    fill(tmp_path / "a")
    with LLM(tmp_path / "b", **OPTIONS, **SHELF) as llm:
        llm.generate(PROMPT, ONE, use_tqdm=False)
        assert stats_of(llm).hits == 60


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles(role: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    fill(tmp_path)
    num_blocks = len(Shelf.blocks)
    options = {"kv_transfer_config": {"kv_connector": "shelf", "kv_role": role}}
    with LLM(tmp_path, **OPTIONS, **options) as llm:
        llm.generate([PROMPT, [7] * 40], ONE, use_tqdm=False)
        assert stats_of(llm).hits == (60 if role == "kv_consumer" else 0)
    assert (len(Shelf.blocks) > num_blocks) == (role == "kv_producer")


def test_weights_that_are_read_again_may_be_others(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    fill(tmp_path)
    with LLM(tmp_path, **OPTIONS, **SHELF) as llm:
        llm.sleep(1)
        llm.wake_up()
        llm.generate(PROMPT, ONE, use_tqdm=False)
        assert stats_of(llm).hits == 60
        llm.sleep(2)
        make_qwen3(tmp_path, seed=1)
        llm.wake_up()
        (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
    with LLM(tmp_path, **OPTIONS) as llm:
        (expected,) = llm.generate(PROMPT, ONE, use_tqdm=False)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("method", ["sleep", "weights"])
def test_new_weights_have_no_connector(method: str, tmp_path: Path) -> None:
    """The fingerprint is that of the weights with which the engine has started."""
    make_qwen3(tmp_path / "a")
    make_qwen3(tmp_path / "b", seed=1)
    fill(tmp_path / "a")
    with LLM(tmp_path / "b", **OPTIONS) as llm:
        (expected,) = llm.generate(PROMPT, ONE, use_tqdm=False)
    with LLM(tmp_path / "a", **OPTIONS, **SHELF) as llm:
        if method == "sleep":
            llm.sleep(2)
            llm.wake_up(["kv_cache"])
        llm.update_weights(tmp_path / "b")
        (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert stats_of(llm).hits == 0


# ---------------------------------------------------------------- misfortunes


@pytest.mark.parametrize("trouble", ["find", "all", "load", "half", "store", "late"])
def test_trouble_costs_time_and_no_request(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path)
    expected = fill(tmp_path)
    monkeypatch.setattr(Broken, "trouble", trouble)
    monkeypatch.setattr(Broken, "may_go_on", threading.Event())
    options = {
        "kv_connector": "Broken",
        "kv_connector_module_path": "shelf_connector",
        "kv_connector_extra_config": {"load_timeout": 0.05 if trouble == "late" else 20},
    }
    with LLM(tmp_path, **OPTIONS, kv_transfer_config=options) as llm:
        outputs = llm.generate([PROMPT, [5] * 50], ONE, use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == expected
        Broken.may_go_on.set()
        hits, stats = stats_of(llm).hits, stats_of(llm)
        assert hits == {"half": 28, "store": 60, "all": 60}.get(trouble, 0)
        assert stats.num_late == (trouble == "late")
    assert (stats.num_failed > 0) == (trouble in ("load", "store", "all")), stats


def test_a_request_is_aborted_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path)
    expected = fill(tmp_path)
    monkeypatch.setattr(Broken, "trouble", "late")
    monkeypatch.setattr(Broken, "may_go_on", threading.Event())
    options = {"kv_connector": "Broken", "kv_connector_module_path": "shelf_connector"}
    with LLM(tmp_path, **OPTIONS, kv_transfer_config=options) as llm:
        engine, staging = llm.engine, loads_of(llm)._staging
        for name in ("a", "b"):  # the second one follows the first
            engine.add_request(name, PROMPT, ONE)
        engine.step()
        assert len(engine.scheduler.held) == 2
        engine.abort_request("a")
        Broken.may_go_on.set()
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [output.request_id for output in outputs if output.finished] == ["b"]
        assert outputs[-1].outputs[0].token_ids == expected
        until = time.monotonic() + 10
        while staging.num_free < staging.num_places and time.monotonic() < until:
            loads_of(llm).on_step_start()
        assert staging.num_free == staging.num_places


def test_a_small_buffer_loads_a_part(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    expected = fill(tmp_path)
    block_bytes = len(next(iter(Shelf.blocks.values())))
    options = {"kv_connector": "shelf", "kv_buffer_size": 4 * block_bytes}
    with LLM(tmp_path, **OPTIONS, kv_transfer_config=options) as llm:
        (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens == 16


# ---------------------------------------------------------------- parts


def test_a_place_is_free_when_its_step_has_ended() -> None:
    staging = Staging(10, 4, lambda: np.zeros((20, 1), dtype=np.uint8))
    first, second, third = Plan(0), Plan(0), Plan(0)
    staging.begin_step(first, staging.take(2))
    staging.begin_step(second, staging.take(1))
    assert staging.num_free == 1
    with pytest.raises(IndexError, match="2 staging places wanted, 1 are free"):
        staging.take(2)
    staging.end_step(first)
    assert staging.num_free == 3
    # The results of the second step are discarded, but the device may still run it.
    staging.discard_steps(staging.take(1))
    staging.end_step(second)
    assert staging.num_free == 2
    staging.begin_step(third, [])
    assert staging.num_free == 2
    staging.end_step(third)
    assert sorted(staging.take(4)) == [10, 11, 12, 13]


def test_a_load_pays_if_it_is_expected_to_be_faster() -> None:
    rate = LoadRate()
    assert rate.pays(1, 16)  # nothing is known yet
    for num_blocks in (1, 4, 16):
        rate.note_load(num_blocks, 0.01 + 0.001 * num_blocks)
    for num_tokens in (8, 64, 256):  # the first one is a decode step
        rate.note_step(num_tokens, 0.0005 * num_tokens)
    assert rate.loads.seconds(100) == pytest.approx(0.11)
    assert rate.steps.seconds(1600) == pytest.approx(0.8)
    assert rate.pays(100, 1600)
    assert [rate.pays(1, 16) for _ in range(32)].count(True) == 2  # to measure again


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_connector": "NixlConnector"}, "'NixlConnector' is not one of"),
        ({}, "needs the name of a connector"),
        ({"kv_connector": "shelf", "kv_role": "both"}, "kv_role='both' must be one of"),
        ({"kv_connector": "shelf", "kv_buffer_size": 0}, "kv_buffer_size=0"),
        ({"kv_connector": "shelf", "kv_buffer_size": 10}, "holds no KV block"),
        ({"kv_connector": "shelf", "kv_buffer_size": 1e17}, "more than this machine's memory"),
        ({"kv_connector": "shelf", "kv_port": 0}, "kv_port=0"),
        ({"kv_connector": "shelf", "kv_ip": ""}, "kv_ip=''"),
        ({"kv_connector": "shelf", "kv_rank": 1}, "kv_rank"),
        (
            {"kv_connector": "shelf", "kv_connector_extra_config": {"load_timeout": -1}},
            "load_timeout=-1",
        ),
        (
            {"kv_connector": "Gone", "kv_connector_module_path": "shelf_connector"},
            "'Gone' is not in kv_connector_module_path='shelf_connector'",
        ),
        (
            {"kv_connector": "Gone", "kv_connector_module_path": "no_such_module"},
            "No module named 'no_such_module'",
        ),
        ("disk", "kv_transfer_config"),
    ],
)
def test_bad_options_are_rejected_before_weights_are_read(
    options: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path)
    monkeypatch.setattr(ModelRunner, "load", lambda *args: pytest.fail("weights are read"))
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, kv_transfer_config=options, **OPTIONS)


def test_pairs_of_options(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    for options, message in (
        ({"kv_offloading_path": "x"}, "is short for kv_transfer_config"),
        ({"enable_prefix_caching": False}, "kv_transfer_config needs enable_prefix_caching=True"),
        ({"pipeline_parallel_size": 2}, "ranks on one machine .got pipeline_parallel_size=2"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(tmp_path, **OPTIONS, **SHELF, **options)
