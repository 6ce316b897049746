"""Chapter 1's numbers, by hand and by nanoserve/cli/bench/roofline.py."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.roofline import Need, Step
from nanoserve.cli.bench.shapes import SHAPES

from . import worked as serving

GIB, PER_TOKEN = 2**30, 524_288  # LLaMA-2-7B: half a MiB
LLAMA_2_7B = 6_738_415_616


def test_users_of_4096_reserved_tokens() -> None:
    assert serving.users_reserved(64 * GIB, PER_TOKEN, 4096) == 32


def test_users_of_300_tokens_in_blocks() -> None:
    assert serving.users_paged(64 * GIB, PER_TOKEN, 300, 16) == 431  # 436 to the token
    assert serving.users_paged(64 * GIB, PER_TOKEN, 4096, 16) == 32


def test_the_pieces_of_a_text_are_those_that_the_engine_computes() -> None:
    text = "What is preemption?"
    pieces = [piece.strip("`") for piece in serving.pieces(text).split(", ")]
    assert "".join(pieces) == text
    backend = Tokenizer.from_file(str(Path(bundled_checkpoint("tiny-qwen3")) / "tokenizer.json"))
    assert [backend.decode([i]) for i in backend.encode(text).ids] == pieces


def test_what_a_reservation_leaves_empty() -> None:
    assert serving.unused_share(4096, 100) == pytest.approx(0.97559, abs=1e-5)
    assert serving.unused_share(4 * 2048, 380) == pytest.approx(0.95361, abs=1e-5)


def test_weights_of_7_billion_parameters() -> None:
    for dtype_bytes, gigabytes in ((4, 28), (2, 14), (1, 7), (0.5, 3.5)):
        assert serving.weight_bytes(7_000_000_000, dtype_bytes) == gigabytes * 1e9
    assert serving.weight_bytes(LLAMA_2_7B, 2) == 13_476_831_232


def test_a_decode_step_waits_for_memory() -> None:
    assert serving.decode_seconds(1, 14e9, 0.5e9, 2e12) == pytest.approx(7.25e-3)
    assert serving.decode_seconds(32, 14e9, 0.5e9, 2e12) == pytest.approx(15e-3)
    assert serving.product_seconds(LLAMA_2_7B, 1, 312e12) == pytest.approx(0.0432e-3, abs=1e-7)


def test_a_batch_gains_less_than_its_size() -> None:
    assert serving.batching_gain(1, 14e9, 0.5e9) == 1
    assert serving.batching_gain(32, 14e9, 0.5e9) == pytest.approx(15.467, abs=1e-3)
    assert serving.batching_limit(14e9, 0.5e9) == pytest.approx(29)
    assert serving.batching_gain(10**9, 14e9, 0.5e9) == pytest.approx(29, abs=1e-6)


def test_the_table_of_batches() -> None:
    table = serving.batching_table([1, 32], 14e9, 0.5e9, LLAMA_2_7B, 2e12, 312e12).splitlines()
    assert table[2] == "| 1 | 14.5 GB | 7.25 | 0.04 | 138 | 1.0 x |"
    assert table[3] == "| 32 | 30.0 GB | 15.00 | 1.38 | 2,133 | 15.5 x |"


def test_intensities_and_ridges() -> None:
    assert serving.weight_intensity(1000, 2) == 1000
    assert serving.attention_intensity(1, 2) == 1 and serving.attention_intensity(8, 2) == 8
    ridges = [line.split("|")[4].strip() for line in serving.ridge_table().splitlines()[2:]]
    assert ridges == ["156 FLOP/byte", "295 FLOP/byte", "206 FLOP/byte"]


@pytest.mark.parametrize(("users", "context"), [(1, 1000), (32, 300)])
def test_our_roofline_counts_the_same(users: int, context: int) -> None:
    """Except for the norms, which it omits, and the embedding rows, which the chapter omits."""
    need = Need(ModelConfig.from_hf(SHAPES["qwen3-0.6b"], {}, "bfloat16"))
    step = Step(np.ones(users, dtype=int), np.full(users, context), users)
    bandwidth, parameters, per_token = 4.8e12, 596_049_920, 114_688
    found = serving.decode_seconds(users, parameters * 2, per_token * context, bandwidth)
    assert found == pytest.approx(need.bytes(step) / bandwidth, rel=1e-3)
    products = serving.product_seconds(parameters, users, 1.0)
    attention = 2 * 2 * 28 * 16 * 128 * users * context
    assert products + attention == pytest.approx(need.operations(step), rel=1e-3)


def test_attention_intensity_is_what_our_roofline_adds_per_token_of_context() -> None:
    need = Need(ModelConfig.from_hf(SHAPES["qwen3-0.6b"], {}, "bfloat16"))
    short, long = (Step(np.ones(1, dtype=int), np.array([n]), 1) for n in (100, 1100))
    operations = need.operations(long) - need.operations(short)
    num_bytes = need.bytes(long) - need.bytes(short)
    assert operations / num_bytes == serving.attention_intensity(16 // 8, 2)
