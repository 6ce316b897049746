"""An engine that sleeps gives its memory back, and answers afterwards as it did before."""

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from tiny_checkpoints import make_qwen3
from windowed_models import WINDOWS, make_windowed

from nanoserve import LLM, SamplingParams
from nanoserve.attention.kv_cache import KVCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.sleep import Sleeper
from nanoserve.models.layers.context import LayerContext
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner

PROMPTS = [[5, 6, 7], [*range(40)], [9] * 33]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=9, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.8, max_tokens=7, n=2, seed=4, ignore_eos=True),
]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 30, "block_size": 4}
KINDS = [
    {},
    {"attention_backend": "torch", "dtype": "bfloat16"},
    {"quantization": "int8"},
    {"kv_cache_dtype": "int8"},
    {"async_scheduling": True},
    {"speculative_config": {"method": "ngram"}},
    {"num_kv_blocks": None},
]


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


@pytest.mark.small(options=KINDS[:3])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_what_was_answered_is_answered_the_same_to_the_bit(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    with LLM(checkpoint, **{**OPTIONS, **options}) as llm:
        num_blocks, expected = llm.engine.executor.num_kv_blocks, answers(llm)
        for level in (1, 2, 2, 1):
            llm.sleep(level)
            llm.wake_up()
            assert llm.generate(PROMPTS[1], PARAMS[0], use_tqdm=False)[0].num_cached_tokens == 0
            assert answers(llm) == expected
        assert llm.engine.executor.num_kv_blocks == num_blocks


@pytest.mark.small(options=[{"kv_cache_dtype": "int8"}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_a_model_with_windows_wakes_as_it_was(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Layers of all groups share memory again, and no group has a prefix cached."""
    make_windowed(name, tmp_path)
    sizes = {"num_kv_blocks": 200, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    with LLM(tmp_path, **OPTIONS | sizes | options) as llm:
        runner, manager = llm.engine.executor, llm.engine.scheduler.block_manager
        assert [*manager.windows] == WINDOWS[name]
        expected, places = answers(llm), places_of(runner.kv_caches)
        assert (len({offset for _, offset in places}) < len(places)) == (name == "gemma3")
        for level in (1, 2):
            assert llm.generate(PROMPTS[1], PARAMS[0], use_tqdm=False)[0].num_cached_tokens > 0
            llm.sleep(level)
            llm.wake_up()
            assert manager.num_free_blocks == manager.num_blocks == 200
            assert llm.generate(PROMPTS[1], PARAMS[0], use_tqdm=False)[0].num_cached_tokens == 0
            assert answers(llm) == expected
            manager.check([])
            assert places_of(runner.kv_caches) == places


def places_of(kv_caches: list[KVCache]) -> list[tuple[int, int]]:
    """Each layer's group, and how many bytes behind the first layer's its K and V lie."""
    first = kv_caches[0].values.data_ptr()
    return [(cache.group, cache.values.data_ptr() - first) for cache in kv_caches]


def test_level_1_keeps_weights_and_level_2_nothing(checkpoint: Path) -> None:
    with LLM(checkpoint, **OPTIONS) as llm:
        runner = llm.engine.executor
        weight = weakref.ref(next(runner.model.parameters()))
        llm.sleep()
        assert runner.kv_caches is None and runner.model is not None
        llm.sleep(2)  # deeper
        gc.collect()
        assert runner.model is None and weight() is None
        llm.sleep(1)  # it is not read again for that
        assert runner.model is None
        llm.wake_up()
        llm.wake_up()  # it is awake
        assert len(answers(llm)) == len(PROMPTS)


def is_awake(runner: Any) -> tuple[bool, bool]:
    """Weights, KV cache."""
    return runner.model is not None, runner.kv_caches is not None


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_weights_and_kv_cache_are_woken_one_after_the_other(
    checkpoint: Path, level: int, first: str
) -> None:
    second = {"weights": "kv_cache", "kv_cache": "weights"}[first]
    with LLM(checkpoint, **OPTIONS) as llm:
        runner, expected = llm.engine.executor, answers(llm)
        for again in (False, True):
            llm.sleep(level)
            assert is_awake(runner) == (level == 1, False)
            llm.wake_up([])
            for _ in range(2):
                llm.wake_up([first])
                has_weights = level == 1 or first == "weights"
                assert is_awake(runner) == (has_weights, first == "kv_cache")
                told = rf"asleep: wake_up\(\) first; missing: {second}$"
                with pytest.raises(ValueError, match=told):
                    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            if again:  # from in between
                llm.sleep(level)
                assert is_awake(runner) == (level == 1, False)
                llm.wake_up([first])
            llm.wake_up([second])
            assert answers(llm) == expected


def test_weights_are_written_between_the_two(checkpoint: Path) -> None:
    """What reinforcement learning does, in float32, where each weight is a parameter."""
    with LLM(checkpoint, dtype="float32", attention_backend="torch", **OPTIONS) as llm:
        expected = answers(llm)
        llm.sleep(1)
        llm.wake_up(["weights"])
        norm = llm.engine.executor.model.model.norm.weight
        norm.data.mul_(-1)
        llm.wake_up(["kv_cache"])
        assert answers(llm) != expected
        norm.data.mul_(-1)
        llm.reset_prefix_cache()
        assert answers(llm) == expected


def test_who_sleeps_takes_no_requests_and_keeps_none(checkpoint: Path) -> None:
    with LLM(checkpoint, **OPTIONS) as llm:
        llm.sleep(1)
        for ask in (
            lambda: llm.generate(PROMPTS, use_tqdm=False),
            lambda: next(llm.stream(PROMPTS[0])),
            lambda: llm.engine.add_request("0", PROMPTS[0]),
        ):
            with pytest.raises(ValueError, match="asleep: wake_up"):
                ask()
            assert not llm.engine.has_unfinished_requests()
        assert llm.engine.step() == []
        assert "asleep" not in repr(llm) and "30 KV blocks" in repr(llm)
        llm.wake_up()
        assert len(answers(llm)) == len(PROMPTS)


def test_what_cannot_sleep_is_refused_and_goes_on(checkpoint: Path) -> None:
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = answers(llm)
        for level in (0, 3, True, "1", None):
            with pytest.raises(ValueError, match="level="):
                llm.sleep(level)
        for tags in (["scheduling"], ["weights", "other"], "weights", [["weights"]], 5, [None]):
            with pytest.raises(ValueError, match="tags="):
                llm.wake_up(tags)
        stream = llm.stream(PROMPTS[0], PARAMS[0])
        next(stream)
        with pytest.raises(ValueError, match="unfinished"):
            llm.sleep()
        stream.close()
        assert answers(llm) == expected
    with pytest.raises(ValueError, match="closed"):
        llm.sleep()


def test_a_guesser_with_weights_keeps_its_engine_awake() -> None:
    config = {"method": "draft_model", "model": "tiny-qwen3-draft"}
    with LLM("tiny-qwen3", num_kv_blocks=20, speculative_config=config) as llm:
        with pytest.raises(ValueError, match="'draft_model' is not supported by sleep"):
            llm.sleep()
        assert llm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False)


def test_it_sleeps_on_if_the_weights_are_gone(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        expected = answers(llm)
        llm.sleep(2)
        shutil.move(tmp_path / "model.safetensors", tmp_path / "elsewhere")
        for _ in range(2):
            with pytest.raises(ValueError, match=r"neither model\.safetensors"):
                llm.wake_up()
            with pytest.raises(ValueError, match="asleep"):
                llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        shutil.move(tmp_path / "elsewhere", tmp_path / "model.safetensors")
        llm.wake_up()
        assert answers(llm) == expected


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}], ids=str)
def test_it_wakes_with_other_weights_if_its_files_have_them(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Level 2 reads the files again; `apply_model` names `update_weights`."""
    make_qwen3(tmp_path, seed=2)
    with LLM(tmp_path, **OPTIONS, **options) as llm:
        expected = answers(llm)
    make_qwen3(tmp_path, seed=1)
    with LLM(tmp_path, **OPTIONS, **options) as llm:
        assert answers(llm) != expected
        with pytest.raises(AttributeError, match=r"llm\.update_weights\(state_dict\)"):
            llm.apply_model(print)
        llm.sleep(level=2)
        make_qwen3(tmp_path, seed=2)
        llm.wake_up()
        assert answers(llm) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_closing_needs_nobody_awake(checkpoint: Path, level: int) -> None:
    llm = LLM(checkpoint, **OPTIONS)
    llm.sleep(level)
    llm.close()
    llm.close()
    for ask in (lambda: llm.generate(PROMPTS, use_tqdm=False), llm.wake_up, llm.sleep):
        with pytest.raises(ValueError, match="closed"):
            ask()


@pytest.mark.size("full")
def test_ranks_sleep_as_a_whole(checkpoint: Path) -> None:
    with LLM(checkpoint, tensor_parallel_size=2, device="cpu", **OPTIONS) as llm:
        expected = answers(llm)
        with pytest.raises(ValueError, match="use level=2"):
            llm.sleep(1)
        llm.sleep(2)
        for tag in ("weights", "kv_cache"):
            with pytest.raises(ValueError, match="not supported with several ranks"):
                llm.wake_up([tag])
        llm.wake_up()
        assert answers(llm) == expected


@pytest.mark.small(options=[{"capture_sampling": True}])
@pytest.mark.parametrize("options", [{}, {"capture_sampling": True}], ids=str)
def test_graphs_are_recorded_again_for_what_lies_elsewhere(
    checkpoint: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kernels are interpreted here, and its sampling takes a second; it is tested elsewhere.
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, runner: None)
    cuda = FakeCuda()
    config = EngineConfig(str(checkpoint), num_kv_blocks=30, max_num_seqs=4, **options)
    config, model_config = config.for_device("cuda"), ModelConfig.from_checkpoint(checkpoint)
    context, device = LayerContext(), CudaDevice(config, cuda, is_capturable=True)
    runner = ModelRunner.load(config, model_config, checkpoint, context, device)
    engine = GuardedEngine(config, model_config, runner, None)

    def tokens() -> list[list[int]]:
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), prompt, PARAMS[0])
        done: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        return [done[str(number)] for number in range(len(PROMPTS))]

    expected = tokens()
    sleeper = Sleeper(engine)
    cuda.events.clear()
    sleeper.sleep(1)
    # Under the lock of recordings, which `Cuda.release_unused` takes, and waited for before.
    assert cuda.events == ["synchronize", "release", "release"]
    for parameter in runner.model.parameters():  # what was recorded must not be read again
        parameter.data = torch.empty_like(parameter).copy_(parameter)
    sleeper.wake_up()
    assert cuda.events.count("capture 4") > 0
    replays = sum(event.startswith("replay") for event in cuda.events)
    assert tokens() == expected
    assert sum(event.startswith("replay") for event in cuda.events) > replays
