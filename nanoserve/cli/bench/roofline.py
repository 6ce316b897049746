"""The roofline (Williams et al. 2009) is the least time a workload can take on this machine.

A step must read the weights and the KV of its sequences, and it must compute its matrix products
and its attention; the slower of the two bounds it. The steps and their batches are those that
nanoserve's scheduler plans, without a model, so the limit is the same for every engine.

Norms, rotary embeddings, activations and sampling are omitted, as they are a few thousandths. Every
sequence reads all of its KV, including a shared prefix. Hardware caches are not modelled: a model
that fits into one, or sequences that read the same KV at the same time, may exceed the limit.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanoserve.checkpoint.linear_attention import LinearAttentionConfig
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.precision import Precision
from nanoserve.config import EngineConfig
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

_NO_WINDOW = 2**31 - 1  # longer than any context


class Step(NamedTuple):
    """The sizes of one step: new tokens, and context including them, of each row [num_rows]."""

    query_lens: np.ndarray
    context_lens: np.ndarray
    num_logits: int


@dataclass(frozen=True)
class Limit:
    """The bytes and operations that a workload needs, and the least seconds that they take."""

    seconds: float
    num_bytes: float
    num_operations: float
    num_steps: int


class Need:
    """The bytes and operations of a model's steps.

    A matrix product is two operations per weight and row.
    """

    def __init__(self, config: ModelConfig, precision: Precision | None = None) -> None:
        self.config = config
        self.item = 4 if config.dtype == "float32" else 2
        self.weight_item = precision.weight_bits / 8 if precision else self.item
        self.head_item = precision.head_bits / 8 if precision else self.item
        self.kv_item = precision.kv_bits / 8 if precision else self.item
        self.windows = Counter(
            window or _NO_WINDOW
            for layer, window in enumerate(config.sliding_windows)
            if layer not in config.recurrent_layers
        )
        hidden, attention = config.hidden_size, attention_weights(config)
        self.head = hidden * config.vocab_size  # also the embedding, if they are tied
        # Weights that all tokens use; weights of experts are added separately.
        self.num_states, self.rule = 0, 0
        self.dense = config.num_kv_layers * attention
        if config.linear_attention is not None:
            self._add_linear_attention(config.linear_attention)
        self.num_moe_layers, self.expert = 0, 0
        if config.moe is not None:
            self.num_moe_layers = config.num_hidden_layers - len(config.moe.dense_layers)
            self.expert = 3 * hidden * config.moe.intermediate_size
            self.dense += self.num_moe_layers * hidden * config.moe.num_experts  # the router
            shared = config.moe.shared_expert_intermediate_size or 0
            self.dense += self.num_moe_layers * 3 * hidden * shared
        num_dense_layers = config.num_hidden_layers - self.num_moe_layers
        self.dense += num_dense_layers * 3 * hidden * config.intermediate_size

    def _add_linear_attention(self, linear: LinearAttentionConfig) -> None:
        """Count its layers, and the output gates of full attention, which come with them.

        Each value of a state is read and written once a step, in float32, and is in three products
        for each token.
        """
        config, hidden = self.config, self.config.hidden_size
        gates = hidden * config.head_dim * config.num_attention_heads
        keys = linear.num_key_heads * linear.key_head_dim
        values = linear.num_value_heads * linear.value_head_dim
        products = hidden * (2 * keys + 3 * values + 2 * linear.num_value_heads)
        num_layers = len(linear.layers)
        self.dense += config.num_kv_layers * gates + num_layers * products
        conv = (linear.conv_kernel_dim - 1) * (2 * keys + values)
        self.rule = num_layers * values * linear.key_head_dim
        self.num_states = self.rule + num_layers * conv

    def bytes(self, step: Step) -> float:
        """Return the bytes read (weights, embedding rows, KV, states) and written (KV, states)."""
        num_tokens = int(step.query_lens.sum())
        weights = self.dense + self._experts_used(num_tokens) * self.expert
        head = self.head if step.num_logits else 0
        embedding = num_tokens * self.config.hidden_size
        kv_heads = self.config.kv_heads
        kv_per_layer = kv_heads.num_stored * kv_heads.num_heads * kv_heads.head_dim
        seen = sum(
            num_layers * int(np.minimum(step.context_lens, window + step.query_lens - 1).sum())
            for window, num_layers in self.windows.items()
        )
        kv = seen * kv_per_layer
        weight_bytes = self.weight_item * weights + self.head_item * head
        states = 2 * 4 * self.num_states * len(step.query_lens)
        return weight_bytes + self.item * embedding + self.kv_item * kv + states

    def operations(self, step: Step) -> float:
        """Return the operations of matrix products with weights, and of attention.

        Attention has two matrix products per layer for each query and each key that it attends to.
        """
        num_tokens = int(step.query_lens.sum())
        per_token = self.dense
        if self.config.moe is not None:
            per_token += self.num_moe_layers * self.config.moe.num_experts_per_tok * self.expert
        pairs = sum(
            num_layers * int(pairs_seen(step.query_lens, step.context_lens, window).sum())
            for window, num_layers in self.windows.items()
        )
        mla, of_pair = self.config.mla, 2 * self.config.head_dim
        if mla is not None:
            of_pair = mla.kv_heads.head_dim + mla.kv_lora_rank
        attention = pairs * self.config.num_attention_heads * of_pair
        per_token += 3 * self.rule
        return 2.0 * (num_tokens * per_token + attention + step.num_logits * self.head)

    def _experts_used(self, num_tokens: int) -> float:
        """Return the expected number of experts that any token selects, over all layers.

        All experts are assumed to be equally likely.
        """
        if self.config.moe is None:
            return 0
        share = self.config.moe.num_experts_per_tok / self.config.moe.num_experts
        return self.num_moe_layers * self.config.moe.num_experts * (1 - (1 - share) ** num_tokens)


def attention_weights(config: ModelConfig) -> int:
    """Return the number of weights of a layer's attention, without norms and biases."""
    hidden, heads, mla = config.hidden_size, config.num_attention_heads, config.mla
    if mla is None:
        return 2 * hidden * config.head_dim * (heads + config.num_key_value_heads)
    q_size, rank = heads * mla.head_dim, mla.q_lora_rank
    of_q = hidden * q_size if rank is None else rank * (hidden + q_size)
    of_kv_b = heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
    return of_q + hidden * mla.kv_heads.head_dim + of_kv_b + heads * mla.v_head_dim * hidden


def pairs_seen(query_lens: np.ndarray, context_lens: np.ndarray, window: int) -> np.ndarray:
    """Return the query-key pairs per row. A query attends to itself and `window - 1` before it."""

    def up_to(n: np.ndarray) -> np.ndarray:
        n = n.astype(np.int64)
        short = np.minimum(n, window)
        return short * (short + 1) // 2 + (n - short) * window

    return up_to(context_lens) - up_to(context_lens - query_lens)


def planned_steps(
    config: EngineConfig, prompts: list[list[int]], output_lens: list[int]
) -> Iterator[Step]:
    """Yield the steps of an engine whose KV block pool holds all sequences, without a model."""
    totals = [len(prompt) + n for prompt, n in zip(prompts, output_lens, strict=True)]
    num_blocks = sum(-(-total // config.block_size) for total in totals)
    scheduler = Scheduler(config, num_blocks, max(totals))
    for i, (prompt, n) in enumerate(zip(prompts, output_lens, strict=True)):
        params = SamplingParams(max_tokens=n, ignore_eos=True)
        scheduler.add(Sequence(str(i), list(prompt), params, max(totals), arrival=i))
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        starts = np.array([row.start for row in plan.rows])
        query_lens = np.array([row.n for row in plan.rows])
        num_logits = len(plan.sampled)
        scheduler.commit(plan)
        scheduler.update(plan, [[0]] * num_logits)
        yield Step(query_lens, starts + query_lens, num_logits)


def limit(
    model_config: ModelConfig,
    steps: Iterable[Step],
    bandwidth: float,
    matmul_rate: float,
    precision: Precision | None = None,
) -> Limit:
    """Return the limit at `bandwidth` bytes and `matmul_rate` operations per second.

    precision: None if all values are in the model's data type.
    """
    need = Need(model_config, precision)
    bytes_and_operations = [(need.bytes(step), need.operations(step)) for step in steps]
    seconds = sum(max(b / bandwidth, ops / matmul_rate) for b, ops in bytes_and_operations)
    num_bytes, num_operations = (sum(column) for column in zip(*bytes_and_operations, strict=True))
    return Limit(seconds, num_bytes, num_operations, len(bytes_and_operations))
