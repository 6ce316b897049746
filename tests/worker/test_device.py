"""Which device, which defaults and which attention backend are chosen, and what is refused."""

import logging
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve import LLM
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.worker.backend_checks import check_kernels
from nanoserve.worker.build_executor import choose_attention_backend, choose_device, device_kind

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CPU_DEFAULT = "numba" if find_spec("numba") else "torch"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    be_a_gpu(monkeypatch, "NVIDIA A100", (8, 0))


def be_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_auto_takes_the_gpu_that_is_there() -> None:
    assert device_kind("auto") == device_kind("cpu") == "cpu"
    assert choose_device(EngineConfig("m", device="cpu")) == CPU
    with pytest.raises(ValueError, match=r"device='cuda', but torch .* finds no NVIDIA GPU"):
        device_kind("cuda")


@pytest.mark.usefixtures("gpu")
def test_it_is_the_callers_current_one() -> None:
    assert device_kind("auto") == device_kind("cuda") == "cuda"
    assert choose_device(EngineConfig("m", device="cuda")) == torch.device("cuda", 1)
    assert device_kind("cpu") == "cpu"


# ---------------------------------------------------------------- defaults of a device


@pytest.mark.parametrize(
    ("kind", "options", "budget", "is_ahead"),
    [
        ("cpu", {}, 2048, False),
        ("cuda", {}, 8192, True),
        # What is given stays, also where it is the default of the other one.
        ("cpu", {"max_num_batched_tokens": 8192, "async_scheduling": True}, 8192, True),
        ("cuda", {"max_num_batched_tokens": 2048, "async_scheduling": False}, 2048, False),
        ("cuda", {"max_num_batched_tokens": 300}, 300, True),
        # None is "not given", here as everywhere.
        ("cuda", {"max_num_batched_tokens": None, "async_scheduling": None}, 8192, True),
        # Decoding all of them takes a token each.
        ("cpu", {"max_num_seqs": 2049}, 2049, False),
        ("cuda", {"max_num_seqs": 2049}, 8192, True),
        ("cuda", {"max_num_seqs": 10_000}, 10_000, True),
        # A trace shows one step at a time.
        ("cuda", {"trace": "run.jsonl"}, 8192, False),
        ("cuda", {"trace": "run.jsonl", "async_scheduling": False}, 8192, False),
    ],
    ids=str,
)
def test_what_is_not_given_is_best_for_the_device(
    kind: str, options: dict[str, Any], budget: int, is_ahead: bool
) -> None:
    chosen = EngineConfig("m", **options)
    config = chosen.for_device(kind)
    assert (config.max_num_batched_tokens, config.async_scheduling) == (budget, is_ahead)
    assert config.device == kind and config.for_device(kind) == config
    # Nothing else is touched, and what the user chose least of all.
    resolved = {"device", "max_num_batched_tokens", "async_scheduling"}
    resolved.add("disable_hybrid_kv_cache_manager")
    assert {
        f.name for f in fields(config) if getattr(config, f.name) != getattr(chosen, f.name)
    } <= (resolved)
    assert chosen == EngineConfig("m", **options)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("chosen", [None, False, True])
def test_groups_have_not_run_on_a_gpu(kind: str, chosen: bool | None) -> None:
    """So there all layers keep the K and V of all tokens, unless they are asked not to."""
    config = EngineConfig("m", disable_hybrid_kv_cache_manager=chosen).for_device(kind)
    expected = kind == "cuda" if chosen is None else chosen
    assert config.disable_hybrid_kv_cache_manager is expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0 must be an integer >= 1"),
        ({"max_num_batched_tokens": "8192"}, "'8192' must be an integer"),
        ({"max_num_batched_tokens": False}, "False must be an integer"),
        ({"max_num_batched_tokens": 255}, "255 is less than max_num_seqs=256"),
        ({"async_scheduling": 0}, "async_scheduling=0 must be True or False"),
        ({"async_scheduling": "auto"}, "async_scheduling='auto' must be True or False"),
        ({"async_scheduling": True, "trace": "run.jsonl"}, "needs async_scheduling=False"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be an integer"),
        ({"enforce_eager": 1}, "enforce_eager=1 must be True or False"),
    ],
    ids=str,
)
def test_what_is_given_must_be_good_before_a_device_is_asked(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("too early"))
    for make in (EngineConfig, LLM):
        with pytest.raises(ValueError, match=message):
            make("tiny-qwen3", **options)


class Handed(Exception):
    """Ends the start of an engine where the executor would be made."""


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_an_executor_is_handed_what_is_in_force(
    has_gpu: bool, asked: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_executor(config: EngineConfig, **_: Any) -> None:
        raise Handed(config.device, config.max_num_batched_tokens, config.async_scheduling)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("nanoserve.build.make_executor", make_executor)
    is_gpu = has_gpu and asked == "auto"
    with pytest.raises(Handed) as handed:
        LLM(checkpoint, device=asked, skip_tokenizer_init=True)
    assert handed.value.args == (("cuda", 8192, True) if is_gpu else ("cpu", 2048, False))


def test_the_engine_shows_what_is_in_force(checkpoint: Path) -> None:
    with LLM(checkpoint, skip_tokenizer_init=True, max_num_seqs=3000) as llm:
        config = llm.engine.config
        assert (config.device, config.async_scheduling) == ("cpu", False)
        assert config.max_num_batched_tokens == llm.engine.executor.layout.max_num_tokens == 3000
        assert llm.engine.executor.config is config


def test_other_ranks_get_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told what was chosen, and choose nothing."""
    jobs: list[dict[str, Any]] = []

    def workers(size: int, job: dict[str, Any], *_: Any) -> None:
        jobs.append(job)
        raise Handed

    monkeypatch.setattr("nanoserve.features.parallel.tensor_parallel.Workers", workers)
    with pytest.raises(Handed):
        LLM(checkpoint, skip_tokenizer_init=True, tensor_parallel_size=2)
    (options,) = (job["options"] for job in jobs)
    assert EngineConfig(**options) == EngineConfig(
        str(checkpoint), skip_tokenizer_init=True, tensor_parallel_size=2
    ).for_device("cpu")


# ---------------------------------------------------------------- attention


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("asked", "device", "chosen"),
    [
        ("auto", CPU, CPU_DEFAULT),
        ("torch", CPU, "torch"),
        ("auto", CUDA, "triton"),
        ("torch", CUDA, "torch"),
        ("triton", CUDA, "triton"),
        ("triton", CPU, "triton"),  # these tests run with TRITON_INTERPRET=1
    ],
)
def test_each_device_has_its_default(
    checkpoint: Path, asked: str, device: torch.device, chosen: str
) -> None:
    config = EngineConfig("m", attention_backend=asked)
    model_config = ModelConfig.from_checkpoint(checkpoint)
    assert choose_attention_backend(config, model_config, device) == chosen


@pytest.mark.parametrize(
    ("option", "launches"),
    [
        ("merge_in_attention", {"triton", "flash_attn3"}),
        ("dependent_launch", {"triton", "flash_attn", "flash_attn3"}),
        ("split_products", {"triton", "flash_attn", "flash_attn3"}),
        ("fused_quantization", {"triton", "flash_attn", "flash_attn3"}),
        ("adapter_kernels", {"triton", "flash_attn", "flash_attn3"}),
    ],
)
def test_variants_of_kernels_that_a_backend_does_not_launch_are_refused(
    option: str, launches: set[str]
) -> None:
    kernels = KernelConfig(**{option: True})
    for name in ("torch", "triton", "flash_attn", "flash_attn3"):
        check_kernels(kernels, name, CPU, "fp8")
        check_kernels(KernelConfig(), name, CUDA)
        if name in launches:
            check_kernels(kernels, name, CUDA, "fp8")
        else:
            with pytest.raises(ValueError, match=f"{option}=True .*{name}.*: remove one of them"):
                check_kernels(kernels, name, CUDA, "fp8")


@pytest.mark.parametrize(
    ("quantization", "activations", "is_quantized"),
    [
        (None, None, False),
        ("int8", None, False),
        ("int4", None, False),
        ("fp8", "none", False),
        ("fp8", None, True),
        ("int8", "int8", True),
        ("compressed-tensors", None, True),
    ],
)
def test_codes_are_fused_only_where_activations_become_codes(
    quantization: str | None, activations: str | None, is_quantized: bool
) -> None:
    kernels, given = KernelConfig(fused_quantization=True), (quantization, activations)
    check_kernels(kernels, "triton", CPU, *given)
    if is_quantized:
        check_kernels(kernels, "triton", CUDA, *given)
        return
    with pytest.raises(ValueError, match="activations are not quantized with quantization="):
        check_kernels(kernels, "triton", CUDA, *given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"merge": True}, r"unknown option\(s\) \['merge'\] in kernel_config"),
        ({"dependent_launch": 1}, "dependent_launch=1 must be"),
        ("all", "kernel_config"),
    ],
)
def test_kernel_config_has_names_and_truth_values(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EngineConfig("m", kernel_config=given)
    assert EngineConfig("m", kernel_config={}).kernel_config == KernelConfig()


@pytest.mark.parametrize("asked", ["auto", "triton", "flash_attn"])
def test_a_gpu_before_ampere_is_refused_by_name(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    be_a_gpu(monkeypatch, "Tesla T4", (7, 5))
    config = EngineConfig("m", attention_backend=asked)
    model_config = ModelConfig.from_checkpoint(checkpoint)
    name = "triton" if asked == "auto" else asked
    message = f"'{name}' needs .* 8.0 .* Tesla T4 has 7.5.* attention_backend='torch'"
    with pytest.raises(ValueError, match=message):
        choose_attention_backend(config, model_config, CUDA)


def test_one_before_ampere_runs_the_torch_backend(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_a_gpu(monkeypatch, "Tesla T4", (7, 5))
    config = EngineConfig("m", attention_backend="torch")
    model_config = ModelConfig.from_checkpoint(checkpoint)
    assert choose_attention_backend(config, model_config, CUDA) == "torch"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "triton"}, "set before Python starts"),
        ({"attention_backend": "flashinfer"}, "flash_attn"),
        ({"device": "tpu"}, "'tpu' is not one of"),
        ({"device": "cuda"}, "no NVIDIA GPU"),
    ],
)
def test_what_cannot_run_here_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=message):
        LLM(checkpoint, skip_tokenizer_init=True, **options)


def test_the_choice_is_logged(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nanoserve"):
        LLM(checkpoint, skip_tokenizer_init=True).close()
    assert f"device cpu, attention backend {CPU_DEFAULT}" in caplog.text
