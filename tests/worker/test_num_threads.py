"""Threads of a CPU: only an engine's own work has them, and none waits by spinning."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.worker.threads import SMALL_MODEL_BYTES, choose_num_threads, threads

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def callers_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Another number than any engine of these tests uses."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    yield 3
    torch.set_num_threads(before)


def test_a_small_model_has_one_and_what_is_asked_for_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_num_threads(None, SMALL_MODEL_BYTES - 1) == 1
    assert choose_num_threads(None, SMALL_MODEL_BYTES) == torch.get_num_threads() == 3
    assert choose_num_threads(2, 1) == choose_num_threads(2, 2**40) == 2
    assert choose_num_threads(64, 1) == 4  # the cores that there are
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert choose_num_threads(64, 1) == 64


def test_afterwards_torch_has_its_own_number_again() -> None:
    with threads(2):
        assert torch.get_num_threads() == 2
        with threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), threads(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


def test_numba_has_the_same_number() -> None:
    numba = pytest.importorskip("numba")
    most = numba.config.NUMBA_NUM_THREADS
    for num_threads in (1, 2):
        with threads(num_threads):
            assert numba.get_num_threads() == min(num_threads, most)
            assert torch.get_num_threads() == num_threads


class Seen:
    """Numbers of threads in the forwards of an engine."""

    def __init__(self, llm: LLM, error: Exception | None = None) -> None:
        self.numbers: set[int] = set()
        self.error = error
        llm.engine.executor.model.register_forward_hook(self._look)

    def _look(self, *args: Any) -> None:
        self.numbers.add(torch.get_num_threads())
        if self.error is not None:
            raise self.error


@pytest.mark.small(dtype=["float32"], backend=["auto"])
@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_engines_have_their_own(
    checkpoint: Path, backend: str, dtype: str, callers_threads: int
) -> None:
    options = {"device": "cpu", "skip_tokenizer_init": True, "attention_backend": backend}
    options["dtype"] = dtype
    with LLM(checkpoint, **options) as small, LLM(checkpoint, num_threads=2, **options) as asked:
        assert torch.get_num_threads() == callers_threads
        seen = Seen(small), Seen(asked)
        for _ in range(2):
            for llm in (small, asked):
                llm.generate([[1, 2, 3], [4]], GREEDY, use_tqdm=False)
                assert torch.get_num_threads() == callers_threads
            streams = [llm.stream([5, 6], GREEDY) for llm in (small, asked)]
            for _ in zip(*streams, strict=True):
                assert torch.get_num_threads() == callers_threads
        assert [each.numbers for each in seen] == [{1}, {2}]
    assert torch.get_num_threads() == callers_threads


def test_an_error_in_a_step_gives_them_back(checkpoint: Path, callers_threads: int) -> None:
    with LLM(checkpoint, device="cpu", skip_tokenizer_init=True) as llm:
        seen = Seen(llm, RuntimeError("the step is broken"))
        with pytest.raises(RuntimeError, match="the step is broken"):
            llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert torch.get_num_threads() == callers_threads and seen.numbers == {1}
        seen.error = None
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert torch.get_num_threads() == callers_threads


def test_so_does_one_while_loading(tmp_path: Path, callers_threads: int) -> None:
    make_qwen3(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    for options in ({}, {"quantization": "int8"}):
        with pytest.raises(Exception, match=r"(?i)incomplete|invalid|safetensors|size|header"):
            LLM(tmp_path, device="cpu", skip_tokenizer_init=True, **options)
        assert torch.get_num_threads() == callers_threads


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_a_number_of_threads_is_a_positive_integer(checkpoint: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        LLM(checkpoint, device="cpu", skip_tokenizer_init=True, num_threads=value)


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "5000"), ({"OMP_WAIT_POLICY": "active"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise(
    chosen: dict[str, str], spins: str
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        environment.pop(name, None)
    script = (
        "import nanoserve.config, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), *sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | chosen,
        capture_output=True,
        text=True,
        check=True,
    )
    found, *modules = shown.stdout.split()
    assert found == spins and "torch" not in modules  # which reads it once
