"""A model with sliding windows gives several ranks the tokens of one process.

Each rank of a pipeline has some layers of each group, perhaps none, and all ranks have one pool. On
a CPU with gloo; it has not run on GPUs.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from windowed_models import GREEDY, PROMPTS, WINDOWS, make_windowed

from nanoserve import LLM
from nanoserve.engine.sequence_room import SequenceRoom

OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "max_model_len": 176,
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def get(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        make_windowed(name, path)
        return path

    return get


def make_llm(path: Path, tp: int, stages: int, **options: Any) -> LLM:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": stages}
    common = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    return LLM(path, **common | sizes | OPTIONS | options)


def answers(llm: LLM, num_times: int) -> list[list[int]]:
    """The prompts' answers. The second time, what is in the prefix cache is found there."""
    outputs = llm.generate(PROMPTS * num_times, GREEDY, use_tqdm=False)
    manager = llm.engine.scheduler.block_manager
    manager.check([])
    assert manager.num_free_blocks == manager.num_blocks
    return [output.outputs[0].token_ids for output in outputs]


TINY = "a tiny pool"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
NO_HITS = {"enable_prefix_caching": False, "long_prefill_token_threshold": 7}
CASES = [
    pytest.param(name, *sizes, options, marks=[pytest.mark.size("full")] * (not is_small))
    for is_small, names, sizes, options in [
        (True, ["gemma3"], (2, 1), TINY),
        (False, ["gemma3"], (1, 2), TINY),
        (True, ["mistral"], (2, 2), TINY),
        (False, ["mistral", "gemma2"], (2, 1), TINY),
        (False, ["mistral", "gemma2"], (1, 2), TINY),
        (False, ["gemma2", "gemma3"], (2, 2), TINY),
        (False, ["gemma3"], (2, 2), {"speculative_config": NGRAM}),
        (False, ["gemma3"], (2, 2), NO_HITS),
        (False, ["gemma3"], (2, 1), {"async_scheduling": True}),
        (False, ["gemma3"], (1, 3), TINY),
    ]
    for name in names
]


@pytest.mark.parametrize(("name", "tp", "stages", "options"), CASES, ids=str)
def test_ranks_together_answer_as_one_does(
    name: str, tp: int, stages: int, options: dict[str, Any] | str, make: Callable[[str], Path]
) -> None:
    path, most, is_tiny = make(name), 0, options == TINY
    num_times = 1 if is_tiny else 2
    with make_llm(path, 1, 1, **({} if is_tiny else options)) as llm:
        expected = answers(llm, num_times)
    if is_tiny:
        room = SequenceRoom(WINDOWS[name], OPTIONS["block_size"], OPTIONS["max_num_batched_tokens"])
        num_blocks = room.num_blocks(OPTIONS["max_model_len"])
        # A stage admits fewer in a step: with 2 more blocks, they would wait and not be preempted.
        options = {"num_kv_blocks": num_blocks + (2 if stages == 1 else 5)}

    def look(plan: Any, *_: Any) -> None:
        nonlocal most
        for row in plan.rows:
            most = max(most, sum(map(bool, row.seq.block_tables[-1])))

    with make_llm(path, tp, stages, **options) as llm:
        assert [*llm.engine.scheduler.block_manager.windows] == WINDOWS[name]
        llm.engine.observers.append(look)
        found = answers(llm, num_times)
        assert len(llm.engine.executor.worker_pids) == tp * stages - 1
        assert bool(llm.stats.num_preemptions) == is_tiny
    assert 0 < most <= SequenceRoom([9], 4, 16).num_blocks(1000)
    assert found == expected


@pytest.mark.size("full")
@pytest.mark.parametrize(("tp", "stages", "kind"), [(2, 1, "int8"), (1, 2, "fp8"), (2, 2, "int8")])
def test_ranks_answer_in_8_bits_as_with_all_blocks(
    tp: int, stages: int, kind: str, make: Callable[[str], Path]
) -> None:
    """What one process answers may differ: it adds in another order, and a code may tip over."""
    options = {"kv_cache_dtype": kind, "attention_backend": "torch", "enable_prefix_caching": False}
    found = []
    for keeps_all in (True, False):
        options["disable_hybrid_kv_cache_manager"] = keeps_all
        with make_llm(make("gemma3"), tp, stages, **options) as llm:
            assert llm.engine.scheduler.block_manager.has_windows != keeps_all
            found.append(answers(llm, 1))
    assert found[0] == found[1]


@pytest.mark.size("full")
@pytest.mark.parametrize(("tp", "stages"), [(2, 1), (1, 2)])
def test_ranks_sleep_and_wake(tp: int, stages: int, make: Callable[[str], Path]) -> None:
    with make_llm(make("gemma3"), tp, stages) as llm:
        expected = answers(llm, 1)
        llm.sleep(level=2)
        llm.wake_up()
        assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
        assert answers(llm, 1) == expected
