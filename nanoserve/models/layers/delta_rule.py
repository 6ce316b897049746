"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), in two forms that agree.

A head keeps a matrix S [key_dim, value_dim] that maps keys to values. Token t forgets a part of it,
looks up what S has for its key, and corrects that towards its value:

    S <- exp(g[t]) S                       g <= 0: the log of the decay
    S <- S + k[t] (beta[t] (v[t] - k[t]^T S))^T
    o[t] = q[t]^T S

The *recurrent* form is these three lines, token by token. The *chunked* form (Yang et al. 2024,
arXiv 2406.06484) takes C tokens at a time. With c[i] the sum of g up to token i of the chunk, and
S the state before it, the corrections u[i] of the chunk's tokens depend on each other:

    u[i] = beta[i] (v[i] - exp(c[i]) k[i]^T S - sum over j < i of exp(c[i] - c[j]) (k[i] k[j]) u[j])

This is a triangular system, whose solution is linear in S: u = U - W S. So U and W are computed
for all chunks together, and only a few matrix products are left for each chunk in turn.

All arithmetic is in float32, but sums of g are in float64. Keys and queries have length one, and
queries are divided by sqrt(key_dim). Shapes: rows are sequences; H heads, of key size K and value
size V.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64


def unit_length(x: Tensor) -> Tensor:
    """Return x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


class DeltaInputs(NamedTuple):
    """The inputs of the rule, float32: q, k [..., H, K]; v [..., H, V]; g, beta [..., H].

    The first dimension is that of tokens, in a packed batch; or that of rows, and then of tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def tokens(self, first: int, end: int) -> "DeltaInputs":
        """Return the inputs of some tokens of a packed batch."""
        return DeltaInputs(*(x[first:end] for x in self))


def delta_step(inputs: DeltaInputs, state: Tensor) -> Tensor:
    """Compute one token of each row, and update `state` [rows, H, K, V] in place.

    Returns [rows, H, V]. The state is by far the largest operand, so q reads it together with k,
    before the update: q^T (S + k u^T) = q^T S + (q^T k) u^T.
    """
    q, k, v, g, beta = inputs
    decay = g.exp().unsqueeze(-1)
    known, read = (decay.unsqueeze(-1) * (torch.stack((k, q), dim=-2) @ state)).unbind(dim=-2)
    correction = beta.unsqueeze(-1) * (v - known)
    state *= decay.unsqueeze(-1)
    products = k.flatten(0, 1).unsqueeze(-1), correction.flatten(0, 1).unsqueeze(-2)
    state.view(-1, *state.shape[2:]).baddbmm_(*products)
    return read + (q * k).sum(dim=-1, keepdim=True) * correction


def recurrent_delta_rule(inputs: DeltaInputs, state: Tensor) -> Tensor:
    """Compute rows of equal length token by token: the reference for the chunked form.

    The inputs have a dimension of tokens after the rows; `state` [rows, H, K, V] is updated in
    place. Returns [rows, tokens, H, V].
    """
    tokens = zip(*(x.unbind(1) for x in inputs), strict=True)
    return torch.stack([delta_step(DeltaInputs(*token), state) for token in tokens], dim=1)


class Chunks(NamedTuple):
    """The chunks of a packed batch, in the order in which they are computed.

    order: int64 [rows], the rows, longest first. tokens: int64 [chunks, C], the tokens of each
    chunk; first the first chunks of all rows in this order, then the second ones of those that have
    any, and so on. Missing tokens of a row's last chunk are the number of tokens. counts: rows that
    have a first, a second, ... chunk.
    """

    order: Tensor
    tokens: Tensor
    counts: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, size: int = CHUNK) -> "Chunks":
        """Cut rows of these lengths, packed one after the other, into chunks of `size` tokens."""
        ends = torch.tensor(lengths).cumsum(0).tolist()
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        spans, counts = [], []
        for first in range(0, max(lengths), size):
            rows = [row for row in order if lengths[row] > first]
            counts.append(len(rows))
            spans += [(ends[row] - lengths[row] + first, ends[row]) for row in rows]
        begin, end = torch.tensor(spans).unsqueeze(-1).unbind(1)
        tokens = begin + torch.arange(size)
        tokens = torch.where(tokens < end, tokens, ends[-1])
        return cls(torch.tensor(order).to(device), tokens.to(device), counts)


def chunked_delta_rule(inputs: DeltaInputs, state: Tensor, chunks: Chunks) -> Tensor:
    """Compute packed rows of any lengths, and update `state` [rows, H, K, V] in place.

    Returns [tokens, H, V].
    """
    num_tokens, size = len(inputs.q), chunks.tokens.shape[1]

    def in_chunks(x: Tensor) -> Tensor:  # [tokens, H, ...] -> [chunks, H, C, ...], padded by zeros
        padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
        return padded[chunks.tokens].transpose(1, 2)

    q, k, v, g, beta = map(in_chunks, inputs)
    # 1) Decays within each chunk: exp(c[i] - c[j]) for j <= i. For j > i it could overflow. If one
    #    token forgets nearly all, c is large, and float32 would round the differences after it.
    c = g.double().cumsum(dim=-1)
    is_later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (c.unsqueeze(-1) - c.unsqueeze(-2)).float().masked_fill_(is_later, -torch.inf).exp_()
    since_start, to_end = c.exp().float().unsqueeze(-1), (c[..., -1:] - c).float().exp()
    # 2) The triangular system, for both right-hand sides.
    keys = k * beta.unsqueeze(-1)
    system = (keys @ k.transpose(-1, -2)) * decay
    both = torch.cat((v * beta.unsqueeze(-1), keys * since_start), dim=-1)
    both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    u, w = both.split((v.shape[-1], k.shape[-1]), dim=-1)
    # 3) What each chunk reads of itself, of the state before it, and adds to the state.
    within = (q @ k.transpose(-1, -2)) * decay
    from_state = q * since_start
    to_state = (k * to_end.unsqueeze(-1)).transpose(-1, -2)
    whole = since_start[..., -1:, :]
    # 4) Chunk after chunk.
    running, first = state[chunks.order], 0
    out = torch.empty_like(v)
    for count in chunks.counts:
        here, before = slice(first, first + count), running[:count]
        correction = u[here] - w[here] @ before
        out[here] = from_state[here] @ before + within[here] @ correction
        running[:count] = before * whole[here] + to_state[here] @ correction
        first += count
    state[chunks.order] = running
    # 5) Back to tokens.
    packed = v.new_empty(num_tokens + 1, *v.shape[1:2], v.shape[-1])
    packed[chunks.tokens] = out.transpose(1, 2)
    return packed[:num_tokens]
