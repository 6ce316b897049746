"""What a step copies between the host and a GPU, and who waits: see `gpu_tensors`."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_tensors import CUDA, GpuCuda, allow_cuda
from late_engine import make_engine
from seen_answers import Seen, are_same, seen
from tiny_checkpoints import make_qwen3

import nanoserve.sampling.fused_sampler
import nanoserve.sampling.logprobs
import nanoserve.sampling.processors
import nanoserve.sampling.rows
import nanoserve.sampling.sampler
from nanoserve import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.engine.guard import GuardedEngine
from nanoserve.sampling.host_copies import to_device, to_host
from nanoserve.text.tokenizer import Tokenizer

NUM_ROWS = 8
OPTIONS: dict[str, Any] = {"max_num_seqs": NUM_ROWS, "num_kv_blocks": 60, "max_model_len": 100}
OPTIONS |= {"max_num_batched_tokens": 30, "seed": 0}
PLAIN = SamplingParams(temperature=0.8, seed=1, max_tokens=10, ignore_eos=True)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
LETTERS = StructuredOutputsParams(regex="[a-z]{40}")
# What one row of eight asks for, and the copies of a decode step then: to the device, to the host.
# All of them have the batch to the device and the token ids to the host. A row that is changed adds
# which rows are and which are not, the slots and positions of both, and what its stage needs.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "plain": ({}, (1, 1)),
    "penalties": ({"repetition_penalty": 1.3, "presence_penalty": 0.2}, (5, 1)),
    "logit_bias": ({"logit_bias": {7: 3.0, 9: -1.0}}, (5, 1)),
    "min_tokens": ({"min_tokens": 9, "stop_token_ids": [3, 4]}, (5, 1)),
    "bad_words": ({"bad_words": ["a", "the"]}, (5, 1)),
    "allowed_token_ids": ({"allowed_token_ids": [*range(40, 90)]}, (6, 1)),
    "logprobs": ({"logprobs": 2}, (2, 4)),
    "penalty and logprobs": ({"repetition_penalty": 1.3, "logprobs": 2}, (6, 4)),
    "grammar": ({"structured_outputs": LETTERS}, (2, 1)),
    "grammar and top_k": (
        {"structured_outputs": LETTERS, "temperature": 1.0, "seed": 3, "top_k": 9},
        (5, 1),
    ),
}
HAS_GRAMMARS = find_spec("llguidance") is not None

MakeEngine = Callable[..., tuple[GuardedEngine, GpuCuda]]


def params_of(kind: str) -> SamplingParams:
    if kind.startswith("grammar") and not HAS_GRAMMARS:
        pytest.skip("pip install 'nanoserve[guided]'")
    return SamplingParams(**GREEDY | KINDS[kind][0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_qwen3(path, vocab_size=2048, num_hidden_layers=1)
    return path


@pytest.fixture
def make(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    allow_cuda(monkeypatch)
    engines = []

    def make(**options: Any) -> tuple[GuardedEngine, GpuCuda]:
        gpu = GpuCuda()
        made = make_engine(model, gpu, monkeypatch, **OPTIONS | options)
        tokenizer = Tokenizer(bundled_checkpoint("tiny-qwen3"))
        engines.append(GuardedEngine(made.config, made.model_config, made.executor, tokenizer))
        return engines[-1], gpu

    yield make
    for engine in engines:
        engine.close()


def counted_step(engine: GuardedEngine, gpu: GpuCuda) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the copies of a step, to the device and to the host, and its waits by reason."""
    gpu.copies.clear(), gpu.waits.clear()
    engine.step()
    return (gpu.copies["to the device"], gpu.copies["to the host"]), dict(gpu.waits)


@pytest.mark.small(graphs=[{}])
@pytest.mark.parametrize("graphs", [{}, {"enforce_eager": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_row_has_the_others_wait(make: MakeEngine, kind: str, graphs: dict[str, bool]) -> None:
    """One step ahead, all that is waited for is the event behind the tokens of the step before."""
    params = params_of(kind)
    engine, gpu = make(async_scheduling=True, **graphs)
    for i in range(NUM_ROWS):
        engine.add_request(str(i), [i + 1] * 3, params if i == 5 else PLAIN)
    for _ in range(3):  # the prompts, and a step that copies the settings of new rows
        engine.step()
    for _ in range(4):
        assert counted_step(engine, gpu) == (KINDS[kind][1], {"an event": 1})


def test_no_prompt_has_the_others_wait(make: MakeEngine) -> None:
    """A prompt's log-probabilities are copied in one piece, before the event of their step."""
    engine, gpu = make(async_scheduling=True)
    for i in range(NUM_ROWS - 1):
        engine.add_request(str(i), [i + 1] * 3, PLAIN)
    for _ in range(3):
        engine.step()
    prompt = [j % 300 for j in range(60)]  # in three chunks, of 23 tokens at most
    engine.add_request("prompt", prompt, SamplingParams(**GREEDY, prompt_logprobs=2))
    counts = [counted_step(engine, gpu) for _ in range(5)]
    # The last chunk brings the settings of its slot, whose row is sampled.
    assert counts[:3] == [((2, 4), {"an event": 1}), *[((1, 4), {"an event": 1})] * 2]
    assert counts[3:] == [((1, 1), {"an event": 1})] * 2


def asked() -> list[tuple[list[int], SamplingParams]]:
    """Requests of all kinds, more than there are rows, with prompts of many lengths."""
    kinds = [kind for kind in KINDS if HAS_GRAMMARS or not kind.startswith("grammar")]
    params = [params_of(kind) for kind in kinds]
    params += [SamplingParams(**GREEDY, prompt_logprobs=1), PLAIN]
    return [([(7 * j + i) % 300 for j in range(3 + 11 * i % 40)], p) for i, p in enumerate(params)]


def answers(engine: GuardedEngine) -> list[Seen]:
    for i, (prompt, params) in enumerate(asked()):
        engine.add_request(str(i), prompt, params)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [seen(done[str(i)]) for i in range(len(done))]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Seen]:
    with LLM(model, tokenizer="tiny-qwen3", device="cpu", **OPTIONS) as llm:
        return answers(llm.engine)


@pytest.mark.small(ahead=[True])
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])
def test_however_late_copies_run_tokens_and_logprobs_are_those_of_a_cpu(
    make: MakeEngine, expected: list[Seen], ahead: bool
) -> None:
    engine, gpu = make(async_scheduling=ahead)
    assert are_same(answers(engine), expected)
    assert set(gpu.waits) == {"an event"} and gpu.copies["to the device"] > 40


def overwrites_what_is_not_copied_yet(engine: GuardedEngine, patch: pytest.MonkeyPatch) -> None:
    """Copy from one pinned buffer for all, which the next copy overwrites."""
    with engine.executor.device.guard():
        pinned = torch.empty(2**16, dtype=torch.uint8, pin_memory=True)

    def careless(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
        made = []
        for array in arrays:
            part = pinned[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            part.copy_(torch.from_numpy(array))
            made.append(part.to(device, non_blocking=True))
        return made

    for module in (
        nanoserve.sampling.fused_sampler,
        nanoserve.sampling.processors,
        nanoserve.sampling.rows,
        nanoserve.sampling.sampler,
    ):
        patch.setattr(module, "to_device", careless)


def copies_logprobs_behind_the_event(engine: GuardedEngine, patch: pytest.MonkeyPatch) -> None:
    behind = []
    device = engine.executor.device
    fetch = device.fetch

    def later(tensor: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        behind.append((pinned, tensor))
        return pinned

    def fetch_first(token_ids: torch.Tensor) -> Any:
        fetched = fetch(token_ids)
        while behind:
            pinned, tensor = behind.pop()
            pinned.copy_(tensor, non_blocking=True)
        return fetched

    patch.setattr(nanoserve.sampling.logprobs, "to_host", later)
    device.fetch = fetch_first


@pytest.mark.parametrize(
    "plant", [overwrites_what_is_not_copied_yet, copies_logprobs_behind_the_event]
)
def test_a_planted_fault_comes_out_as_something_else(
    make: MakeEngine,
    expected: list[Seen],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[GuardedEngine, pytest.MonkeyPatch], None],
) -> None:
    engine, gpu = make(async_scheduling=True)
    plant(engine, monkeypatch)
    try:
        has_failed = not are_same(answers(engine), expected)
    except (AssertionError, LookupError, OverflowError, RuntimeError, ValueError):
        has_failed = True
    assert has_failed
    gpu.queue.clear()  # what is left of it may fail, too
    assert set(gpu.waits) == {"an event"}  # it was the fault, and not that somebody waited


def waits_by_itself(x: torch.Tensor) -> None:
    x[to_device(x.device, np.array([1]))[0]] = -1.0


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (waits_by_itself, "a number beside an index is copied from the host"),
        (lambda x: x[np.array([0])], "an index is copied from the host"),
        (lambda x: torch.ones(2).to(x.device), "a copy to the device that is not"),
        (lambda x: x.cpu(), "a copy to the host that is not non_blocking"),
        (lambda x: x.copy_(torch.ones(3), non_blocking=True), "memory that is not pinned"),
        (lambda x: float(x[0]), "the host reads a tensor"),
        (lambda x: x.tolist(), "the host reads a tensor"),
    ],
)
def test_the_stand_in_sees_who_waits(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[torch.Tensor], Any], reason: str
) -> None:
    allow_cuda(monkeypatch)
    gpu = GpuCuda()
    with gpu.guard():
        x = torch.zeros(3, device=CUDA)
        gpu.is_late = True
        x += 1
        use(x)
        (waited,) = gpu.waits
        assert reason in waited and gpu.num_run > 0


def test_arrays_travel_together_and_may_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_cuda(monkeypatch)
    gpu = GpuCuda()
    arrays = [
        np.arange(7, dtype=np.int64),
        np.zeros(0, dtype=np.float32),
        np.array([[True, False, True]]),
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1],  # its values lie apart
        np.array([-5], dtype=np.int32),
    ]
    expected = [array.copy() for array in arrays]
    with gpu.guard():
        gpu.is_late = True
        tensors = to_device(CUDA, *arrays)
        for array in arrays:
            array[...] = 0
        on_host = [to_host(tensor) for tensor in tensors]
        assert gpu.copies == {"to the device": 1, "to the host": len(arrays)} and not gpu.waits
        gpu.synchronize()
    for tensor, array in zip(on_host, expected, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
