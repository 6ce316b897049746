"""The filter kernel against sorting in float64, and against `nanoserve/sampling/filters.py`.

Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1).
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from nanoserve.engine.executor import SlotUpdate
from nanoserve.kernels.triton.choose_tokens import pack_settings
from nanoserve.kernels.triton.filter_logits import filter_borders
from nanoserve.sampling import fused_sampler
from nanoserve.sampling.filters import apply_filters
from nanoserve.sampling.fused_sampler import FusedSampler
from nanoserve.sampling.sampler import Sampler
from nanoserve.sampling.stages import Race
from nanoserve.sampling_params import SamplingParams

# In the interpreter numpy computes, and warns of what a GPU does without a word.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = 1e-5  # of top_p and min_p: sums in float32 may cross a token earlier or later
QUOTIENT = 3e-7 if DEVICE.type == "cuda" else 0  # a GPU's quotients differ in their last bit


class Filter(NamedTuple):
    """One row's settings."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0


def borders_of(logits: torch.Tensor, filters: list[Filter]) -> np.ndarray:
    """By the kernel; each row has its own slot, and they are not in the order of the rows."""
    slots = torch.arange(len(logits), dtype=torch.int32).flip(0).to(DEVICE)
    rows = [
        pack_settings(
            f.temperature, seed=0, completion=0, top_k=f.top_k, top_p=f.top_p, min_p=f.min_p
        )
        for f in reversed(filters)
    ]
    before = logits.clone()
    borders = filter_borders(logits, slots, torch.from_numpy(np.stack(rows)).to(DEVICE))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert borders.dtype == torch.float32 and borders.shape == (len(logits),)
    return borders.cpu().numpy()


def scaled(logits: torch.Tensor, filters: list[Filter]) -> np.ndarray:
    temperatures = torch.tensor([f.temperature for f in filters]).unsqueeze(1)
    return (logits.cpu().float() / temperatures).numpy()


def smallest_kept(x: np.ndarray, f: Filter, rounding: float = 0.0) -> float:
    """By sorting in float64; positive `rounding` keeps no less, negative no more."""
    ordered = np.sort(x.astype(np.float64))[::-1]
    border = -np.inf
    if f.min_p > 0:
        border = min(ordered[0], ordered[0] + math.log(np.float32(f.min_p)) - rounding)
    if 0 < f.top_k < len(x):
        border = max(border, ordered[f.top_k - 1])
    left = ordered[ordered >= border]
    if f.top_p < 1 and left[0] > -np.inf:
        mass = np.exp(left - left[0]).cumsum()
        top_p = float(np.float32(f.top_p)) + rounding
        left = left[: 1 + np.searchsorted(mass, top_p * mass[-1])]
    return left[-1]


def kept_by_torch(x: np.ndarray, filters: list[Filter]) -> np.ndarray:
    left = torch.from_numpy(x.copy())
    top_k, top_p, min_p, _ = (torch.tensor(setting) for setting in zip(*filters, strict=True))
    apply_filters(left, top_k, top_p, min_p)
    return np.where(left.isfinite(), left, torch.inf).min(axis=1)


def assert_kept_as_by_sorting(logits: torch.Tensor, filters: list[Filter]) -> np.ndarray:
    """And as by torch. Returns the borders."""
    borders, x = borders_of(logits, filters), scaled(logits, filters)
    slack = QUOTIENT * np.abs(borders, where=np.isfinite(borders), out=np.zeros_like(borders))
    kept = np.where(x >= (borders - slack)[:, None], x, np.inf).min(axis=1)
    exact = np.array([smallest_kept(row, f) for row, f in zip(x, filters, strict=True)])
    by_torch = np.minimum(kept_by_torch(x, filters), np.where(exact > -np.inf, np.inf, exact))
    for i, f in enumerate(filters):
        low, high = (smallest_kept(x[i], f, rounding) for rounding in (ROUNDING, -ROUNDING))
        assert low <= kept[i] <= high, (f, borders[i])
        assert low <= by_torch[i] <= high, f
    # Float32 cannot tell such a top_p's crossing at all; else it rarely decides.
    clear = np.array([f.top_p <= 1 - ROUNDING or f.top_p == 1 for f in filters])
    assert (clear & (kept != exact)).mean() <= 0.02 and (clear & (kept != by_torch)).mean() <= 0.02
    return borders


def mixed_filters(rng: np.random.Generator, num_rows: int, vocab_size: int) -> list[Filter]:
    choices = {
        "top_k": [0, -1, 0, 1, 3, 50, 64, 65, vocab_size - 1, vocab_size, 2**31 - 1],
        "top_p": [1.0, 1.0, 0.9999999, 0.999, 0.9, 0.5, 0.01, 1e-30],
        "min_p": [0.0, 0.0, 0.0, 1e-30, 0.02, 0.3, 1.0],
        "temperature": [0.3, 0.7, 1.0, 1.0, 1.7],
    }
    columns = [rng.choice(values, size=num_rows).tolist() for values in choices.values()]
    return [Filter(*row) for row in zip(*columns, strict=True)]


@pytest.mark.small(vocab_size=[1000])
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        *[(size, torch.float32) for size in (5, 64, 1000, 3000)],
        *[(size, torch.bfloat16) for size in (5, 64, 1000, 3000)],
        (2000, torch.float16),
    ],
)
def test_mixed_rows_keep_what_sorting_keeps(
    vocab_size: int, dtype: torch.dtype, full_size: bool
) -> None:
    """Of peaked and flat rows; in bfloat16 most borders are ties, in every row some are -inf."""
    num_rows = 32 if full_size else 16
    rng = np.random.default_rng(vocab_size)
    spread = rng.choice([0.05, 1.0, 5.0, 20.0], size=(num_rows, 1))
    shift = rng.choice([0.0, -30.0, 30.0], size=(num_rows, 1))
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size)) * spread + shift)
    logits[torch.from_numpy(rng.random(logits.shape) < 0.1)] = -torch.inf
    logits[:, 0] = 1.0
    filters = mixed_filters(rng, num_rows, vocab_size)
    assert_kept_as_by_sorting(logits.to(dtype).to(DEVICE), filters)


def test_rows_lie_apart_and_their_vocabulary_takes_several_blocks() -> None:
    rng = np.random.default_rng(0)
    wide = torch.from_numpy(rng.standard_normal((24, 10_000)) * 4).to(torch.bfloat16).to(DEVICE)
    filters = mixed_filters(rng, 24, 9_001)
    assert any(f.top_k == 9_000 for f in filters) and any(f.top_p == 0.5 for f in filters)
    assert_kept_as_by_sorting(wide[:, 16:9_017], filters)


@pytest.mark.small(dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_border_is_a_value_of_its_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(24, 2000)).to(dtype).to(DEVICE)
    filters = [Filter(20), Filter(1999), Filter(top_p=0.9), Filter(top_p=0.999), Filter(7, 0.5)]
    filters += [Filter(300, 0.95, 0.01, temperature=0.6)]
    borders = assert_kept_as_by_sorting(logits, filters * 4)
    distance = np.abs(scaled(logits, filters * 4) - borders[:, None]).min(axis=1)
    assert (distance <= QUOTIENT * np.abs(borders)).all()


def ties(*counts: int) -> torch.Tensor:
    """A row of so many fours, threes, ..., mixed."""
    values = torch.repeat_interleave(4.0 - torch.arange(len(counts)), torch.tensor(counts))
    return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(
    ("settings", "border"),
    [
        (Filter(1), 4),
        (Filter(2), 4),
        (Filter(3), 3),
        (Filter(52), 3),
        (Filter(53), 2),
        (Filter(1000), 0),
        (Filter(top_p=0.01), 4),
        (Filter(top_p=0.1), 3),  # two fours weigh 2, fifty threes 18.4, a hundred twos 13.5, ...
        (Filter(top_p=0.999), 0),
        (Filter(3, top_p=0.99), 3),  # both borders within the threes
        (Filter(2, top_p=0.99), 4),
        (Filter(min_p=1.0), 4),
        (Filter(min_p=0.36), 3),  # 1 / e is 0.3679
        (Filter(min_p=0.37, top_p=0.99), 4),
        (Filter(53, temperature=2.0), 1),
    ],
    ids=str,
)
def test_equal_logits_share_their_fate(settings: Filter, border: float) -> None:
    row = ties(2, 50, 100, 800, 500)
    x = row / settings.temperature
    (found,) = borders_of(row.view(1, -1).to(DEVICE), [settings])
    assert x[x >= float(found)].min() == border


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 32), (torch.bfloat16, 64)])
def test_the_search_for_top_k_starts_below_its_result(dtype: torch.dtype, step: int) -> None:
    """64 large logits, one in each of the groups whose maxima it starts from, and the rest."""
    logits = torch.linspace(-3, -2, 9000).to(dtype).repeat(4, 1).to(DEVICE)
    logits[:, : 64 * step : step] = 5
    filters = [Filter(1), Filter(64), Filter(65), Filter(500)]
    borders = assert_kept_as_by_sorting(logits, filters)
    assert borders[:3].tolist() == [5, 5, -2]


SPECIAL_FILTERS = [
    Filter(1),
    Filter(5),
    Filter(100),
    Filter(top_p=0.5),
    Filter(min_p=0.5),
    Filter(70, 0.9, 0.01, 0.5),
]


@pytest.mark.small(dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_little_to_choose_from(dtype: torch.dtype) -> None:
    """Per row: what is left, where not everything is. k may exceed the finite logits."""
    num = len(SPECIAL_FILTERS)
    equal = torch.full((num, 3000), -2.0, dtype=dtype, device=DEVICE)
    assert (borders_of(equal, SPECIAL_FILTERS)[:4] == -2).all()
    zeros = equal * 0
    zeros[:, ::2] *= -1  # -0 equals 0
    assert (scaled(zeros, SPECIAL_FILTERS) >= borders_of(zeros, SPECIAL_FILTERS)[:, None]).all()

    single = torch.full_like(equal, -torch.inf)
    assert (borders_of(single, SPECIAL_FILTERS) == -np.inf).all()
    single[:, 1234] = -50.0
    borders = borders_of(single, SPECIAL_FILTERS)
    assert borders[[0, 3]].tolist() == [-50, -50] and borders[[1, 2]].tolist() == [-np.inf] * 2
    assert (borders <= scaled(single, SPECIAL_FILTERS).max(axis=1)).all()

    few = torch.full_like(equal, torch.nan)
    few[:, 5::1000] = torch.tensor([3.0, 2.0, -1.0], dtype=dtype, device=DEVICE)
    borders = borders_of(few, SPECIAL_FILTERS)
    assert borders[:4].tolist() == [3, -np.inf, -np.inf, 3]


def test_rows_without_a_filter_have_no_border() -> None:
    logits = torch.randn(6, 50, device=DEVICE)
    filters = [Filter(), Filter(-1), Filter(50), Filter(51), Filter(top_p=1.0)]
    filters += [Filter(3, 0.5, 0.5, temperature=0.0)]  # greedy
    assert (borders_of(logits, filters) == -np.inf).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(7)}, "logits"),
        ({"logits": torch.zeros(7, 2).T}, "logits"),
        ({"logits": torch.zeros(2, 7, dtype=torch.float64)}, "not 7 and torch.float64"),
        ({"logits": torch.empty(2, 2**24, device="meta")}, "16777216"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots"),
        ({"settings": torch.zeros(2, 4, dtype=torch.int32)}, "settings"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(change: dict, message: str) -> None:
    arguments = {
        "logits": torch.zeros(2, 7),
        "slots": torch.zeros(2, dtype=torch.int32),
        "settings": torch.zeros(2, 8, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        filter_borders(**(arguments | change))


VOCAB_SIZE = 1500
NUM_SLOTS = 40


def samplers(params: list[SamplingParams], processors: tuple = ()) -> tuple[Sampler, FusedSampler]:
    both = tuple(
        kind(NUM_SLOTS, VOCAB_SIZE, DEVICE, processors) for kind in (Sampler, FusedSampler)
    )
    for sampler in both:
        for slot, p in enumerate(params):
            sampler.set_slot(SlotUpdate(slot, p, seed=slot * 2**35 - 1, completion=slot % 3))
    return both


def sample_both(
    both: tuple[Sampler, FusedSampler],
    logits: torch.Tensor,
    slots: np.ndarray,
    positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of both. As after chunked prefill, rows of logits are some of the step's tokens."""
    tokens = np.full(2 * len(slots), -99, dtype=np.int32)
    tokens[1::2] = positions - 1
    # The batch on the device goes on: with what other heads want of the step, or had in another.
    behind = torch.full((5,), -99, dtype=torch.int32)
    rows = torch.arange(1, 2 * len(slots), 2, dtype=torch.int32)
    tensors = SimpleNamespace(
        positions=torch.from_numpy(tokens).to(DEVICE),
        output_rows=torch.cat([rows, behind]).to(DEVICE),
        output_slots=torch.cat([torch.from_numpy(slots), behind]).to(DEVICE),
    )
    before = logits.clone()
    sampled = [both[0].sample(logits, slots, positions, tensors)]
    with pytest.MonkeyPatch.context() as patch:  # nothing is taken out and drawn by torch
        patch.setattr(Race, "__call__", lambda *args: pytest.fail("drawn by torch"))
        sampled.append(both[1].sample(logits, slots, positions, tensors))
    assert torch.equal(logits, before) and not any(s.errors for s in sampled)
    assert [row for row, _ in sampled[0].states] == [row for row, _ in sampled[1].states]
    first, second = (s.token_ids.cpu().numpy() for s in sampled)
    return first, second


def random_params(rng: np.random.Generator) -> list[SamplingParams]:
    filters = mixed_filters(rng, NUM_SLOTS, VOCAB_SIZE)
    params = [SamplingParams(**f._asdict()) for f in filters]
    params[::5] = [SamplingParams(temperature=0, top_k=3)] * len(params[::5])
    return params


def test_both_samplers_draw_the_same_tokens(full_size: bool) -> None:
    rng, num_rows = np.random.default_rng(3), 80 if full_size else 20
    params = random_params(rng)
    both = samplers(params)
    slots = rng.integers(0, NUM_SLOTS, num_rows, dtype=np.int32)
    positions = rng.integers(1, 2**20, num_rows, dtype=np.int32)
    logits = torch.from_numpy(rng.standard_normal((num_rows, VOCAB_SIZE)) * 3).to(torch.bfloat16)
    ours, theirs = sample_both(both, logits.to(DEVICE), slots, positions)
    num_ties = 1 if DEVICE.type == "cuda" else 0  # whose logarithms differ in their last bits
    assert (ours != theirs).sum() <= num_ties


def test_rows_that_change_logits_agree_beside_rows_that_do_not(full_size: bool) -> None:
    rng, num_rows = np.random.default_rng(4), NUM_SLOTS if full_size else 16
    params = random_params(rng)
    both_kinds = {"temperature": 0.8, "top_k": 30, "top_p": 0.9}
    params[1::4] = [SamplingParams(**both_kinds, logit_bias={7: 5.0})] * 10
    params[2::4] = [SamplingParams(**both_kinds, logprobs=1)] * 10
    both = samplers(params)
    slots = rng.permutation(NUM_SLOTS)[:num_rows].astype(np.int32)
    logits = torch.from_numpy(rng.standard_normal((num_rows, VOCAB_SIZE)) * 3).float().to(DEVICE)
    ours, theirs = sample_both(both, logits, slots, slots + 1)
    assert (ours == theirs).all()
    num_changed = sum(params[slot].logit_bias is not None for slot in slots)
    assert len(both[1].sample(logits, slots, slots + 1).states) == num_changed > 0


def test_steps_without_a_filter_do_not_look_for_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def recorded(logits: torch.Tensor, *rest: torch.Tensor, **options: bool) -> torch.Tensor:
        searched.append(len(logits))
        return filter_borders(logits, *rest, **options)

    monkeypatch.setattr(fused_sampler, "filter_borders", recorded)
    both = samplers(
        [
            SamplingParams(temperature=0, top_k=5),
            SamplingParams(),
            SamplingParams(top_k=5),
            SamplingParams(top_p=0.5),
            SamplingParams(min_p=0.5),
        ]
    )
    logits, positions = torch.randn(2, VOCAB_SIZE, device=DEVICE), np.array([3, 4], dtype=np.int32)
    for slots, expected in (([0, 1], 0), ([0, 2], 1), ([1, 3], 2), ([4, 0], 3)):
        sample_both(both, logits, np.array(slots, dtype=np.int32), positions)
        assert len(searched) == expected
    for sampler in both:  # another sequence in the slot
        sampler.set_slot(SlotUpdate(2, SamplingParams(), seed=0))
    sample_both(both, logits, np.array([2, 1], dtype=np.int32), positions)
    assert len(searched) == 3


def test_processed_logprobs_are_filtered_as_the_kernel_filters() -> None:
    """A sampled token is never -inf, and the kept tokens are those of torch's stages."""
    num_rows, vocab_size = 12, 500
    logits = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    logits = logits.to(DEVICE)
    filters = [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}]
    sampled = []
    for sampler_class in (FusedSampler, Sampler):
        sampler = sampler_class(num_rows, vocab_size, DEVICE, logprobs_mode="processed_logprobs")
        for slot in range(num_rows):
            temperature = 0 if slot == 7 else 0.7 + slot / 10
            own = {"temperature": temperature, "logprobs": vocab_size, **filters[slot % 5]}
            if slot == 3:
                del own["logprobs"]  # this row is sampled without a copy
            sampler.set_slot(SlotUpdate(slot, SamplingParams(**own), seed=slot))
        slots = np.arange(num_rows)
        sampled.append(sampler.sample(logits, slots, slots + 5))
    fused, plain = sampled
    assert fused.token_ids.tolist() == plain.token_ids.tolist()
    assert fused.logprob_rows.tolist() == [i for i in range(num_rows) if i != 3]
    assert fused.logprobs.token_ids.tolist() == plain.logprobs.token_ids.tolist()
    assert fused.logprobs.logprobs[:, 0].isfinite().all()
    torch.testing.assert_close(fused.logprobs.logprobs, plain.logprobs.logprobs)
    assert fused.logprobs.logprobs[1].isfinite().sum() == 5  # the token and four candidates
