"""Counter-based random numbers, without generator or state, the same bits on every machine.

A random number depends only on the seed of a request, the position of the new token in prompt and
output, the index of the completion, and the token id. So the noise does not depend on the rest of
the batch, on chunks or on preemption. `kernels/cpu/choose_tokens.py` and
`kernels/triton/choose_tokens.py` compute the same bits where they use them; their logarithms may
differ in the last bit. The token is argmax(logit / temperature - log E), E from Exp(1): Gumbel
noise, as an exponential race. The idea is from Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"; the mixer is a 32-bit multiply-xorshift finaliser, because 64-bit multiplications
are five times as slow on a CPU.
"""

import numpy as np
import torch

from nanoserve.sampling.host_copies import to_device

_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))  # (shift, odd multiplier)
_LAST_SHIFT = 16
_WEYL = 0x9E3779B9  # 2^32 / golden ratio: spreads neighbouring token ids over all bits
# Elements that are processed at once. On a CPU the buffers then fit into the L2 cache; a GPU needs
# few launches.
_ELEMENTS_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 23}


def row_keys(seeds: np.ndarray, positions: np.ndarray, completions: np.ndarray) -> np.ndarray:
    """Return a 32-bit key per row, as int32, from 64-bit seeds and positions of new tokens.

    Completions of one prompt share a seed and a position; their indices make their noise differ.
    """
    key = _mix((seeds & 0xFFFFFFFF).astype(np.uint32))
    key = _mix(key ^ (seeds >> np.uint64(32)).astype(np.uint32))
    key = _mix(key ^ positions.astype(np.uint32))
    return _mix(key ^ completions.astype(np.uint32)).view(np.int32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint32(_WEYL)  # zero would map to zero
    for shift, multiplier in _ROUNDS:
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(multiplier)
    return x ^ (x >> np.uint32(_LAST_SHIFT))


class Noise:
    """A generator of log E, with E from Exp(1), for every token of a vocabulary."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        token_ids = torch.arange(vocab_size, dtype=torch.int64)
        weyl = (token_ids * _WEYL) & 0xFFFFFFFF
        self._token_keys = _as_int32(weyl).to(device)
        self._at_once = _ELEMENTS_AT_ONCE[device.type]
        self._hash = torch.empty(self._at_once, dtype=torch.int32, device=device)
        self._shifted = torch.empty_like(self._hash)
        self._exponential = torch.empty_like(self._hash, dtype=torch.float32)

    def subtract_log_exponential(self, logits: torch.Tensor, keys: np.ndarray) -> None:
        """Subtract the noise from float32 logits [num_rows, vocab_size]; keys: from `row_keys`."""
        (on_device,) = to_device(logits.device, keys)
        row_keys = on_device.unsqueeze(1)
        num_rows, vocab_size = logits.shape
        width = max(1, self._at_once // num_rows)
        for start in range(0, vocab_size, width):
            part = logits[:, start : start + width]
            part -= self._log_exponential(row_keys, start, part.shape[1])

    def _log_exponential(self, row_keys: torch.Tensor, start: int, width: int) -> torch.Tensor:
        """Return log of Exp(1) noise [num_rows, width] for token ids from `start`, in a buffer."""
        num_rows = len(row_keys)
        if num_rows * width > len(self._hash):  # more rows than elements at once
            self._hash = self._hash.new_empty(num_rows * width)
            self._shifted = torch.empty_like(self._hash)
            self._exponential = torch.empty_like(self._hash, dtype=torch.float32)
        x = self._hash[: num_rows * width].view(num_rows, width)
        shifted = self._shifted[: num_rows * width].view(num_rows, width)
        torch.bitwise_xor(self._token_keys[start : start + width], row_keys, out=x)
        for shift, multiplier in _ROUNDS:
            _xor_shift(x, shift, shifted)
            x *= _signed(multiplier)
        _xor_shift(x, _LAST_SHIFT, shifted)
        # E = -log(1 - u) with u = (x + 0.5) / 2^32 and x unsigned. The smallest E wins, and small u
        # are exact here, so even among 150,000 equal tokens two rarely tie; with 24-bit uniforms
        # they would.
        u = self._exponential[: num_rows * width].view(num_rows, width)
        u.copy_(x.view(torch.uint32)).add_(0.5).mul_(2.0**-32)
        # The largest x round up to u = 1, with infinite E; if a filter has left one token, that
        # would make its whole row -inf.
        u.clamp_(max=1 - 2.0**-24)
        return u.neg_().log1p_().neg_().log_()


def _xor_shift(x: torch.Tensor, shift: int, buffer: torch.Tensor) -> None:
    """Compute x ^= x >> shift on bits: int32 shifts extend the sign, so it is masked off."""
    torch.bitwise_right_shift(x, shift, out=buffer)
    buffer &= (1 << (32 - shift)) - 1
    x ^= buffer


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def _as_int32(unsigned: torch.Tensor) -> torch.Tensor:
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).to(torch.int32)
