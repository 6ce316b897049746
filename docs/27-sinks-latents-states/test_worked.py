"""Chapter 27's numbers against arithmetic by hand, transformers' functions, and the engine."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from nanoserve.attention.interface import AttentionLayer
from nanoserve.attention.torch import _explicit_attention

from . import scenario, worked

NEXT, DENSE = "Qwen3-Next-80B-A3B", "Qwen3.5-27B"
TILES = [[(1.0, 10.0), (3.0, 20.0)], [(2.0, 30.0), (4.0, -10.0)]]


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


# ---------------------------------------------------------------- what a sequence takes


def test_bytes_of_a_token_by_hand() -> None:
    by_hand = {
        "Qwen3-30B-A3B": 48 * 2 * 4 * 128 * 2,
        "gpt-oss-20b": 24 * 2 * 8 * 64 * 2,
        "DeepSeek-V2-Lite": 27 * (512 + 64) * 2,
        "DeepSeek-V3": 61 * (512 + 64) * 2,
        NEXT: 12 * 2 * 2 * 256 * 2,
        DENSE: 16 * 2 * 4 * 256 * 2,
    }
    assert {name: worked.token_bytes(name) for name in by_hand} == by_hand
    # Of each value head 128 x 128, of each channel of q, k and v three numbers, in float32.
    assert worked.state_bytes(NEXT) == 36 * 4 * (32 * 128**2 + 3 * (2 * 16 + 32) * 128)
    assert worked.state_bytes(DENSE) == 48 * 4 * (48 * 128**2 + 3 * (2 * 16 + 48) * 128)


def test_what_a_sequence_takes() -> None:
    assert worked.sequence_bytes("DeepSeek-V3", 1024) == 1024 * 70_272
    assert worked.sequence_bytes(NEXT, 1000) == 1008 * 24_576 + worked.state_bytes(NEXT)
    # The window of 128 begins within a block, so that it and the new token lie in nine.
    assert worked.sequence_bytes("gpt-oss-20b", 131_072) == (131_072 + 9 * 16) * 24_576
    assert worked.sequence_bytes("gpt-oss-20b", 100) == 2 * 112 * 24_576
    rows = {row[0]: row[2:] for row in cells(worked.memory_table([1024, 131_072]))}
    assert rows["Qwen3-30B-A3B"] == ["98,304", "", "96 MiB", "12,288 MiB"]
    assert rows[NEXT] == ["24,576", "75.4 MiB", "99 MiB", "3,147 MiB"]


# ---------------------------------------------------------------- sinks


def attended(scores: np.ndarray, values: np.ndarray, sink: float) -> tuple[float, float]:
    """One head over keys of size one, by transformers and by the engine."""
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor(scores), torch.tensor(values)
    k, v = (x.float().view(1, 1, -1, 1) for x in (k, v))
    sinks = torch.tensor([sink])
    module = SimpleNamespace(num_key_value_groups=1, sinks=sinks, training=False)
    expected, _ = eager_attention_forward(module, q, k, v, None, scaling=1.0)
    layer = AttentionLayer(1, 1, 1, 1.0, sinks=sinks)
    visible = torch.ones(1, 1, 1, len(scores), dtype=torch.bool)
    return expected.item(), _explicit_attention(layer, q, k, v, visible).item()


@pytest.mark.parametrize("sink", [3.0, -2.0, 30.0])
def test_sinks_are_those_of_transformers_and_of_the_engine(sink: float) -> None:
    keys = [pair for tile in TILES for pair in tile]
    scores, values = np.array(keys).T
    expected = attended(scores, values, sink)
    assert worked.weights(scores, sink) @ values == pytest.approx(expected[0], rel=1e-5)
    part = worked.add_keys(worked.with_sink(worked.NOTHING, sink), keys)
    late = worked.with_sink(worked.add_keys(worked.NOTHING, keys), sink)
    once = worked.shared_result(TILES, sink, (1,))
    for found in (part, late, once):
        assert found[2] / found[1] == pytest.approx(expected[0], rel=1e-5)
        assert found[2] / found[1] == pytest.approx(expected[1], rel=1e-5)


def test_a_sink_in_each_share_is_a_larger_sink() -> None:
    for count in (2, 4):
        shares = [[key] for tile in TILES for key in tile] if count == 4 else TILES
        wrong = worked.shared_result(shares, 3.0, range(count))
        larger = worked.shared_result(shares, 3.0 + math.log(count), (0,))
        assert wrong[2] / wrong[1] == pytest.approx(larger[2] / larger[1])


def test_tables_of_sinks() -> None:
    rows = cells(worked.sink_table({"nothing": [0, 0, 0], "one": [5, 0, 0]}, 3))
    e = math.exp
    assert rows[0][2:] == ["0.333, 0.333, 0.333", "0.043, 0.043, 0.043", f"{3 / (3 + e(3)):.3f}"]
    assert rows[1][-1] == f"{(e(5) + 2) / (e(5) + 2 + e(3)):.3f}"
    total = 1 + e(-3) + e(-2) + 2 * e(-1)
    result = (-10 + 10 * e(-3) + 30 * e(-2) + 20 * e(-1)) / total
    none, one, other, each = cells(worked.shares_table(TILES, 3))
    assert one[1:] == other[1:] == [f"{result:.3f}", f"{1 - e(-1) / total:.3f}"]
    assert none[2] == "1.000" and each[1:] == ["0.837", "0.679"]


def test_mxfp4_by_hand() -> None:
    assert cells(worked.mxfp4_table([0x1A, 0x73, 0xF4], 125)) == [
        ["0x1A", "1 01 0 and 0 00 1", "-1 and 0.5", "-0.25 and 0.125"],
        ["0x73", "0 01 1 and 0 11 1", "1.5 and 6", "0.375 and 1.5"],
        ["0xF4", "0 10 0 and 1 11 1", "2 and -6", "0.5 and -1.5"],
    ]
    for nibble in range(16):  # by the definition: subnormal, or (1 + fraction / 2) 2^(e - 1)
        sign, e, fraction = nibble >> 3, nibble >> 1 & 3, nibble & 1
        size = fraction / 2 if e == 0 else (1 + fraction / 2) * 2.0 ** (e - 1)
        value = -size if sign else size
        shown = cells(worked.mxfp4_table([nibble], 127))[0][2].split(" and ")[0]
        assert float(shown) == value, nibble
    assert worked.mxfp4_bytes() == 4.25 / 8
    assert worked.expert_parameters("gpt-oss-20b") == 24 * 32 * 3 * 2880 * 2880


# ---------------------------------------------------------------- latents


def test_the_absorbed_form_by_hand() -> None:
    assert worked.absorbed_query() == [1 - 2, -1 + 6]
    rows = cells(worked.absorbed_table())
    assert [row[3:5] for row in rows] == [["9", "9"], ["-3", "-3"], ["5", "5"]]
    assert [row[2] for row in rows] == ["1, 4, 6", "3, 6, 0", "0, 1, 3"]
    assert worked.rows_of("W_UK") == "(1, 0), (2, 1) and (0, 3)"
    assert worked.rows_of("absorbed") == "(-1, 5)"
    sums = [
        worked.absorbed_values([0.5, 0.25, 0.25], name)
        for name in ("values", "latents", "value of latents")
    ]
    assert sums == ["(2.5, 2.5)", "(1.25, 1.25)", "(2.5, 2.5)"]


def test_costs_of_three_forms() -> None:
    heads, expanded, absorbed = cells(worked.forms_table("DeepSeek-V3", 32_768))
    per_head, tokens = 192 + 128, 61 * 32_768
    assert heads[1:4] == [f"{128 * per_head:,}", f"{128 * per_head:,}", "1"]
    assert expanded[1:3] == ["576", f"{128 * (per_head + 512 * 256):,}"]
    assert absorbed[1:4] == ["576", f"{128 * (576 + 512):,}", f"{128 * 1088 / 576:.0f}"]
    assert absorbed[4] == f"{576 * 2 * tokens / 3.35e9:.2f} ms"
    assert absorbed[5] == f"{2 * 128 * 1088 * tokens / 989e9:.2f} ms"
    assert heads[4] == f"{128 * per_head * 2 * tokens / 3.35e9:.2f} ms"
    # Expanding a token takes 512 x 256 products a head, and saves 1088 - 320 for each query.
    assert worked.expanding_pays("DeepSeek-V3") == math.ceil(512 * 256 / 768)


def test_bytes_on_ranks() -> None:
    rows = cells(worked.ranks_table(["Qwen3-30B-A3B", "gpt-oss-20b", "DeepSeek-V3"], [1, 4, 8]))
    assert rows[0][1:] == ["98,304", "24,576", "24,576"]  # four heads: two ranks share each
    assert rows[1][1:] == ["49,152", "12,288", "6,144"]
    assert rows[2][1:] == ["70,272"] * 3


@pytest.mark.parametrize("name", ["DeepSeek-V3", "DeepSeek-V2-Lite"])
def test_yarn_is_squared_in_the_scale(name: str) -> None:
    raw = worked._FILES[name]
    config = DeepseekV3Config(
        hidden_size=64,
        num_attention_heads=2,
        rope_parameters=raw["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 10_000.0},
        **{key: raw[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
    )
    scale = DeepseekV3Attention(config, 0).scaling
    assert worked.model(name).attention_scale == pytest.approx(scale, rel=1e-6)
    expected = 0.1 * raw["rope_scaling"]["mscale_all_dim"] * math.log(40) + 1
    assert worked.yarn_factor(name) == pytest.approx(expected)


# ---------------------------------------------------------------- recurrent states


def test_the_delta_rule_by_hand() -> None:
    rows = cells(worked.delta_table())
    assert [row[5:] for row in rows] == [
        ["0, 0", "2, 4", "2, 4", "0, 0"],
        ["0, 0", "6, 0", "1, 2", "6, 0"],
        ["1, 2", "2, 0", "3, 2", "6, 0"],
        ["3.3, 0.6", "-1.15, 1.7", "0.81, 2.02", "2.08, 1.36"],
    ]


@pytest.mark.parametrize("rule", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_the_example_is_what_transformers_computes(rule) -> None:
    decay, k, v, beta = (torch.tensor(x)[None, :, None] for x in zip(*worked.TOKENS, strict=True))
    _, last = rule(k, k, v, g=decay.log(), beta=beta, output_final_state=True)
    torch.testing.assert_close(worked.after_tokens(4), last[0, 0], atol=1e-5, rtol=0)


def test_a_chunk_solves_for_the_same_corrections() -> None:
    rows, steps = cells(worked.chunk_table()), cells(worked.delta_table())
    assert [row[3] for row in rows] == [row[6] for row in steps]
    assert [row[2] for row in rows] == ["", "", "0.5 u0", "0.075 u0 + 0.2 u1 + 0.15 u2"]
    # The last key finds 0.6 of the first one's correction, a quarter of it is left, beta is 0.5.
    assert worked.system()[3, 0] == pytest.approx(0.5 * 0.25 * 0.6)
    left = np.array([0.25, 0.5, 0.5, 1.0])[:, None]
    keys = np.array([k for _, k, _, _ in worked.TOKENS])
    state = (left * keys).T @ worked.corrections()
    np.testing.assert_allclose(worked.after_tokens(4).numpy(), state, atol=1e-6)


def test_states_of_a_prompt_and_of_a_batch() -> None:
    passes = 2 * 36 * 4 * (32 * 128**2 + 3 * 8192) / 3.35e12
    assert worked.prompt_seconds(NEXT, 8192, 1) == pytest.approx(8192 * passes)
    assert worked.prompt_seconds(NEXT, 8193, 64) == pytest.approx(129 * passes)
    assert worked.parts_of_a_slot(NEXT) == {"conv": 98_304, "recurrent": 2_097_152}
    # 36 layers with two KV heads of 256 would take 73,728 bytes a token.
    assert worked.replaced_bytes(NEXT) == 36 * 2 * 2 * 256 * 2
    assert worked.break_even(NEXT) == math.ceil(worked.state_bytes(NEXT) / 73_728)
    rows = cells(worked.states_table([NEXT, DENSE], 256))
    assert [row[4] for row in rows] == ["1,072 tokens", "798 tokens"]
    assert [row[5:] for row in rows] == [["18.8 GiB", "12 ms"], ["37.4 GiB", "24 ms"]]


def test_sixteen_bits_round_small_changes_away() -> None:
    rows = cells(worked.rounding_table(1000, 0.001))
    assert [row[1:] for row in rows] == [
        ["0.368", "2.000"],
        ["0.377", "1.977"],
        ["1.000", "1.000"],
        ["0.368", "2.000"],
    ]
    kept = np.float16(1)
    for _ in range(1000):
        kept = np.float16(np.float32(kept) * np.float32(0.999))
    assert f"{kept:.3f}" == rows[1][1]


def test_states_have_no_prefix_and_begin_again(tmp_path: Path) -> None:
    """The same requests on a model with attention only: there the second prompt is a hit."""
    scenario.states_by_slot(tmp_path / "states")
    scenario._run(tmp_path / "dense", None)

    def rows(file: str) -> list[dict]:
        lines = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        return [row for line in lines[1:-1] for row in line["rows"]]

    assert sum(row["hits"] for row in rows("dense")) == 5
    assert sum(row["hits"] for row in rows("states")) == 0
    starts = {
        file: [
            row["computed"] for row in rows(file) if row["seq"] == 2 and row["kind"] == "prefill"
        ]
        for file in ("dense", "states")
    }
    assert starts["dense"] == [8, 24]  # after its first block, and after the preemption
    assert starts["states"] == [0, 12, 0, 12]
