"""Weights are replaced on all ranks of an engine, or on none."""

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import failing_rank
import pytest
import torch
from rank_remains import nothing_is_left_behind  # noqa: F401
from safetensors.torch import load_file
from tiny_checkpoints import edit_json, make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.features.parallel.worker_processes import WorkerError
from nanoserve.models.registry import MODELS, register_model
from nanoserve.worker.weight_exchange import WeightExchange

PROMPTS = [[5, 6, 7], [*range(40)]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
]
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}


def make_llm(path: Path, **options: Any) -> LLM:
    common = {"device": "cpu", "skip_tokenizer_init": True, "num_kv_blocks": 60, "block_size": 4}
    return LLM(path, **common | options)


def answers(llm: LLM) -> list[Any]:
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")]
    for seed, path in enumerate(paths):
        make_qwen3(path, seed, tie_word_embeddings=True)
    return paths


@pytest.mark.small(ranks=[TWO, STAGES], options=[{}])
@pytest.mark.full(options=[{}, {"quantization": "int8"}, {"load_format": "dummy"}])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"load_format": "dummy"}],
    ids=str,
)
@pytest.mark.parametrize("ranks", [TWO, STAGES, TWO | STAGES], ids=str)
def test_ranks_answer_as_new_ones(
    folders: list[Path], ranks: dict[str, Any], options: dict[str, Any]
) -> None:
    new = load_file(folders[1] / "model.safetensors")
    plain = {} if "load_format" in options else options
    with make_llm(folders[1], **ranks, **plain) as llm:
        expected = answers(llm)
    with make_llm(folders[0], **ranks, **options) as llm:
        old = answers(llm)
        assert old != expected
        files = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        assert llm.update_weights(iter(new.items())) == 1
        assert answers(llm) == expected
        if "load_format" not in options:
            llm.update_weights(folders[0])
            assert answers(llm) == old
        # A source with an error, which all ranks see: nothing changes, and no file is left.
        without = {name: value for name, value in new.items() if "layers.1.mlp" not in name}
        before = answers(llm)
        with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp"):
            llm.update_weights(without)
        assert answers(llm) == before
        llm.engine.add_request("0", PROMPTS[1], LONG)
        for _ in range(6):
            llm.engine.step()
        llm.update_weights(new, mode="keep", version="new")
        while llm.engine.has_unfinished_requests():
            outputs = llm.engine.step()
        ((completion,),) = [output.outputs for output in outputs]
        assert [version for _, version in completion.weights_versions] in (
            [1, "new"] if "load_format" in options else [2, "new"],
            ["new"],
        )
        assert answers(llm) == expected
        if os.path.isdir("/dev/shm"):
            found = [name for name in os.listdir("/dev/shm") if name.startswith("nanoserve-")]
            assert not set(found) - files
        with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp"):
            llm.update_weights(without, keep_old=False)
        assert answers(llm) == expected
        llm.update_weights(folders[0], keep_old=False, version="dropped")
        assert llm.weights_version == "dropped"
        assert answers(llm) == answers(llm)  # with an empty cache, and with a full one
        llm.update_weights(new, keep_old=False)
        assert answers(llm) == expected
        llm.engine.scheduler.check()


@pytest.fixture
def failing(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """A checkpoint whose rank 1 fails while a file exists, and that file."""
    path, order = tmp_path / "model", tmp_path / "order"
    make_qwen3(path, tie_word_embeddings=True)
    edit_json(path / "config.json", architectures=["FailingQwen3"])
    monkeypatch.setattr(MODELS, "_entries", MODELS.entries())  # of this test only
    register_model("FailingQwen3", "failing_rank:FailingForCausalLM")
    monkeypatch.setenv("FAILING_RANK", str(order))
    monkeypatch.setenv("PYTHONPATH", str(Path(failing_rank.__file__).parent))
    return path, order


@pytest.mark.small(ranks=[TWO])
@pytest.mark.parametrize("ranks", [TWO, STAGES], ids=str)
def test_if_one_rank_fails_none_changes(
    folders: list[Path], failing: tuple[Path, Path], ranks: dict[str, Any]
) -> None:
    path, order = failing
    new = load_file(folders[1] / "model.safetensors")
    with make_llm(folders[1], **ranks) as llm:
        expected = answers(llm)
    with make_llm(path, **ranks) as llm:
        old = answers(llm)
        order.write_text("raise")
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"rank 1 could not .* no room on this rank"):
                llm.update_weights(new)
            assert answers(llm) == old and llm.weights_version == 0
        order.unlink()
        llm.update_weights(new)
        assert answers(llm) == expected


@pytest.mark.size("full")
@pytest.mark.parametrize("ranks", [TWO, STAGES], ids=str)
def test_without_the_old_ones_a_failure_puts_all_to_sleep(
    folders: list[Path], failing: tuple[Path, Path], ranks: dict[str, Any]
) -> None:
    path, order = failing
    new = load_file(folders[1] / "model.safetensors")
    with make_llm(folders[1], **ranks) as llm:
        expected = answers(llm)
    with make_llm(path, **ranks) as llm:
        old = answers(llm)
        order.write_text("raise")
        llm.engine.add_request("0", PROMPTS[0], LONG)
        with pytest.raises(RuntimeError, match=r"rank 1 could not .* no room on this rank"):
            llm.update_weights(new, keep_old=False, mode="abort")
        (output,) = llm.engine.step()
        assert output.outputs[0].finish_reason == "abort"
        with pytest.raises(ValueError, match="asleep"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        with pytest.raises(ValueError, match=r"call wake_up\(\), and then update_weights"):
            llm.update_weights(new, keep_old=False)
        order.unlink()
        llm.wake_up()
        assert answers(llm) == old and llm.weights_version == 0
        llm.update_weights(new, keep_old=False)
        assert answers(llm) == expected


def test_if_rank_0_fails_none_changes(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    new = load_file(folders[1] / "model.safetensors")
    with make_llm(folders[0], **TWO) as llm:
        old = answers(llm)

        def fails(*arguments: Any) -> None:
            raise OSError("no file on this rank")

        with monkeypatch.context() as patch:
            patch.setattr(WeightExchange, "load_weights", fails)
            with pytest.raises(OSError, match="no file on this rank"):
                llm.update_weights(new)
        assert answers(llm) == old
        llm.update_weights(new)
        assert answers(llm) != old


@pytest.mark.size("full")
def test_a_rank_that_dies_ends_the_engine(folders: list[Path], failing: tuple[Path, Path]) -> None:
    path, order = failing
    with make_llm(path, **TWO) as llm:
        order.write_text("exit")
        with pytest.raises(WorkerError, match="rank 1 ended with 7"):
            llm.update_weights(load_file(folders[1] / "model.safetensors"))
        with pytest.raises(WorkerError):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.size("full")
def test_sleeping_ranks_wake_first(folders: list[Path]) -> None:
    with make_llm(folders[1], **TWO) as llm:
        expected = answers(llm)
    with make_llm(folders[0], **TWO) as llm:
        old = answers(llm)
        llm.update_weights(folders[1])
        llm.sleep(2)
        with pytest.raises(ValueError, match=r"call wake_up\(\), and then update_weights"):
            llm.update_weights(folders[1])
        llm.wake_up()
        assert llm.weights_version == 0 and answers(llm) == old
        llm.update_weights(folders[1])
        assert answers(llm) == expected


@pytest.mark.size("full")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_ranks_of_ray(folders: list[Path]) -> None:
    options = {**TWO, "distributed_executor_backend": "ray"}
    with make_llm(folders[1], **TWO) as llm:
        expected = answers(llm)
    with make_llm(folders[0], **options) as llm:
        old = answers(llm)
        llm.update_weights(load_file(folders[1] / "model.safetensors"))
        assert answers(llm) == expected
        with pytest.raises(ValueError, match="missing"):
            llm.update_weights({"a": torch.ones(1)})
        llm.update_weights(folders[0])
        assert answers(llm) == old


def test_files_lie_elsewhere_if_shared_memory_is_full(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanoserve.features import weight_update

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(weight_update, "_SHARED_MEMORY", "/nowhere")
    with weight_update._temporary_folder(1) as folder:
        assert folder.parent == tmp_path
    monkeypatch.setattr(weight_update, "_SHARED_MEMORY", str(tmp_path))
    with weight_update._temporary_folder(2**60) as folder:
        assert folder.parent == tmp_path
