"""The sampling kernel against the race of `nanoserve/sampling/gumbel_noise.py`.

Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1).
"""

import numpy as np
import pytest
import torch
from noise_kernel import KEYS, assert_noise_is_exact

from nanoserve.kernels.triton.choose_tokens import choose_tokens, pack_settings
from nanoserve.sampling.gumbel_noise import Noise, row_keys

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR_TIE = 1e-4  # the kernel's logarithms and torch's differ in their last bits


class Slots:
    """Random settings, and what they choose by torch."""

    def __init__(self, rng: np.random.Generator, num_slots: int, greedy_share: float = 0.0) -> None:
        self.temperatures = rng.uniform(0.2, 2, num_slots).astype(np.float32)
        self.temperatures[rng.random(num_slots) < greedy_share] = 0
        self.seeds = rng.integers(0, 2**64, num_slots, dtype=np.uint64)
        self.streams = rng.integers(0, 2**32, num_slots, dtype=np.uint32)

    def packed(self) -> torch.Tensor:
        rows = [
            pack_settings(float(temperature), int(seed), int(stream))
            for temperature, seed, stream in zip(
                self.temperatures, self.seeds, self.streams, strict=True
            )
        ]
        return torch.from_numpy(np.stack(rows)).to(DEVICE)

    def scores(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """What the argmax is of, in float32 on the CPU."""
        temperatures = torch.from_numpy(self.temperatures[slots]).unsqueeze(1)
        logits = logits.cpu().float()
        raced = logits / temperatures.where(temperatures > 0, torch.ones(()))  # new, and changed
        keys = row_keys(self.seeds[slots], positions, self.streams[slots])
        Noise(logits.shape[1], torch.device("cpu")).subtract_log_exponential(raced, keys)
        return torch.where(temperatures > 0, raced, logits)


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(DEVICE)


def choose(logits: torch.Tensor, temperature: float, seed: int = 0, position: int = 0) -> list[int]:
    """Every row by the same settings, at positions from `position` on."""
    rows = np.arange(len(logits))
    settings = (
        torch.from_numpy(pack_settings(temperature, seed, completion=0)).view(1, 8).to(DEVICE)
    )
    return choose_tokens(logits, on_device(0 * rows), on_device(position + rows), settings).tolist()


def assert_chosen_as_by_torch(
    logits: torch.Tensor, slots: Slots, row_slots: np.ndarray, positions: np.ndarray
) -> None:
    before = logits.clone()
    chosen = choose_tokens(logits, on_device(row_slots), on_device(positions), slots.packed())
    assert torch.equal(logits, before)
    assert chosen.dtype == torch.int64
    scores = slots.scores(logits, row_slots, positions)
    differ = chosen.cpu() != scores.argmax(dim=1)
    first, second = scores.topk(2, dim=1).values.unbind(dim=1)
    assert not (differ & (first - second >= NEAR_TIE)).any()
    assert differ.sum() <= 2


@pytest.mark.small(vocab_size=[7, 3000])
@pytest.mark.parametrize(
    ("vocab_size", "num_rows"), [(7, 500), (64, 400), (1000, 500), (2500, 300), (3000, 300)]
)
def test_draws_are_those_of_the_race(vocab_size: int, num_rows: int, full_size: bool) -> None:
    rng, num_rows = np.random.default_rng(vocab_size), num_rows if full_size else num_rows // 10
    torch.manual_seed(vocab_size)
    logits = 3 * torch.randn(num_rows, vocab_size, device=DEVICE)
    assert_chosen_as_by_torch(
        logits,
        Slots(rng, num_slots=64),
        rng.integers(0, 64, num_rows),
        rng.integers(0, 2**20, num_rows),
    )


@pytest.mark.small(dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_and_random_rows_share_a_step_of_several_parts(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    torch.manual_seed(1)
    wide = 3 * torch.randn(24, 10_000, device=DEVICE)
    logits = wide.to(dtype)[:, 16:9_016]  # three parts, the last one ragged; rows apart
    logits[rng.random(logits.shape) < 0.3] = -torch.inf
    slots = Slots(rng, num_slots=32, greedy_share=0.5)
    row_slots = rng.permutation(32)[:24]
    assert 0 < (slots.temperatures[row_slots] > 0).sum() < 24
    assert_chosen_as_by_torch(logits, slots, row_slots, rng.integers(0, 2**20, 24))


def test_random_rows_draw_nothing_below_their_border() -> None:
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.standard_normal((40, 6_000))).float().to(DEVICE)
    slots = Slots(rng, num_slots=40, greedy_share=0.2)
    positions = rng.integers(0, 2**20, 40)
    borders = torch.from_numpy(rng.choice([-np.inf, 0.0, 1.0, 4.0], 40)).float()
    is_random = torch.from_numpy(slots.temperatures > 0)
    largest = logits.cpu().amax(dim=1) / torch.from_numpy(slots.temperatures)
    borders = torch.minimum(borders, largest)  # never above all of a row

    rows = on_device(np.arange(40))
    chosen = choose_tokens(logits, rows, on_device(positions), slots.packed(), borders.to(DEVICE))
    scores = slots.scores(logits, np.arange(40), positions)
    quotients = logits.cpu() / torch.from_numpy(slots.temperatures).unsqueeze(1)
    is_below = is_random.unsqueeze(1) & (quotients < borders.unsqueeze(1))
    assert is_below.any()
    assert chosen.tolist() == scores.masked_fill(is_below, -torch.inf).argmax(dim=1).tolist()


@pytest.mark.small(key=KEYS[-1:])
@pytest.mark.parametrize("key", KEYS)
def test_noise_is_exact_to_a_millionth(key: int) -> None:
    assert_noise_is_exact(key, DEVICE)


@pytest.mark.parametrize("vocab_size", [5, 300, 9_000])
def test_of_equal_logits_a_greedy_row_takes_the_lowest_id(vocab_size: int) -> None:
    logits = torch.zeros(3, vocab_size, device=DEVICE)
    logits[1, 3:] = 1
    logits[2, [vocab_size - 2, vocab_size - 1]] = 1
    assert choose(logits, temperature=0.0) == [0, 3, vocab_size - 2]


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0, 100.0])
def test_a_single_finite_logit_always_wins(temperature: float) -> None:
    logits = torch.full((20, 5_000), -torch.inf, device=DEVICE)
    only = [(997 * row) % 5_000 for row in range(20)]
    logits[range(20), only] = -50.0
    assert choose(logits, temperature, position=100) == only


@pytest.mark.small(dtype=[torch.float32], vocab_size=[5, 9_000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 5, 4_100, 9_000])
def test_nothing_is_chosen_where_the_best_score_is_no_finite_number(
    vocab_size: int, dtype: torch.dtype, temperature: float
) -> None:
    """Wherever it is: at both ends, at the border of two parts, beside the padding."""
    logits = torch.randn(8, vocab_size, device=DEVICE).to(dtype)
    healthy = choose(logits, temperature)
    places = torch.tensor([0, vocab_size // 2, min(4_095, vocab_size - 1), vocab_size - 1])
    logits[[0, 2, 4, 6], places] = torch.nan
    logits[[1, 5], places[:2]] = torch.inf
    assert choose(logits, temperature) == [-1, -1, -1, healthy[3], -1, -1, -1, healthy[7]]
    logits[:] = -torch.inf
    logits[1, -1] = torch.nan
    logits[2, -1] = -1000.0
    assert choose(logits, temperature)[:3] == [-1, -1, vocab_size - 1]


def test_each_part_of_the_settings_changes_the_draws() -> None:
    logits = torch.zeros(24, 1_000, device=DEVICE)
    rows = np.arange(24)
    draws = set()
    for seed, stream in ((5, 0), (5 + 2**32, 0), (5, 1), (5, 2**32 - 1)):
        settings = torch.from_numpy(pack_settings(1.0, seed, stream)).view(1, 8).to(DEVICE)
        chosen = choose_tokens(logits, on_device(0 * rows), on_device(rows), settings)
        draws.add(tuple(chosen.tolist()))
        assert len(set(chosen.tolist())) > 12  # positions, too
    assert len(draws) == 4


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**63, 2**64 - 1, 2**64 + 7])
def test_packed_settings_unpack(seed: int) -> None:
    packed = pack_settings(0.7, seed, completion=2**32 - 1, top_k=2**31 - 1, top_p=0.9, min_p=0.01)
    assert packed.dtype == np.int32
    temperature, low, high, stream, top_k, top_p, min_p, _ = packed.view(np.uint32)
    assert temperature.view(np.float32) == np.float32(0.7)
    assert int(low) + (int(high) << 32) == seed % 2**64
    assert stream == 2**32 - 1
    assert top_k == 2**31 - 1
    assert top_p.view(np.float32) == np.float32(0.9)
    assert min_p.view(np.float32) == np.float32(0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(7)}, "logits"),
        ({"logits": torch.zeros(2, 0)}, "logits"),
        ({"logits": torch.zeros(7, 2).T}, "logits"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions"),
        ({"settings": torch.zeros(2, 4, dtype=torch.int32)}, "settings"),
        ({"settings": torch.zeros(2, 8)}, "settings"),
        ({"borders": torch.zeros(1)}, "borders"),
        ({"borders": torch.zeros(2, dtype=torch.bfloat16)}, "borders"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(change: dict, message: str) -> None:
    arguments = {
        "logits": torch.zeros(2, 7),
        "slots": torch.zeros(2, dtype=torch.int32),
        "positions": torch.zeros(2, dtype=torch.int32),
        "settings": torch.zeros(2, 8, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        choose_tokens(**(arguments | change))
