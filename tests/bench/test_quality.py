"""benchmarks/quality.py: which schemes it asks, and how far distributions are apart."""

import math
from itertools import product

import pytest
from quality import SCHEMES, divergence

from nanoserve.config import EngineConfig


def test_every_width_of_weights_is_asked_with_every_cache() -> None:
    asked = {
        (s.get("quantization"), s.get("quantization_group_size"), s.get("kv_cache_dtype", "auto"))
        for s in SCHEMES.values()
    }
    weights = [(None, None), ("int8", None), *(("int4", size) for size in (32, 64, 128))]
    pairs = product(weights, ("auto", "int8", "fp8"))
    assert {(*weight, cache) for weight, cache in pairs} == asked
    for scheme in SCHEMES.values():
        EngineConfig("none", **{name: value for name, value in scheme.items() if name != "gguf"})


def test_the_divergence_is_kullbacks_and_leiblers() -> None:
    p, q = {0: math.log(0.75), 1: math.log(0.25)}, {1: math.log(0.5), 0: math.log(0.5)}
    assert divergence(p, p) == 0
    assert divergence(p, q) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
