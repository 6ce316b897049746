"""GPUs by name, and the time of a step by the roofline: an estimate that nothing has calibrated.

A step reads weights and KV, and computes: it takes at least the longer of both. Kernels do not
reach the numbers of a data sheet, and launching takes time, so a real engine is slower; a fit to
measured steps (`nanoserve.cli.simulate.fit`) knows by how much. The bytes and operations are those
of `nanoserve.cli.bench.roofline`.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.roofline import Need, Step
from nanoserve.cli.simulate.step_time import Number, StepSize
from nanoserve.config import EngineConfig
from nanoserve.utils.checks import check_int, check_number, require


class GPU(NamedTuple):
    """The numbers of a data sheet: bytes, bytes/s, operations/s in 16 bits without sparsity.

    link: bytes per second that a GPU sends to others of its node, in one direction.
    """

    memory: float
    bandwidth: float
    rate: float
    link: float


GPUS = {
    "l4": GPU(24e9, 300e9, 121e12, 32e9),
    "l40s": GPU(48e9, 864e9, 362e12, 32e9),
    "rtx-4090": GPU(24e9, 1008e9, 165e12, 32e9),
    "a100-40gb": GPU(40e9, 1555e9, 312e12, 300e9),
    "a100-80gb": GPU(80e9, 2039e9, 312e12, 300e9),
    "h100": GPU(80e9, 3350e9, 989e12, 450e9),
    "h200": GPU(141e9, 4800e9, 989e12, 450e9),
    "b200": GPU(180e9, 8000e9, 2250e12, 900e9),
}
# Seconds of a collective that do not depend on its size: about what NCCL takes for a small
# all-reduce within a node. Of each layer there are two.
_COLLECTIVE = 10e-6


def gpu_named(name: str) -> GPU:
    """Return a GPU of `GPUS`. Raises `ValueError`, with all names, for another one."""
    require(name.lower() in GPUS, f"gpu={name!r} must be one of {', '.join(GPUS)}")
    return GPUS[name.lower()]


class RooflineTime:
    """The least time of a step on `num_gpus` GPUs that share each layer.

    efficiency: the part of bandwidth and rate that is reached. fixed: seconds of each step for
    launching and sampling.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        gpu: GPU,
        num_gpus: int = 1,
        efficiency: float = 1.0,
        fixed: float = 0.0,
    ) -> None:
        self.num_gpus = check_int("num_gpus", num_gpus, 1)
        self.efficiency = check_number("efficiency", efficiency, 0, 1, excludes_low=True)
        self.fixed = check_number("fixed", fixed, 0)
        self.description = "roofline of the data sheet, not calibrated"
        self._model, self._gpu, self._need = model_config, gpu, Need(model_config)
        self._bandwidth = gpu.bandwidth * efficiency * num_gpus
        self._rate = gpu.rate * efficiency * num_gpus
        # What a token of context adds: bytes to read, and operations for each query that sees it.
        near, far = _step(1, 1, 0), _step(1, 2, 0)
        need, full = self._need, _without_windows(self._need)
        self._context_bytes = full.bytes(far) - full.bytes(near)
        self._pair_operations = full.operations(far) - full.operations(near)
        self._row_bytes = 2 * 4 * need.num_states
        self._row_operations = need.operations(_step(1, 1, 1)) - need.operations(near)
        self._of_tokens: dict[tuple[int, int], tuple[float, float]] = {}

    def seconds(self, size: StepSize) -> Number:
        num_bytes, operations = self._tokens(int(size.num_tokens), int(size.num_sampled > 0))
        num_bytes = num_bytes + self._context_bytes * size.context
        num_bytes = num_bytes + self._row_bytes * size.num_rows
        operations = operations + self._pair_operations * (size.pairs + size.context)
        operations = operations + self._row_operations * size.num_sampled
        least = np.maximum(num_bytes / self._bandwidth, operations / self._rate)
        return self.fixed + self._collectives(int(size.num_tokens)) + least

    def _tokens(self, num_tokens: int, is_sampled: int) -> tuple[float, float]:
        """Return the bytes of weights, and the operations with them, of a step's tokens."""
        key = num_tokens, is_sampled
        if key not in self._of_tokens:
            # Without context: weights and embeddings, and operations without attention.
            step = _step(num_tokens, 0, is_sampled)
            num_bytes = self._need.bytes(step) - self._row_bytes
            tokens = _step(1, 0, 0)
            per_token = self._need.operations(tokens)
            self._of_tokens[key] = num_bytes, num_tokens * per_token
        return self._of_tokens[key]

    def _collectives(self, num_tokens: int) -> float:
        """Return the seconds of two all-reduces a layer, of the hidden states of all tokens."""
        if self.num_gpus == 1:
            return 0.0
        num_bytes = 2 * num_tokens * self._model.hidden_size
        sent = 2 * (self.num_gpus - 1) / self.num_gpus * num_bytes
        each = _COLLECTIVE + sent / (self._gpu.link * self.efficiency)
        return 2 * self._model.num_hidden_layers * each


def weight_bytes(model_config: ModelConfig) -> float:
    """Return the bytes of a model's matrices, all experts included."""
    need = Need(model_config)
    experts = 0 if model_config.moe is None else model_config.moe.num_experts
    layers = need.dense + need.num_moe_layers * experts * need.expert
    num_heads = 1 if model_config.tie_word_embeddings else 2  # the LM head, and the embedding
    return need.weight_item * layers + need.head_item * num_heads * need.head


def num_kv_blocks(
    model_config: ModelConfig, gpu: GPU, config: EngineConfig, num_gpus: int = 1
) -> int:
    """Return the KV blocks that fit beside weights and activations.

    Raises `ValueError` if the weights leave no room.
    """
    tokens, hidden = config.max_num_batched_tokens, model_config.hidden_size
    wide = 4 * hidden + 2 * model_config.intermediate_size / num_gpus  # live at a time, per token
    logits = 4 * config.max_num_seqs * model_config.vocab_size
    usable = config.gpu_memory_utilization * gpu.memory * num_gpus
    weights = weight_bytes(model_config)
    room = usable - weights - (2 * tokens * wide + logits) * num_gpus
    block = config.block_size * model_config.kv_bytes_per_token(config.kv_cache_dtype)
    require(
        room >= 2 * block,
        f"{weights / 1e9:.1f} GB of weights do not fit beside KV blocks into the "
        f"{usable / 1e9:.1f} GB of {num_gpus} GPUs: use more of them, or larger ones",
    )
    return int(room // block)


def _step(query: int, context: int, num_logits: int) -> Step:
    return Step(np.array([query]), np.array([context]), num_logits)


def _without_windows(need: Need) -> Need:
    """Return the needs of the same model without sliding windows: `StepSize` has counted them."""
    windows: tuple[int | None, ...] = (None,) * len(need.config.sliding_windows)
    return Need(replace(need.config, sliding_windows=windows))
