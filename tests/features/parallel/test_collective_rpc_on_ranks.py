"""A registered function runs on every rank, and its failure on one of them ends nothing."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import toy_functions
from rank_remains import nothing_is_left_behind  # noqa: F401
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams, register_worker_function
from nanoserve.features.parallel.worker_processes import WorkerError
from nanoserve.worker.worker_functions import WORKER_FUNCTIONS

PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
RAY: dict[str, Any] = {**TWO, "distributed_executor_backend": "ray"}


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WORKER_FUNCTIONS, "_entries", WORKER_FUNCTIONS.entries())
    monkeypatch.setenv("PYTHONPATH", str(Path(toy_functions.__file__).parent), os.pathsep)


def make_llm(path: Path, **options: Any) -> LLM:
    common = {"device": "cpu", "skip_tokenizer_init": True, "num_kv_blocks": 60, "block_size": 4}
    return LLM(path, **common | options)


def answers(llm: LLM) -> list[Any]:
    llm.reset_prefix_cache()
    outputs = llm.generate([[5, 6, 7], [*range(40)]], PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def register_all() -> None:
    """Register the functions after the engine was created, which all ranks accept."""
    for name in ("describe", "sum_over_ranks", "fail", "wait", "model", "end_process"):
        register_worker_function(name, f"toy_functions:{name}")


@pytest.mark.small(ranks=[TWO])
@pytest.mark.parametrize("ranks", [TWO, STAGES, TWO | STAGES, RAY], ids=str)
def test_every_rank_calls_it(ranks: dict[str, Any], tmp_path: Path) -> None:
    if ranks is RAY and importlib.util.find_spec("ray") is None:
        pytest.skip("pip install 'nanoserve[ray]'")
    for seed in (1, 2):
        make_qwen3(tmp_path / str(seed), seed)
    with make_llm(tmp_path / "1", **ranks) as llm:
        register_all()
        expected, num_ranks = answers(llm), 4 if ranks == TWO | STAGES else 2
        assert llm.collective_rpc("describe", args=("a",), kwargs={"b": [1]}) == [
            [rank, ["a"], {"b": [1]}] for rank in range(num_ranks)
        ]
        total = float(ranks.get("tensor_parallel_size", 1))
        assert llm.collective_rpc("sum_over_ranks", args=[1.0]) == [total] * num_ranks
        # More than a pipe holds, both ways.
        text = "x" * 300_000
        results = llm.collective_rpc("describe", args=[text])
        assert [args for _, args, _ in results] == [[text]] * num_ranks

        for failing in (0, 1):
            message = f"(?s)'fail' has failed:\nrank {failing}: .*LookupError: no such thing on"
            with pytest.raises(RuntimeError, match=message) as caught:
                llm.collective_rpc("fail", args=[failing])
            assert f"rank {1 - failing}" not in str(caught.value)
        with pytest.raises(RuntimeError, match=r"(?s)rank 0: .*not JSON.*rank 1: .*not JSON"):
            llm.collective_rpc("model")
        assert answers(llm) == expected

        with pytest.raises(TimeoutError, match=r"'wait', timeout=0\.1: ranks \[1\] have not"):
            llm.collective_rpc("wait", 0.1, (1, 0.4))
        assert llm.collective_rpc("wait", None, (0, 0.0)) == [0] * num_ranks  # not the late 1
        assert answers(llm) == expected

        first = llm.collective_rpc("weights_checksum")
        assert len(set(first)) == num_ranks
        llm.update_weights(tmp_path / "2")
        second = llm.collective_rpc("weights_checksum")
        assert not set(first) & set(second)
        llm.update_weights(tmp_path / "1")
        assert llm.collective_rpc("weights_checksum") == first
        for stats in llm.collective_rpc("memory_stats"):
            assert stats["weights_bytes"] > 0 and stats["kv_cache_bytes"] > 0


@pytest.mark.size("full")
@pytest.mark.parametrize("ranks", [TWO, STAGES], ids=str)
def test_a_rank_that_dies_in_it_ends_the_engine(ranks: dict[str, Any], checkpoint: Path) -> None:
    with make_llm(checkpoint, **ranks) as llm:
        register_all()
        with pytest.raises(WorkerError, match="rank 1 ended with 7"):
            llm.collective_rpc("end_process", args=[1])
        with pytest.raises(WorkerError):
            llm.collective_rpc("describe")
        with pytest.raises(WorkerError):
            llm.generate([[1]], PARAMS, use_tqdm=False)


@pytest.mark.size("full")
def test_ranks_that_sleep_cannot_be_called(checkpoint: Path) -> None:
    with make_llm(checkpoint, **TWO) as llm:
        checksums = llm.collective_rpc("weights_checksum")
        llm.sleep(level=2)
        with pytest.raises(ValueError, match=r"this engine is asleep: wake_up\(\) first"):
            llm.collective_rpc("memory_stats")
        llm.wake_up()
        assert llm.collective_rpc("weights_checksum") == checksums
