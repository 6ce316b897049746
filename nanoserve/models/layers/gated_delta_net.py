"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): attention with a state of fixed size.

It takes the place of attention in a decoder layer. Queries, keys and values pass a short causal
convolution, then the gated delta rule, then a norm whose output is gated. Key heads are split over
the ranks, with the value heads that read them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.recurrent_state import RecurrentState, RecurrentStateSpec
from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.causal_conv import causal_conv
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.delta_rule import (
    CHUNK,
    Chunks,
    DeltaInputs,
    chunked_delta_rule,
    delta_step,
    unit_length,
)
from nanoserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear


class GatedDeltaNet(nn.Module):
    """The layer as Qwen3.5 stores it: [num_tokens, hidden_size] -> the same.

    Everything between the projections is computed in float32, as are the states.
    """

    # Names of checkpoint tensors with the rows of several parts: see `Phi3ForCausalLM`.
    fused_tensors: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
        "conv1d": ("conv1d_q", "conv1d_k", "conv1d_v"),
    }

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(
                f"hidden_act={config.hidden_act!r} is not supported with linear attention"
            )
        shape, tp = config.linear_attention, context.tp
        self.num_key_heads = tp.part(shape.num_key_heads, "linear_num_key_heads")
        self.num_value_heads = self.num_key_heads * (shape.num_value_heads // shape.num_key_heads)
        self.key_dim, self.value_dim = shape.key_head_dim, shape.value_head_dim
        # Of all ranks together.
        self.keys = shape.num_key_heads * self.key_dim
        self.values = shape.num_value_heads * self.value_dim
        size, of_gates = config.hidden_size, self.gate_outputs(shape.num_value_heads)
        self.in_proj = ColumnParallelLinear(size, self.outputs(), context)
        # Two small products that decide how much is forgotten: their weights are not quantized.
        plain = replace(context, linear_method=None)
        self.in_proj_gates = ColumnParallelLinear(size, of_gates, plain)
        self.out_proj = RowParallelLinear(self.values, size, context)
        self.tp, in_float32 = tp, replace(context, dtype=torch.float32)
        self.channels = 2 * self.num_key_heads * self.key_dim
        self.channels += self.num_value_heads * self.value_dim
        self.conv_weight = in_float32.empty(self.channels, 1, shape.conv_kernel_dim)
        self.log_rate = in_float32.empty(self.num_value_heads)
        self.time_bias = in_float32.empty(self.num_value_heads)
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps, in_float32)
        states = {
            "conv": (shape.conv_kernel_dim - 1, self.channels),
            "recurrent": (self.num_value_heads, self.key_dim, self.value_dim),
        }
        self.state_spec = RecurrentStateSpec(index, states)

    def outputs(self) -> dict[str, int]:
        """Return the checkpoint's tensors in the first product, and their numbers of rows."""
        return {
            "in_proj_q": self.keys,
            "in_proj_k": self.keys,
            "in_proj_v": self.values,
            "in_proj_z": self.values,
        }

    def gate_outputs(self, num_value_heads: int) -> dict[str, int]:
        """Return the same for the product that yields beta and the decay of each value head."""
        return {"in_proj_b": num_value_heads, "in_proj_a": num_value_heads}

    def split(self, projected: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and v [num_tokens, channels]; z; and b and a [num_tokens, value heads]."""
        qkv, z = projected.split((self.channels, projected.shape[1] - self.channels), dim=1)
        b, a = gates.chunk(2, dim=1)
        return qkv, z, b, a

    def forward(self, hidden: Tensor, cache: RecurrentState, metadata: AttentionMetadata) -> Tensor:
        num_tokens = len(hidden)
        # 1) The projections.
        qkv, z, b, a = self.split(self.in_proj(hidden), self.in_proj_gates(hidden))
        # 2) The convolution.
        before = cache.load("conv", metadata)
        qkv, after = causal_conv(qkv.float(), self.conv_weight.squeeze(1), before, metadata)
        cache.store("conv", metadata, after)
        # 3) Heads: q and k [num_tokens, H, K], v [num_tokens, H, V], for all H value heads.
        keys = self.num_key_heads * self.key_dim
        q, k, v = F.silu(qkv).split((keys, keys, self.channels - 2 * keys), dim=1)
        q, k = (self._for_value_heads(x) for x in (q, k))
        v = v.view(num_tokens, self.num_value_heads, self.value_dim)
        # 4) The delta rule: beta is between 0 and 1, exp(g) too.
        g = -self.log_rate.exp() * F.softplus(a.float() + self.time_bias)
        inputs = DeltaInputs(q * self.key_dim**-0.5, k, v, g, b.float().sigmoid())
        state = cache.load("recurrent", metadata)
        out = _delta_rule(inputs, state, metadata)
        cache.store("recurrent", metadata, state)
        # 5) The gated norm of each head.
        out = self.norm(out, z.float().view_as(out)).flatten(1)
        return self.out_proj(out.to(hidden.dtype))

    def _for_value_heads(self, x: Tensor) -> Tensor:
        heads = unit_length(x.view(len(x), self.num_key_heads, self.key_dim))
        return heads.repeat_interleave(self.num_value_heads // self.num_key_heads, dim=1)

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        first, kernel = 0, self.conv_weight.shape[2]
        for part, total in (("q", self.keys), ("k", self.keys), ("v", self.values)):
            size = total // self.tp.size
            rows = self.conv_weight[first : first + size]
            name, shape = f"{own_name}.conv1d_{part}.weight", (total, 1, kernel)
            yield CheckpointTensor(name, rows, shape, 0, self.tp.rank * size)
            first += size
        size = self.num_value_heads
        for name, heads in (("A_log", self.log_rate), ("dt_bias", self.time_bias)):
            whole, start = (size * self.tp.size,), self.tp.rank * size
            yield CheckpointTensor(f"{own_name}.{name}", heads, whole, 0, start)


class InterleavedGatedDeltaNet(GatedDeltaNet):
    """The layer as Qwen3-Next stores it.

    Each key head has its rows of all projections together: its query, its key, and values, z, b and
    a of the value heads that read it.
    """

    def outputs(self) -> dict[str, int]:
        return {"in_proj_qkvz": 2 * self.keys + 2 * self.values}

    def gate_outputs(self, num_value_heads: int) -> dict[str, int]:
        return {"in_proj_ba": 2 * num_value_heads}

    def split(self, projected: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_heads = self.num_key_heads
        values = self.num_value_heads // num_heads * self.value_dim
        heads = projected.view(len(projected), num_heads, -1)
        q, k, v, z = heads.split((self.key_dim, self.key_dim, values, values), dim=2)
        b, a = gates.view(len(gates), num_heads, -1).chunk(2, dim=2)
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        return qkv, z.flatten(1), b.flatten(1), a.flatten(1)


class GatedRMSNorm(nn.Module):
    """RMSNorm(x) * silu(gate), over the last dimension; all in float32."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.eps, self.weight = eps, context.empty(size)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate)

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{own_name}.weight", self.weight, tuple(self.weight.shape))


def _delta_rule(inputs: DeltaInputs, state: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Compute the rows of a step, and update `state`: the recurrent form for single tokens."""
    num_single = metadata.num_decode_rows
    if num_single == metadata.num_rows:
        return delta_step(inputs, state)
    longer = inputs.tokens(num_single, len(inputs.q))
    out = chunked_delta_rule(longer, state[num_single:], _chunks(metadata))
    if num_single == 0:
        return out
    single = delta_step(inputs.tokens(0, num_single), state[:num_single])
    return torch.cat((single, out))


def _chunks(metadata: AttentionMetadata) -> Chunks:
    """Return the chunks of the rows with several tokens, the same for all layers of a step."""
    if "delta_rule" not in metadata.scratch:
        ends = metadata.cu_seqlens_q[metadata.num_decode_rows :].tolist()
        lengths = [end - start for start, end in pairwise(ends)]
        size = min(CHUNK, metadata.max_query_len)
        chunks = Chunks.of(lengths, metadata.cu_seqlens_q.device, size)
        metadata.scratch["delta_rule"] = chunks
    return Chunks(*metadata.scratch["delta_rule"])
