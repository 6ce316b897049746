"""Tokens that the host has not seen yet, on either kind of device."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from packed_batches import make_plan, make_sequence
from toy_computation import toy_computation

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import PENDING, Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.sequence import Sequence
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cpu_device import CpuDevice, Device
from nanoserve.worker.cuda_device import CudaDevice

LAYOUT = BatchLayout(max_num_tokens=64, max_num_rows=4, max_blocks_per_row=8)
TABLES = np.arange(1, 33, dtype=np.int32).reshape(1, 4, 8)
LAST_TOKEN = torch.tensor([70, 71, 72, 73], dtype=torch.int32)  # by slot


def forward(tensors: BatchTensors, header: BatchHeader, tables: torch.Tensor) -> torch.Tensor:
    """In the place of hidden states: the tokens that the model is given."""
    return tensors.input_ids[: header.num_tokens].clone()


def on_host() -> CpuDevice:
    return CpuDevice()


def on_gpu(enforce_eager: bool) -> CudaDevice:
    config = EngineConfig("m", max_num_seqs=4, block_size=4, enforce_eager=enforce_eager)
    device = CudaDevice(config, FakeCuda(), is_capturable=True)
    device.prepare(LAYOUT, toy_computation(forward, LAST_TOKEN))
    device.programs = device._capture(device._computation, device.graph_sizes)
    return device


def test_both_devices_have_what_the_protocol_says() -> None:
    """By the same names and arguments; and neither is the other with changes."""
    names = [name for name in vars(Device) if not name.startswith("_")]
    for kind in (CpuDevice, CudaDevice):
        assert kind.__bases__ == (object,)
        for name in names:
            expected, own = (inspect.signature(getattr(one, name)) for one in (Device, kind))
            assert [*expected.parameters] == [*own.parameters], (kind, name)


DEVICES = pytest.mark.parametrize(
    "make_device",
    [on_host, lambda: on_gpu(enforce_eager=True), lambda: on_gpu(enforce_eager=False)],
    ids=["host", "eager", "graphs"],
)


def known(length: int, slot: int) -> Sequence:
    """Its last token is there, and not computed."""
    return make_sequence(length, length - 1, slot)


def pending(length: int, slot: int) -> Sequence:
    """All that is there is computed, and the step under way will yield one more."""
    seq = make_sequence(length, length, slot)
    seq.num_pending = 1
    return seq


def pack(device: Device, num_new_tokens: dict[Sequence, int]) -> Batch:
    batch = Batch(LAYOUT, device.host_memory(LAYOUT.num_bytes))
    batch.memory[:] = 0xAA  # negative integers, and none of them pending
    batch.pack(make_plan(num_new_tokens), TABLES, block_size=4)
    return batch


@DEVICES
@pytest.mark.parametrize(
    ("num_new_tokens", "num_pending", "seen"),
    [
        ({pending(5, slot=2): 1}, 1, [72]),
        ({pending(9, slot=3): 1, pending(1, slot=0): 1}, 2, [73, 70]),
        ({known(9, slot=3): 1, pending(7, slot=1): 1, known(3, slot=0): 1}, 1, [8, 71, 2]),
        ({known(9, slot=1): 1, known(7, slot=2): 1}, 0, [8, 6]),
        # Beside chunks of prompts, one of which ends in a single token.
        (
            {pending(4, slot=1): 1, known(6, slot=3): 1, make_sequence(7, 3, slot=0): 4},
            1,
            [71, 5, 3, 4, 5, 6],
        ),
    ],
    ids=["one", "all", "some", "none", "beside chunks"],
)
def test_pending_tokens_are_filled_in_where_they_are_known(
    make_device: Callable[[], Device],
    num_new_tokens: dict[Sequence, int],
    num_pending: int,
    seen: list[int],
) -> None:
    """By the row's slot, whatever its place in the batch, and nothing else is touched."""
    device = make_device()
    batch = pack(device, num_new_tokens)
    assert batch.header.num_pending == num_pending
    last_token = LAST_TOKEN.clone()
    tensors, hidden, _ = device.run(batch, batch.header, last_token, forward)
    assert hidden[: len(seen)].tolist() == seen
    assert tensors.input_ids[: len(seen)].tolist() == seen
    assert (hidden[len(seen) :] == 0).all()  # dummy rows of a graph
    assert torch.equal(last_token, LAST_TOKEN)


def test_on_a_gpu_the_host_never_learns_them_that_way() -> None:
    """What was packed may still be on its way when the next step is packed."""
    device = on_gpu(enforce_eager=False)
    batch = pack(device, {pending(5, slot=2): 1, known(3, slot=0): 1})
    before = batch.memory[: batch.num_bytes_used(batch.header)].copy()
    device.run(batch, batch.header, LAST_TOKEN, forward)
    assert batch.input_ids[:2].tolist() == [PENDING, 2]
    assert (batch.memory[: len(before)] == before).all()


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_cpu_one_step_ahead_answers_as_one_that_waits(checkpoint: Path, backend: str) -> None:
    """Everything that is read later than it was: tokens, penalties, prompts' log-probabilities."""
    common = {"max_tokens": 9, "ignore_eos": True}
    kinds = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=5, top_k=30, **common),
        SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, **common),
        SamplingParams(temperature=0.7, seed=1, n=2, prompt_logprobs=1, logprobs=2, **common),
        SamplingParams(temperature=0, stop_token_ids=[*range(0, 300, 7)], max_tokens=30),
    ]
    prompts = [[(7 * j + i % 3) % 300 for j in range(1 + 11 * i % 40)] for i in range(20)]
    params = [kinds[i % len(kinds)] for i in range(len(prompts))]
    options = {"num_kv_blocks": 8, "max_model_len": 100, "max_num_batched_tokens": 30}
    answers, logprobs, pending_of = [], [], []
    for async_scheduling in (False, True):
        with LLM(
            checkpoint,
            skip_tokenizer_init=True,
            device="cpu",
            attention_backend=backend,
            max_num_seqs=6,
            async_scheduling=async_scheduling,
            **options,
        ) as llm:
            counts: list[int] = []

            def count(plan: Any, batch: Batch, *rest: Any, counts: list[int] = counts) -> None:
                counts.append(batch.header.num_pending)

            llm.engine.observers.append(count)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm.stats.num_preemptions > 0
        answers.append([[c.token_ids for c in o.outputs] for o in outputs])
        logprobs.append([])
        for output in outputs:
            if output.prompt_logprobs is not None:
                told = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
                logprobs[-1] += [entry[token].logprob for token, entry in told]
                logprobs[-1] += [c.cumulative_logprob for c in output.outputs]
        pending_of.append(sum(counts))
    assert answers[0] == answers[1]
    assert len(logprobs[0]) > 100 and logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert pending_of[0] == 0 < pending_of[1]
