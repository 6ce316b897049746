"""Which device and which attention backend are chosen, and what is refused."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve import LLM
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.worker.device import choose_attention_backend, choose_device

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
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(ValueError, match=r"device='cuda', but torch .* sees no NVIDIA GPU"):
        choose_device("cuda")


@pytest.mark.usefixtures("gpu")
def test_it_is_the_callers_current_one() -> None:
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 1)
    assert choose_device("cpu") == CPU


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


@pytest.mark.parametrize("asked", ["triton", "flash_attn"])
def test_a_gpu_before_ampere_is_refused_by_name(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    be_a_gpu(monkeypatch, "Tesla T4", (7, 5))
    config = EngineConfig("m", attention_backend=asked)
    model_config = ModelConfig.from_checkpoint(checkpoint)
    message = f"'{asked}' needs .* 8.0 .* Tesla T4 has 7.5.* attention_backend='torch'"
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
