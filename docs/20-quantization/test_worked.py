"""Numbers of chapter 20, against a count by hand, other computations and the engine."""

import math
import random

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.quantization.online import quantize_int8

from . import worked


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_reading_the_weights_once() -> None:
    # 16 GB at 2 TB/s; 8 GB; 8e9 x 4.125 / 8 bytes.
    assert cells(worked.reading_table("A100"))[1] == [
        "Llama-3.1-8B",
        "8.00 ms",
        "4.00 ms",
        "2.06 ms",
    ]
    assert cells(worked.reading_table("H100"))[2][1] == "41.79 ms"  # 140 GB at 3.35 TB/s


def test_products_in_16_bits_gain_nothing_in_large_batches() -> None:
    # 16 GFLOP per token: 256 of them 4.096 TFLOP, 13.13 ms at 312 TFLOP/s, 6.56 at 624.
    assert cells(worked.batch_table([1, 64, 256], "Llama-3.1-8B", "A100")) == [
        ["1", "8.00 ms", "2.06 ms", "4.00 ms"],
        ["64", "8.00 ms", "3.28 ms", "4.00 ms"],
        ["256", "13.13 ms", "13.13 ms", "6.56 ms"],
    ]
    assert worked.last_gain("Llama-3.1-8B", "A100") == 156  # 312 TFLOP/s over 2 TB/s
    assert worked.last_gain("Llama-3.1-8B", "H100") == 296  # 989 over 3.35 is 295.2
    for tokens, gains in ((155, True), (156, False)):
        plain, four = (
            worked.step_ms(tokens, "Llama-3.1-8B", bits, "bf16", "A100") for bits in (16, 4)
        )
        assert (four < plain) == gains, tokens
    assert "fp8" not in worked.GPUS["A100"].rates


def test_bits_per_weight() -> None:
    bits = {name: float(value) for name, value in cells(worked.bits_table())}
    assert bits["GGUF Q8_0"] == 8.5  # 32 bytes and a scale of two
    assert bits["GGUF Q4_0"] == 4.5  # 16 bytes and a scale of two
    # 128 bytes of codes, 12 of 16 integers of 6 bits, two float16: for 256 values.
    assert bits["GGUF Q4_K"] == 8 * (128 + 16 * 6 / 8 + 4) / 256 == 4.5
    assert worked.gguf_bits("Q6_K") == 8 * (128 + 64 + 16 + 2) / 256
    assert bits["int4, groups of 128, scales of 16 bits"] == 4.125
    assert bits["the same with zero points of 4 bits (GPTQ, AWQ)"] == pytest.approx(4.156, abs=1e-3)
    assert bits["NF4 with nested scales: 8 bits, and 32 for 256 of them"] == 4.127  # QLoRA's 0.127


def test_symmetric_codes_by_hand() -> None:
    assert cells(worked.symmetric_table([0.62, -0.2, 0.05, -1.4], 7)) == [
        ["0.62", "3.10", "3", "0.60", "0.02"],
        ["-0.2", "-1.00", "-1", "-0.20", "0.00"],
        ["0.05", "0.25", "0", "0.00", "0.05"],
        ["-1.4", "-7.00", "-7", "-1.40", "0.00"],
    ]


def test_a_symmetric_error_is_at_most_half_a_scale() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        values = [rng.gauss(0, 1) for _ in range(20)]
        scale, _, back = worked.symmetric(values, rng.choice([7, 127]))
        errors = [abs(x - y) for x, y in zip(values, back, strict=True)]
        assert max(errors) <= scale * 0.5000001, values


def test_zero_points_by_hand() -> None:
    """[-1, 3]: a step is 4 / 255, and 0 is 63.75 steps above the lower end."""
    assert worked.affine_scale(-1, 3) == 4 / 255
    assert worked.affine_zero(-1, 3) == 64
    assert cells(worked.affine_table([-1.0, 0.0, 3.0])) == [
        ["-1.0", "0", "-1.004", "0", "64.000"],
        ["0.0", "64", "0.000", "0", "64.000"],
        ["3.0", "255", "2.996", "0", "64.000"],
    ]
    assert (
        worked.wrong_code(70.0, 4 / 255, 64) == 255
    )  # all values that it can represent are above 64


def test_an_asymmetric_error_is_at_most_a_scale_at_the_ends_and_half_of_one_within() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        low, high = -rng.random() * 5, rng.random() * 5
        scale, zero = worked.affine_parameters(low, high)
        for x in (low, 0.0, high, rng.uniform(low, high)):
            back = (worked.affine_code(x, scale, zero) - zero) * scale
            inside = -zero * scale <= x <= (255 - zero) * scale
            assert abs(back - x) <= scale * (0.5000001 if inside else 1.0000001), (low, high, x)
        assert worked.affine_code(0.0, scale, zero) == zero


def test_a_files_codes_and_the_engines() -> None:
    rows = cells(worked.canonical_table([0, 5, 8, 15], zero=5, scale=0.5))
    for code, _, own, means, weight in rows:
        assert float(weight) == (int(code) - 5) * 0.5 == int(own) * 0.5 + 1.5
        assert int(own) == int(code) - 8 and means.endswith("+ 1.5")


def test_all_values_of_e4m3() -> None:
    """1 bit of sign, 4 of exponent with a bias of 7, 3 of mantissa; the last pattern is NaN."""
    positive = [m * 2.0**-9 for m in range(8)]
    positive += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
    assert worked.e4m3_values() == sorted({*positive, *(-x for x in positive)})
    assert worked.e4m3_count() == 253
    assert worked.e4m3_largest() == 448 == 1.75 * 2**8
    assert cells(worked.e4m3_table([2.0**-9, 1.0, 256.0])) == [
        ["0.001953", "0.003906", "50.0%"],
        ["1", "1.125", "6.2%"],
        ["256", "288", "6.2%"],
    ]


def test_bytes_of_k_and_v_equal_the_engines() -> None:
    config = ModelConfig.from_checkpoint(bundled_checkpoint("tiny-qwen3"))
    for name, in_8_bits in (("auto", False), ("int8", True), ("fp8", True)):
        assert worked.kv_token_bytes(6, 2, 32, in_8_bits) == config.kv_bytes_per_token(name)
    assert worked.kv_token_bytes(28, 8, 128, in_8_bits=False) == 112 * 1024
    assert worked.kv_token_bytes(28, 8, 128, in_8_bits=True) == 2 * 28 * 8 * 132


def test_an_outlier_increases_the_error_of_all_values_that_share_its_scale() -> None:
    rows = cells(worked.granularity_table())
    errors = [[float(cell.rstrip("%")) for cell in row[1:]] for row in rows]
    for finer, coarser in zip(errors[1:], errors, strict=False):
        assert all(a < b for a, b in zip(finer, coarser, strict=True))
    assert all(row[0] < row[1] and row[2] < row[3] for row in errors)
    assert errors[0][3] == 100  # code 0 for all values but the outlier
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    expected = quantize_int8(weight).dequantize()
    torch.testing.assert_close(worked.rounded(weight, 50, 127), expected)


def test_smoothing_moves_the_difficulty() -> None:
    """Half is best; with the whole range moved, the weights are as bad as the activations were."""
    errors = {s: worked.smoothing_error(s) for s in (None, 0.25, 0.5, 0.75, 1.0)}
    assert min(errors, key=errors.get) == 0.5
    assert errors[None] > 4 * errors[0.5] and errors[1.0] > 4 * errors[0.5]


def test_the_second_weight_compensates_for_the_first() -> None:
    """It becomes the best integer, given the first."""
    for seed in range(50):
        rng = random.Random(seed)
        weights, correlation = (rng.uniform(-3, 3), rng.uniform(-3, 3)), rng.uniform(-1, 1)
        nearest, corrected = worked.two_weights(weights, correlation)
        assert nearest == [round(weights[0]), round(weights[1])]

        errors = {
            second: worked.output_error(weights, [corrected[0], second], correlation)
            for second in range(-8, 9)
        }
        assert corrected[1] == min(errors, key=errors.get), (weights, correlation)


def test_two_weights_by_hand() -> None:
    # (-.4, -.4): .16 + .16 + 2 x .9 x .16; (-.4, +.6): .16 + .36 - 2 x .9 x .24.
    assert cells(worked.gptq_table((0.4, 0.4), 0.9)) == [
        ["each to its nearest", "[0, 0]", "0.608"],
        ["the second compensates for the first", "[0, 1]", "0.088"],
    ]


def test_the_exact_distributions_equal_the_engines() -> None:
    prompt = worked._prompts()[0][0].tolist()
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3)
    options = {"dtype": "float32", "attention_backend": "torch", "num_kv_blocks": 64}
    with LLM("tiny-qwen3", **options) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    exact = worked._exact_log_probabilities()
    for position, found in enumerate(output.prompt_logprobs[1:]):
        for token, entry in found.items():
            assert math.isclose(entry.logprob, exact[position, token], abs_tol=1e-3), position


@pytest.mark.size("full")  # the numbers of all schemes, as on the page
def test_fewer_bits_and_coarser_scales_cost_more() -> None:
    assert worked.num_positions() == 400
    rows = {scheme: worked.quality(scheme) for scheme in worked.SCHEMES}
    errors, divergences, shares = zip(*rows.values(), strict=True)
    assert list(errors) == sorted(errors) and list(divergences) == sorted(divergences)
    assert shares[0] > 0.99 and shares[-1] < 0.95
    # The weights are restored, so the log-probabilities are the same as before.
    torch.testing.assert_close(worked._log_probabilities(), worked._exact_log_probabilities())
    rows = cells(worked.quality_table())
    assert [row[0] for row in rows] == list(worked.SCHEMES)
    assert rows[0][2] == "1.3e-4" == worked.divergence("int8, a scale per row")
    # Errors are uniform within half a scale of 0: their root mean square is scale / sqrt(12).
    weight = worked._weights()["model.layers.0.mlp.gate_proj.weight"]
    scale = quantize_int8(weight).scale
    expected = (scale.square().mean() / 12 / weight.square().mean()).sqrt()
    found = worked.relative_error(weight, quantize_int8(weight).dequantize())
    assert found == pytest.approx(float(expected), rel=0.02)
