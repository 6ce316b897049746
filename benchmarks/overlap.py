"""Measure whether async scheduling hides the scheduler side behind the device.

    python benchmarks/overlap.py

A step should take the longer of the two times, not their sum. The device is a thread that sleeps
for a given time in each step, so that it does not compete for a processor. Every sequence decodes
one token in each step. For a device time T, a row shows the median step without and with async
scheduling, and the latter over the ideal: the longer of T and the scheduler side, which is the time
of a step whose device takes no time.
"""

import queue
import statistics
import threading
import time

import numpy as np

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.executor import ForwardInputs, SampleInputs, StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams

_STEPS = 120
_PROMPT = 100
_MAX_MODEL_LEN = 1024


class SleepingExecutor:
    """Device whose steps run in a thread, one after the other, for `seconds` each."""

    def __init__(self, config: EngineConfig, seconds: float) -> None:
        blocks = -(-_MAX_MODEL_LEN // config.block_size)
        self.max_model_len, self.num_kv_blocks = _MAX_MODEL_LEN, config.max_num_seqs * blocks
        layout = BatchLayout(config.max_num_batched_tokens, config.max_num_seqs, blocks)
        self._batches = [Batch(layout, np.zeros(layout.num_bytes, np.uint8)) for _ in "ab"]
        self._num_batches = 0
        self._seconds = seconds
        self._launched: queue.SimpleQueue[tuple[float, threading.Event] | None]
        self._launched = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def next_batch(self) -> Batch:
        self._num_batches += 1
        return self._batches[self._num_batches % 2]

    def forward(self, batch: Batch, inputs: ForwardInputs) -> tuple[int, threading.Event]:
        done = threading.Event()
        self._launched.put((time.perf_counter(), done))
        return batch.header.num_sampled, done

    def sample(self, handle: tuple[int, threading.Event], inputs: SampleInputs) -> None:
        pass

    def collect(self, handle: tuple[int, threading.Event]) -> StepResult:
        num_sampled, done = handle
        done.wait()
        return StepResult([[7] for _ in range(num_sampled)])

    def cancel(self, handles: list[tuple[int, threading.Event]]) -> None:
        pass

    def close(self) -> None:
        self._launched.put(None)

    def _run(self) -> None:
        end = 0.0
        while (launch := self._launched.get()) is not None:
            launched, done = launch
            # A real device neither oversleeps nor waits for Python's lock: if this thread wakes too
            # late, the next step is shorter.
            end = max(end, launched) + self._seconds
            while (left := end - time.perf_counter()) > 0:
                time.sleep(left if left < 2e-4 else left - 1e-4)
            done.set()


def median_step(num_seqs: int, seconds: float, ahead: bool) -> float:
    """Return the seconds of a step in which every sequence decodes."""
    config = EngineConfig(
        "none",
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * _PROMPT,
        async_scheduling=ahead,
    ).for_device("cpu")
    engine = GuardedEngine(config, _model_config(), SleepingExecutor(config, seconds), None)
    params = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.FINAL_ONLY)
    for i in range(num_seqs):
        engine.add_request(str(i), [i % 50 + 1] * _PROMPT, params)
    for _ in range(10):
        engine.step()
    times = []
    outputs: list[RequestOutput] = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        outputs += engine.step()
        times.append(time.perf_counter() - start)
    engine.close()
    return statistics.median(times)


def _model_config() -> ModelConfig:
    return ModelConfig(
        architecture="none",
        vocab_size=100,
        hidden_size=1,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        max_position_embeddings=_MAX_MODEL_LEN,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        attention_scale=1.0,
        sliding_windows=(None,),
        dtype="float32",
        eos_token_ids=frozenset(),
    )


def main() -> None:
    print("| sequences | scheduler us | device us | in turn | async scheduling | over the longer |")
    print("|---|---|---|---|---|---|")
    for num_seqs in (16, 64, 256):
        scheduler = median_step(num_seqs, 0.0, ahead=False)
        for factor in (0.5, 1.0, 2.0, 4.0):
            device = max(factor * scheduler, 1e-4)
            serial, ahead = (median_step(num_seqs, device, value) for value in (False, True))
            cells = (scheduler, device, serial, ahead)
            numbers = " | ".join(f"{value * 1e6:.0f}" for value in cells)
            print(f"| {num_seqs} | {numbers} | {ahead / max(device, scheduler):.2f} |")


if __name__ == "__main__":
    main()
