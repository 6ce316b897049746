"""Models with sliding windows: blocks behind them go back, and nothing else changes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from windowed_models import GREEDY, MODELS, PROMPTS, WINDOWS, make_windowed

from nanoserve import LLM
from nanoserve.config import EngineConfig
from nanoserve.engine.kv_groups import group_layers
from nanoserve.engine.sequence_room import SequenceRoom

MODEL = pytest.mark.parametrize("name", MODELS)
BACKEND = pytest.mark.parametrize("backend", ["torch", "numba"])


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """The checkpoint of a model, and what transformers answers."""

    @cache
    def get(name: str) -> tuple[Path, list[list[int]]]:
        path = tmp_path_factory.mktemp(name)
        reference = make_windowed(name, path)
        return path, [expected_answer(reference, prompt) for prompt in PROMPTS]

    return get


@torch.inference_mode()
def expected_answer(reference: PreTrainedModel, prompt: list[int]) -> list[int]:
    token_ids = list(prompt)
    for _ in range(GREEDY.max_tokens):
        logits = reference(torch.tensor([token_ids]), use_cache=False).logits[0, -1]
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]


def answers(path: Path, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    options = {"skip_tokenizer_init": True, "block_size": 4, "max_num_seqs": 4} | options
    with LLM(path, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        manager = llm.engine.scheduler.block_manager
        manager.check([])
        assert manager.num_free_blocks == manager.num_blocks
        assert manager.has_windows != options.get("disable_hybrid_kv_cache_manager", False)
        num_preemptions = llm.engine.scheduler.num_preemptions
    if "num_kv_blocks" in options and options["max_num_seqs"] > 1:
        assert num_preemptions > 0, "the pool is not tiny"
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.small(name=["gemma3"], chunk=[7])
@MODEL
@BACKEND
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_same_as_transformers_in_chunks(name, backend, chunk, make) -> None:
    if backend == "numba":
        pytest.importorskip("numba", reason="pip install 'nanoserve[cpu]'")
    path, expected = make(name)
    options = {"attention_backend": backend, "long_prefill_token_threshold": chunk}
    assert answers(path, **options) == expected


@MODEL
@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"disable_hybrid_kv_cache_manager": True},
        {"async_scheduling": True},
        {"block_size": 16},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"kv_cache_dtype": "auto", "max_num_batched_tokens": 16, "max_num_seqs": 8},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_same_with_other_features(name, options, make) -> None:
    path, expected = make(name)
    # Twice: the second time, all prompts are in the prefix cache.
    prompts = [*PROMPTS, *PROMPTS]
    assert answers(path, prompts, **options) == [*expected, *expected]


@MODEL
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_same_in_a_tiny_pool(name, drafts, is_async, make) -> None:
    path, expected = make(name)
    room = SequenceRoom(WINDOWS[name], 4, 16)
    options = {"max_num_batched_tokens": 16, "async_scheduling": is_async}
    if drafts:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    num_blocks = room.num_blocks(176) + 2
    answered = answers(path, num_kv_blocks=num_blocks, max_model_len=176, **options)
    assert answered == expected


@pytest.mark.small(name=["gemma3"], backend=["torch"], kind=["int8"], options=[{"max_num_seqs": 1}])
@MODEL
@BACKEND
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": False, "long_prefill_token_threshold": 7},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 1},
    ],
    ids="-".join,
)
def test_in_8_bits_the_same_as_with_all_blocks(name, backend, kind, options, make) -> None:
    """A block that is given back is written by layers of another group, its scales as well.

    Sequences that run together may each compute a prefix that they share. Of these copies, which
    differ by rounding, the two engines find different ones, and an 8-bit code may tip over. So
    prefixes are cached with one sequence at a time only.
    """
    if backend == "numba":
        pytest.importorskip("numba", reason="pip install 'nanoserve[cpu]'")
    path, _ = make(name)
    options = {"attention_backend": backend, "kv_cache_dtype": kind, **options}
    expected = answers(path, **options, disable_hybrid_kv_cache_manager=True)
    if "max_num_batched_tokens" in options:  # a pool in which blocks are written again at once
        room = SequenceRoom(WINDOWS[name], 4, options["max_num_batched_tokens"])
        options |= {"num_kv_blocks": room.num_blocks(176), "max_model_len": 176}
    assert answers(path, **options) == expected


@MODEL
def test_a_sequence_holds_its_window_and_a_step(name, make) -> None:
    path, _ = make(name)
    most = 0

    def look(plan, *_: Any) -> None:
        nonlocal most
        for row in plan.rows:
            held = [sum(map(bool, table)) for table in row.seq.block_tables[-1:]]
            most = max(most, *held)

    options = {"block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 8}
    with LLM(path, skip_tokenizer_init=True, **options) as llm:
        llm.engine.observers.append(look)
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        windows = llm.engine.scheduler.block_manager.windows
    assert windows[-1] == 9
    assert 0 < most <= SequenceRoom([9], 4, 8).num_blocks(1000) == 5


def test_a_window_as_wide_as_the_longest_sequence_is_none(make) -> None:
    path, _ = make("mistral")
    with LLM(path, skip_tokenizer_init=True, max_model_len=9) as llm:
        assert llm.engine.scheduler.block_manager.windows == (None,)


def test_layers_are_spread_over_groups_of_equal_size() -> None:
    gemma3 = ([512] * 5 + [None]) * 4 + [512] * 2
    groups = group_layers(gemma3)
    assert [(group.window, len(group.layers)) for group in groups] == [
        *((None, 4), (512, 4), (512, 4), (512, 4), (512, 4), (512, 3), (512, 3)),
    ]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(26))
    assert all(gemma3[layer] == group.window for group in groups for layer in group.layers)
    assert [len(group.layers) for group in group_layers([None, 7, 7, 7, 7, 7, 9])] == [1] * 7
    assert [len(group.layers) for group in group_layers([None, None, 7, 7, 7])] == [2, 3]


@pytest.mark.parametrize("windows", [[None], [9], [None, 9], [None, 9, 30], [1]])
def test_room_and_longest_sequence_agree(windows: list[int | None]) -> None:
    room = SequenceRoom(windows, 4, 8)
    for num_blocks in range(1, 60):
        longest = room.longest(num_blocks)
        assert room.num_blocks(longest) <= num_blocks
        is_bounded = longest < 2**31 - 8
        assert not is_bounded or room.num_blocks(longest + 1) > num_blocks


@pytest.mark.parametrize(
    ("kind", "chosen", "expected"),
    [("cpu", None, False), ("cuda", None, True), ("cuda", False, False), ("cpu", True, True)],
)
def test_groups_are_asked_for_on_a_gpu_where_they_have_not_run(kind, chosen, expected) -> None:
    config = EngineConfig("none", disable_hybrid_kv_cache_manager=chosen).for_device(kind)
    assert config.disable_hybrid_kv_cache_manager is expected
