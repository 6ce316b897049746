"""The noise of the sampler's kernel, by itself, beside that of `sampling/gumbel_noise.py`."""

import numpy as np
import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.choose_tokens import _log_exponential
from nanoserve.sampling.gumbel_noise import Noise

# With these keys token 0 has the smallest and the largest bits that there are.
KEYS = (0, 0xD5F9EFC4, 12345)


_SIZE, _PART = 1 << 18, 1 << 12  # a compiler unrolls what one program does


@triton.jit
def _noise(out, key, PART: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    token_ids = tl.program_id(0) * PART + tl.arange(0, PART)
    keys = tl.load(key).to(tl.uint32, bitcast=True)
    tl.store(out + token_ids, _log_exponential(keys, token_ids, IS_INTERPRETED))


def assert_noise_is_exact(key: int, device: str) -> None:
    """To a millionth, at both ends and on both sides of the border between its two formulas."""
    keys = np.array([key], dtype=np.uint32).view(np.int32)
    noise, on_device = torch.empty(_SIZE, device=device), torch.from_numpy(keys).to(device)
    _noise[(_SIZE // _PART,)](noise, on_device, _PART, triton.knobs.runtime.interpret)
    raced = torch.zeros(1, _SIZE)
    Noise(_SIZE, torch.device("cpu")).subtract_log_exponential(raced, keys)
    # An error in log E is a relative one in E; float32 itself, and the hardware's logarithm, leave
    # 2e-7 and 2.4e-7 of log E.
    torch.testing.assert_close(noise.cpu(), -raced[0], atol=1e-6, rtol=3e-7)
