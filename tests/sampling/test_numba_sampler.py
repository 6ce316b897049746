"""The CPU's sampler of one pass, against the one of torch's operators."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling.sampler import Sampled, Sampler
from nanoserve.sampling_params import SamplingParams

pytest.importorskip("numba", reason="pip install 'nanoserve[cpu]'")
from nanoserve.kernels.cpu.choose_tokens import _bound
from nanoserve.sampling.numba_sampler import NumbaSampler

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7, logprobs=2),
    SamplingParams(temperature=0.01),
    SamplingParams(temperature=30),
    SamplingParams(temperature=1, top_k=5),
    SamplingParams(temperature=0.9, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0.9, repetition_penalty=1.3),
    SamplingParams(temperature=0, logit_bias={1: 2.0}),
    SamplingParams(temperature=1, top_k=3, presence_penalty=0.5),
]


def sample(sampler: Sampler, logits: torch.Tensor, kinds: list[int], position: int) -> Sampled:
    for slot, kind in enumerate(kinds):
        change = SlotUpdate(slot, KINDS[kind], 2**40 + 7919 * kind, slot % 3, [1, 2, 3])
        sampler.set_slot(change)
    slots = np.arange(len(kinds))
    return sampler.sample(logits, slots, slots + position)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [4, 255, 2048, 32001])
def test_it_draws_the_same_tokens(
    dtype: torch.dtype, vocab_size: int, by_size: Callable[..., int]
) -> None:
    """In every mixture of settings, few rows and so many that threads share them."""
    rng = np.random.default_rng(vocab_size)
    torch.manual_seed(vocab_size)
    device = torch.device("cpu")
    samplers = [kind(64, vocab_size, device) for kind in (Sampler, NumbaSampler)]
    for position in range(by_size(20, 60, 300)):
        num_rows = int(rng.choice([1, 2, 5, 16, 40]))
        kinds = [int(kind) for kind in rng.integers(len(KINDS), size=num_rows)]
        scale = float(rng.choice([0, 1, 5, 200]))
        logits = (scale * torch.randn(num_rows, vocab_size)).to(dtype)
        if position % 3 == 0:
            logits[:, rng.integers(vocab_size, size=vocab_size // 2)] = -torch.inf
        if position % 4 == 0:  # rows that lie apart, as two ranks' parts of an odd vocabulary do
            logits = torch.nn.functional.pad(logits, (0, 1))[:, :-1]
        expected, found = (sample(s, logits, kinds, position) for s in samplers)
        assert found.token_ids.tolist() == expected.token_ids.tolist(), (kinds, scale)
        assert found.errors == expected.errors


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 700, 2047])
def test_a_row_that_is_not_finite_has_no_token(wrong: float, place: int) -> None:
    """-inf everywhere, or one value that is no number or too large a one."""
    sampler = NumbaSampler(8, 2048, torch.device("cpu"))
    logits = torch.randn(3, 2048)
    logits[1] = wrong if wrong == -torch.inf else logits[1]
    logits[1, place] = wrong
    for kinds in ([1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 0], [8, 8, 8], [7, 7, 7]):
        token_ids = sample(sampler, logits, kinds, 5).token_ids.tolist()
        assert token_ids[1] == -1 and min(token_ids[0], token_ids[2]) >= 0, (kinds, token_ids)


def test_no_bound_is_below_what_it_bounds() -> None:
    """Else a winner could be passed over. Of all exponents, the ends of each included."""
    near = np.concatenate([2.0**-n * (1 + np.linspace(0, 1, 257)) for n in range(1, 34)])
    for u in near.astype(np.float32):
        exact = -np.log(-np.log1p(-np.minimum(np.float64(u), 1 - 2.0**-24)))
        assert _bound(u) >= exact
        assert _bound(u) <= exact + 3  # so loose only where a token can hardly win, u near 1
