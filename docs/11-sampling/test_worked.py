"""Tests of the worked examples on sampling, against values computed by hand."""

from random import Random

import numpy as np
import pytest
import torch

from nanoserve.sampling.filters import apply_filters

from . import worked as sampling

FIVE = [0.40, 0.30, 0.15, 0.10, 0.05]
SEVEN = [0.40, 0.25, 0.15, 0.10, 0.05, 0.03, 0.02]
LOGITS = [2.0, 1.0, 0.5, 0.1]


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.5, [0.828, 0.112, 0.041, 0.019]),
        (1.0, [0.575, 0.211, 0.128, 0.086]),
        (2.0, [0.406, 0.246, 0.192, 0.157]),
    ],
)
def test_w16_temperature(temperature: float, expected: list[float]) -> None:
    probs = sampling.probabilities(LOGITS, temperature)
    assert probs == pytest.approx(expected, abs=5e-4)
    row = f"| {temperature:g} | {', '.join(f'{logit / temperature:g}' for logit in LOGITS)} | "
    assert row + ", ".join(f"{p:.3f}" for p in expected) in sampling.temperature_table(
        LOGITS, [temperature]
    )


def test_logits_of_a_full_step() -> None:
    assert sampling.logits_bytes(rows=256, vocab_size=151_936, dtype_bytes=4) == 155_582_464


def test_a_tail_of_one_percent_shows_in_most_texts_of_100_tokens() -> None:
    assert sampling.chance_of_a_slip(0.01, 100) == pytest.approx(0.63397, abs=1e-5)
    assert sampling.chance_of_a_slip(0.01, 1) == pytest.approx(0.01)


def test_w17a_top_k_and_w17b_top_p_renormalise() -> None:
    assert sampling.renormalised(FIVE, 3) == pytest.approx([0.4706, 0.3529, 0.1765, 0, 0], abs=1e-4)
    assert sampling.num_kept_by_top_p(FIVE, 0.9) == 4
    expected = [0.4211, 0.3158, 0.1579, 0.1053, 0]
    assert sampling.renormalised(FIVE, 4) == pytest.approx(expected, abs=1e-4)


def test_w17d_the_two_readings_differ_only_where_the_mass_equals_p() -> None:
    assert sampling.border_table(SEVEN, [0.89, 0.90, 0.91]).splitlines()[2:] == [
        "| 0.89 | 4 | 4 |",
        "| 0.90 | 4 | 5 |",
        "| 0.91 | 5 | 5 |",
    ]


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert [sampling.num_kept_by_min_p(SEVEN, m) for m in (0.25, 0.26, 1.0)] == [4, 3, 1]


@pytest.mark.parametrize(
    ("logit", "count", "settings", "expected"),
    [
        (2.5, 0, {"repetition": 1.2}, 2.0833),
        (-0.5, 0, {"repetition": 1.2}, -0.6),
        (2.5, 3, {"frequency": 0.5}, 1.0),
        (2.5, 3, {"presence": 0.5}, 2.0),
        (2.5, 0, {"frequency": 0.5, "presence": 0.5}, 2.5),
    ],
)
def test_w18_penalties(logit: float, count: int, settings: dict, expected: float) -> None:
    assert sampling.penalised(logit, count, **settings) == pytest.approx(expected, abs=1e-4)


def test_one_race_by_hand() -> None:
    """-log(1 - u) is 2.3026, 0.2231, 0.1054, 0.6931."""
    uniforms = [0.9, 0.2, 0.1, 0.5]
    assert sampling.race_winner(LOGITS, uniforms) == 2
    rows = sampling.race_table(LOGITS, uniforms).splitlines()[2:]
    assert rows[0] == "| 0 | 0.575 | 0.9 | 2.303 | 4.01 | 1.17 |"
    assert rows[2] == "| 2 | 0.128 | 0.1 | 0.105 | 0.82 | 2.75 |"
    assert [row.split("|")[5].strip() for row in rows] == ["4.01", "1.06", "0.82", "8.07"]
    assert [row.split("|")[6].strip() for row in rows] == ["1.17", "2.50", "2.75", "0.47"]


def test_the_engines_race_draws_in_proportion() -> None:
    shares = sampling.race_shares(LOGITS, 20_000)
    expected = [0.575, 0.211, 0.128, 0.086]
    chi_square = sum((s - p) ** 2 / p for s, p in zip(shares, expected, strict=True)) * 20_000
    assert chi_square < 16.27  # the 0.999 quantile with 3 degrees of freedom


def test_24_bits_tie_in_one_draw_of_221_and_32_bits_in_one_of_56_000() -> None:
    """Nearly mean / 2: 151,936 / 2^25 = 0.004528 and 151,936 / 2^33 = 0.00001769."""
    assert sampling.chance_of_a_tie(151_936, 24) == pytest.approx(0.004528, rel=0.01)
    assert sampling.chance_of_a_tie(151_936, 32) == pytest.approx(1.769e-5, rel=0.01)


def test_only_the_generators_number_changes_with_the_neighbours() -> None:
    rows = [row.split("|") for row in sampling.neighbours_table(7, 35).splitlines()[2:]]
    assert len({row[2] for row in rows}) == 3
    assert len({row[3] for row in rows}) == 1
    other = sampling.neighbours_table(8, 35).splitlines()[2].split("|")
    assert other[3] != rows[0][3]


def test_keys_of_bfloat16_are_in_the_order_of_the_values() -> None:
    assert sampling.key_of(1.0) == 0x3F80 and sampling.value_of(0x3F80) == 1.0
    values = [-np.inf, -6.0, -1.5, -0.0, 0.0, 0.5, 1.0, 1.0078125, 4.0]
    keys = [sampling.key_of(value) for value in values]
    assert keys == sorted(keys), (values, keys)
    assert [sampling.value_of(key) for key in keys] == values


def test_the_search_shown_on_the_page() -> None:
    """e^0 + e^-0.75 + ... = 2.0634: shares 0.4846, 0.2289, 0.1081, 0.0842; together 0.9059."""
    border, passes = sampling.border_search(sampling.SEARCHED, 0.9)
    assert border == sampling.found_border(0.9) == 18.25
    assert sampling.num_kept_above(border) == 4
    # From 14.125, a key below 20 - (1 - ln(0.1 / 12)): eighths above 16, sixteenths below.
    assert sampling.num_searched_keys(0.9) == (20 - 16) * 8 + (16 - 14.125) * 16 + 1
    assert sampling.num_passes(0.9) == 3
    assert sampling.border_search_table(0.9).count("\n") == sampling.num_passes(0.9) + 1
    for low, high, borders, masses in passes:
        assert low < high and list(masses) == sorted(masses, reverse=True), (low, high, masses)
        assert sampling.value_of(low) < borders[0] <= borders[1] <= borders[2], borders


def test_the_search_finds_what_a_sort_finds() -> None:
    """The values are those of bfloat16, some of them equal; the reference is our sorting filter."""
    for seed in range(40):
        random = Random(seed)
        count = random.choice([1, 2, 12, 300])
        drawn = [random.gauss(0, random.choice([0.5, 3, 20])) for _ in range(count)]
        logits = torch.tensor(drawn).bfloat16().float()
        top_p, temperature = random.choice([0.05, 0.5, 0.9, 0.99]), random.choice([0.5, 1.0, 2.0])
        border, passes = sampling.border_search(logits.tolist(), top_p, temperature)
        kept = (logits >= border).tolist()
        scaled = (logits / temperature)[None]
        apply_filters(scaled, torch.tensor([0]), torch.tensor([top_p]), torch.tensor([0.0]))
        case = f"logits {logits.tolist()}, top_p {top_p}, temperature {temperature}"
        assert kept == scaled[0].isfinite().tolist(), case
        assert border in logits.tolist() or not passes, case
        assert len(passes) <= 8, case


def test_a_pass_gains_two_bits() -> None:
    """Of 5 keys, widths 4: trials at 1, 2 and 3 leave 1, 1, 1 or 2 keys."""
    assert [sampling.most_passes(n) for n in (1, 2, 4, 5, 16, 17)] == [0, 1, 1, 2, 2, 3]
    assert sampling.most_passes(2**16) == 8
    assert sampling.most_passes(2**32) == 16
    for logits in ([0.0, 1.0, 2.0], list(sampling.SEARCHED)):
        for top_p in (0.1, 0.5, 0.9, 0.999):
            _, passes = sampling.border_search(logits, top_p)
            keys = passes[0].high - passes[0].low + 1
            assert len(passes) <= sampling.most_passes(keys), (logits, top_p)


def test_what_is_searched_of_a_large_vocabulary() -> None:
    """20 - 1 - ln(1,519,360) = 4.77: 103 values of bfloat16 up to 8, 128 up to 16, 32 up to 20."""
    assert sampling.keys_to_search(20, 0.9, 151_936) == pytest.approx(103 + 128 + 32, abs=3)
    searched = sampling.border_search(sampling.SEARCHED, 0.9)[1][0]
    assert sampling.keys_to_search(20, 0.9, 12) == searched.high - searched.low + 1
