"""Numbers of chapter 20: formats and their cost, computed by the engine's own quantization code.

Errors and divergences are those of the bundled model's weights. Times are lower bounds from data
sheets: weights are read once per step; K and V, attention and launches are not counted.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
from tables import table
from torch import Tensor, nn

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.formats.packed import affine_matrix
from nanoserve.checkpoint.gguf.container import BLOCKS
from nanoserve.models.quantization.online import quantize_fp8, quantize_int4, quantize_int8
from training.corpus import evaluation_sets


class GPU(NamedTuple):
    """Bytes and dense operations per second, from NVIDIA's data sheets."""

    bandwidth: float
    rates: dict[str, float]  # of matrix products, by the type of both operands


GPUS = {
    "A100": GPU(2.0e12, {"bf16": 312e12, "int8": 624e12}),
    "H100": GPU(3.35e12, {"bf16": 989e12, "int8": 1979e12, "fp8": 1979e12}),
}
PARAMETERS = {"Qwen3-0.6B": 0.6e9, "Llama-3.1-8B": 8e9, "Llama-3.1-70B": 70e9}
_GROUP_OF_128 = 4 + 16 / 128  # bits of a weight, and its share of a scale in 16 bits


# ---------------------------------------------------------------- bytes and time


def reading_ms(model: str, bits: float, gpu: str) -> float:
    """The time for reading all weights once: no decode step is shorter."""
    return 1e3 * PARAMETERS[model] * bits / 8 / GPUS[gpu].bandwidth


def reading_table(gpu: str) -> str:
    """The time for reading all weights in 16, 8 and 4 bits, the last in groups of 128."""
    rows = [
        (model, *(f"{reading_ms(model, bits, gpu):.2f} ms" for bits in (16, 8, _GROUP_OF_128)))
        for model in PARAMETERS
    ]
    return table(("model", "bf16", "8 bits", "4 bits, groups of 128"), rows)


def step_ms(tokens: int, model: str, bits: float, operands: str, gpu: str) -> float:
    """The time of a step: reading the weights or multiplying them, whichever is longer."""
    computing = 2e3 * PARAMETERS[model] * tokens / GPUS[gpu].rates[operands]
    return max(reading_ms(model, bits, gpu), computing)


def batch_table(batches: list[int], model: str, gpu: str) -> str:
    """Steps of growing batches: fewer bytes with products in 16 bits help only while the step is
    memory-bound."""
    schemes = [(16, "bf16"), (_GROUP_OF_128, "bf16"), (8, "int8")]
    rows = [
        (tokens, *(f"{step_ms(tokens, model, *scheme, gpu):.2f} ms" for scheme in schemes))
        for tokens in batches
    ]
    return table(("tokens in the step", "bf16", "4 bits, products in bf16", "W8A8 in int8"), rows)


def last_gain(model: str, gpu: str) -> int:
    """Tokens of a step from which on weights of fewer bits, multiplied in bf16, gain nothing: then
    computing takes as long as reading 16 bits."""
    seconds_per_token = 2 * PARAMETERS[model] / GPUS[gpu].rates["bf16"]
    return math.ceil(reading_ms(model, 16, gpu) / 1e3 / seconds_per_token)


def bits_table() -> str:
    """Bits per weight with its share of the scales; scales per row are for rows of 4,096 inputs."""
    rows = [
        ("int8 or fp8, a scale of 32 bits per row", 8 + 32 / 4096),
        ("int4, groups of 128, scales of 16 bits", 4 + 16 / 128),
        ("the same with zero points of 4 bits (GPTQ, AWQ)", 4 + (16 + 4) / 128),
        ("int4, groups of 32, scales of 16 bits", 4 + 16 / 32),
        ("NF4, blocks of 64, scales of 32 bits", 4 + 32 / 64),
        ("NF4 with nested scales: 8 bits, and 32 for 256 of them", 4 + 8 / 64 + 32 / 64 / 256),
        *((f"GGUF {kind}", gguf_bits(kind)) for kind in ("Q8_0", "Q6_K", "Q4_K", "Q4_0")),
    ]
    return table(("format", "bits per weight"), [(name, f"{bits:.3f}") for name, bits in rows])


def gguf_bits(kind: str) -> float:
    """Bits per value, from the table with which the engine reads such files."""
    values, octets = BLOCKS[kind]
    return 8 * octets / values


# ---------------------------------------------------------------- the formulas, by hand


def symmetric(values: list[float], largest_code: int) -> tuple[float, list[int], list[float]]:
    """Scale, codes, and the values that the codes represent."""
    scale = max(map(abs, values)) / largest_code
    codes = [max(-largest_code, min(largest_code, round(x / scale))) for x in values]
    return scale, codes, [code * scale for code in codes]


def symmetric_table(values: list[float], largest_code: int) -> str:
    scale, codes, back = symmetric(values, largest_code)
    rows = [
        (x, f"{x / scale:.2f}", code, f"{y:.2f}", f"{abs(x - y):.2f}")
        for x, code, y in zip(values, codes, back, strict=True)
    ]
    return table(("x", "x / scale", "code", "code x scale", "error"), rows)


def affine_parameters(low: float, high: float, codes: int = 256) -> tuple[float, int]:
    """Scale and zero point that map [low, high], which contains 0, to the codes from 0 on."""
    scale = (high - low) / (codes - 1)
    return scale, round(-low / scale)


def affine_code(x: float, scale: float, zero: int, codes: int = 256) -> int:
    return max(0, min(codes - 1, round(x / scale) + zero))


def wrong_code(x: float, scale: float, zero: int, codes: int = 256) -> int:
    """A formula that is often printed: it uses an integer in place of a real number."""
    return max(0, min(codes - 1, round((x - zero) / scale)))


def affine_table(values: list[float]) -> str:
    """Both formulas on values between the first and the last of them."""
    scale, zero = affine_parameters(values[0], values[-1])
    rows = []
    for x in values:
        code, wrong = affine_code(x, scale, zero), wrong_code(x, scale, zero)
        back, wrong_back = (code - zero) * scale, wrong * scale + zero
        rows.append((x, code, f"{back:.3f}", wrong, f"{wrong_back:.3f}"))
    wrong_heads = ("round((x - zero) / scale)", "back")
    return table(("x", "round(x / scale) + zero", "back", *wrong_heads), rows)


def affine_scale(low: float, high: float) -> float:
    return affine_parameters(low, high)[0]


def affine_zero(low: float, high: float) -> int:
    return affine_parameters(low, high)[1]


def canonical_table(codes: list[int], zero: int, scale: float) -> str:
    """Unsigned 4-bit codes of a file, and the engine's canonical form of them."""
    matrix = affine_matrix(
        torch.tensor([codes], dtype=torch.uint8),
        torch.tensor([[zero]], dtype=torch.uint8),
        torch.tensor([[scale]]),
        4,
        None,
    )
    offset = 0.0 if matrix.offset is None else matrix.offset.item()
    rows = [
        (code, f"({code} - {zero}) x {scale}", own, f"{own} x {scale} + {offset}", weight)
        for code, own, weight in zip(
            codes, matrix.codes[0].tolist(), matrix.dequantize()[0].tolist(), strict=True
        )
    ]
    return table(("in the file", "means", "canonical code", "means", "weight"), rows)


def e4m3_values() -> list[float]:
    """All finite values of the format, each once, ascending."""
    patterns = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return sorted(set(patterns[patterns.isfinite()].tolist()))


def e4m3_largest() -> float:
    return e4m3_values()[-1]


def e4m3_count() -> int:
    return len(e4m3_values())


def e4m3_table(values: list[float]) -> str:
    """The successors of some values, and half the distance relative to the value."""
    known = e4m3_values()
    rows = []
    for x in values:
        above = known[known.index(x) + 1]
        rows.append((f"{x:.4g}", f"{above:.4g}", f"{(above - x) / 2 / x:.1%}"))
    return table(("value", "the next one", "largest error between them"), rows)


def kv_token_bytes(layers: int, kv_heads: int, head_dim: int, in_8_bits: bool) -> int:
    """Bytes of K and V of a token: two per value, or one and a scale of four for each head."""
    head = head_dim + 4 if in_8_bits else 2 * head_dim
    return 2 * layers * kv_heads * head


# ---------------------------------------------------------------- rounding errors


def rounded(weight: Tensor, size: int | None, largest_code: int) -> Tensor:
    """The nearest values with one symmetric scale per `size` inputs; None: one for the matrix."""
    groups = weight.reshape(1, -1) if size is None else weight.reshape(-1, size)
    scale = groups.abs().amax(dim=1, keepdim=True) / largest_code
    return ((groups / scale).round() * scale).view_as(weight)


def relative_error(exact: Tensor, other: Tensor) -> float:
    """Norm of the error, divided by that of the exact values."""
    exact, other = exact.double(), other.double()
    return float((exact - other).norm() / exact.norm())


def granularity_table() -> str:
    """Relative errors of the bundled model's `gate_proj` in layer 0, as it is and with one weight
    of its first row set to twenty times the largest."""
    plain = _weights()["model.layers.0.mlp.gate_proj.weight"]
    spoilt = plain.clone()
    spoilt[0, 0] = 20 * plain.abs().max()
    untouched = torch.ones_like(plain, dtype=torch.bool)
    untouched[0, 0] = False  # its error is as small as the others', but its norm would hide theirs
    rows = []
    for name, size in (("the matrix", None), ("a row of 192", 192), ("a group of 64", 64)):
        cells = [
            relative_error(weight[untouched], rounded(weight, size, code)[untouched])
            for code in (127, 7)
            for weight in (plain, spoilt)
        ]
        rows.append((name, *(f"{cell:.2%}" for cell in cells)))
    head = ("a scale for", "8 bits", "8 bits, one outlier", "4 bits", "4 bits, one outlier")
    return table(head, rows)


def _outlier_case() -> tuple[Tensor, Tensor]:
    """Activations [64, 128], of which one channel is sixty times the others, and weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator, dtype=torch.float64)
    x[:, 5] *= 60
    return x, torch.randn(96, 128, generator=generator, dtype=torch.float64)


def smoothing_error(strength: float | None) -> float:
    """Error of x W^T with both in 8 bits, with channels divided by a factor in x and multiplied by
    it in W (SmoothQuant). The factor is the maximum of x to the power of `strength`, divided by the
    maximum of W to the power of 1 - `strength`. None leaves both unchanged.
    """
    x, weight = _outlier_case()
    factor = torch.ones(x.shape[1])
    if strength is not None:
        factor = x.abs().amax(dim=0) ** strength / weight.abs().amax(dim=0) ** (1 - strength)
    smooth, matched = x / factor, weight * factor
    product = rounded(smooth, 128, 127) @ rounded(matched, 128, 127).T
    return relative_error(x @ weight.T, product)


def two_weights(weights: tuple[float, float], correlation: float) -> tuple[list[int], list[int]]:
    """Two weights rounded to integers: each to its nearest, and as in GPTQ, where the second is
    first corrected for the error of the first one. Inputs have variance 1."""
    first = round(weights[0])
    corrected = weights[1] + (weights[0] - first) * correlation
    return [first, round(weights[1])], [first, round(corrected)]


def output_error(weights: tuple[float, float], codes: list[int], correlation: float) -> float:
    """Mean square error of the output."""
    a, b = (code - weight for code, weight in zip(codes, weights, strict=True))
    return a * a + b * b + 2 * correlation * a * b


def gptq_table(weights: tuple[float, float], correlation: float) -> str:
    names = ("each to its nearest", "the second compensates for the first")
    rows = [
        (name, str(codes), f"{output_error(weights, codes, correlation):.3f}")
        for name, codes in zip(names, two_weights(weights, correlation), strict=True)
    ]
    return table(("rounding", "codes", "mean square error of the output"), rows)


# ---------------------------------------------------------------- quality, of the bundled model

Rounding = Callable[[Tensor], Tensor]
_POSITIONS = 400


def _scheme(quantize: Callable[..., object], *arguments: int) -> Rounding:
    return lambda weight: quantize(weight, *arguments).dequantize()


# Bits: of the weights, without scales.
SCHEMES: dict[str, tuple[Rounding, int]] = {
    "int8, a scale per row": (_scheme(quantize_int8), 8),
    "fp8 (e4m3), a scale per row": (_scheme(quantize_fp8), 8),
    "int4, groups of 32": (_scheme(quantize_int4, 32), 4),
    "int4, groups of 64": (_scheme(quantize_int4, 64), 4),
    "4 bits, a scale per row": (lambda weight: rounded(weight, weight.shape[1], 7), 4),
    "4 bits, a scale per matrix": (partial(rounded, size=None, largest_code=7), 4),
}


@cache
def _model() -> nn.Module:
    """The bundled model in transformers, in float32, with untied LM head."""
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = bundled_checkpoint("tiny-qwen3")
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@cache
def _weights() -> dict[str, Tensor]:
    """The matrices that the engine quantizes: all linear layers and the LM head, no embedding."""
    linears = {
        f"{name}.weight": module.weight.detach().clone()
        for name, module in _model().named_modules()
        if isinstance(module, nn.Linear)
    }
    return linears


@cache
def _prompts() -> list[Tensor]:
    """Conversations with their correct answers, alternating between kinds of questions."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_checkpoint("tiny-qwen3"))
    found, num_positions = [], 0
    for probe in filter(None, chain.from_iterable(zip_longest(*evaluation_sets().values()))):
        messages = [*probe.messages, {"role": "assistant", "content": probe.expected}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        found.append(torch.tensor([tokenizer.encode(text, add_special_tokens=False)]))
        num_positions += found[-1].shape[1] - 1
        if num_positions >= _POSITIONS:
            break
    return found


def _log_probabilities() -> Tensor:
    """float64 [positions, vocabulary], of the token after each one, with the weights in place."""
    model, prompts = (
        _model(),
        _prompts(),
    )  # outside inference mode, or other weights could not be loaded
    with torch.inference_mode():
        rows = torch.cat([model(prompt).logits[0, :-1] for prompt in prompts])
    return rows[:_POSITIONS].double().log_softmax(dim=-1)


@cache
def quality(scheme: str) -> tuple[float, float, float]:
    """Relative error of the weights, mean KL divergence in nats, share of equal argmax tokens."""
    exact, expected = _weights(), _exact_log_probabilities()
    rounding, _ = SCHEMES[scheme]
    other = {name: rounding(weight) for name, weight in exact.items()}
    flat = [torch.cat([each.flatten() for each in group.values()]) for group in (exact, other)]
    _model().load_state_dict(other, strict=False)
    try:
        found = _log_probabilities()
    finally:
        _model().load_state_dict(exact, strict=False)
    distance = (expected.exp() * (expected - found)).sum(dim=-1).mean()
    same = int((expected.argmax(dim=-1) == found.argmax(dim=-1)).sum()) / len(expected)
    return relative_error(*flat), float(distance), same


def divergence(scheme: str) -> str:
    """In nats, formatted as in `docs/benchmarks.md`, without the zero of the exponent."""
    return f"{quality(scheme)[1]:.1e}".replace("e-0", "e-")


@cache
def _exact_log_probabilities() -> Tensor:
    return _log_probabilities()


def quality_table() -> str:
    """All schemes, weight-only: activations stay floats."""
    rows = []
    for scheme in SCHEMES:
        error, _, same = quality(scheme)
        rows.append((scheme, f"{error:.1%}", divergence(scheme), f"{same:.1%}"))
    head = ("weights", "error of the weights", "KL divergence, nats", "same first choice")
    return table(head, rows)


def num_positions() -> int:
    return len(_exact_log_probabilities())
