"""Attention by hand, and the parameters of models that we build."""

import math

import pytest
import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.ops import TorchOps, rotate
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.registry import model_class

from . import worked as transformer
from .worked import KEYS, LLAMA_2_7B, QUERIES, QWEN3_06B, VALUES


def test_the_parameters_of_qwen3_06b() -> None:
    assert transformer.parameters(QWEN3_06B) == {
        "embedding": 155_582_464,
        "attention": 176_160_768,
        "feed-forward": 264_241_152,
        "norms": 65_536,
        "LM head": 0,
    }
    assert transformer.num_parameters(QWEN3_06B) == 596_049_920


def test_the_table_of_parameters() -> None:
    lines = transformer.parameter_table(QWEN3_06B).splitlines()
    assert lines[2] == "| embedding | 155,582,464 | 26.10 % |"
    assert lines[-1] == "| together | 596,049,920 | |" and len(lines) == 8


def test_the_parameters_of_llama_2_7b() -> None:
    found = transformer.parameters(LLAMA_2_7B)
    in_layers = (found["attention"] + found["feed-forward"] + found["norms"] - 4096) // 32
    assert in_layers == 202_383_360
    assert transformer.num_parameters(LLAMA_2_7B) == 6_738_415_616
    assert transformer.share(LLAMA_2_7B, "embedding", "LM head") == pytest.approx(0.0389, abs=5e-5)
    assert transformer.share(LLAMA_2_7B, "feed-forward") == pytest.approx(0.642, abs=5e-4)
    assert transformer.share(LLAMA_2_7B, "attention") == pytest.approx(0.319, abs=5e-4)
    assert transformer.share(LLAMA_2_7B, "norms") == pytest.approx(0.00004, abs=5e-7)


LLAMA_2 = SHAPES["llama-3.1-8b"] | {"vocab_size": 32_000, "intermediate_size": 11_008}
LLAMA_2 |= {"num_key_value_heads": 32, "rope_scaling": None, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("shape", "raw"), [(QWEN3_06B, SHAPES["qwen3-0.6b"]), (LLAMA_2_7B, LLAMA_2)]
)
def test_our_model_has_as_many(shape: transformer.Shape, raw: dict) -> None:
    config = ModelConfig.from_hf(raw, {}, "bfloat16")
    context = LayerContext(dtype=torch.bfloat16, device=torch.device("meta"))
    model = model_class(config.architecture)(config, context)
    found = dict.fromkeys(transformer.parameters(shape), 0)
    parts = {"embed": "embedding", "self_attn": "attention", "mlp": "feed-forward"}
    parts |= {"norm": "norms", "lm_head": "LM head"}
    for name, parameter in model.named_parameters():
        (part,) = {
            p for key, p in parts.items() if key in name and ("norm" in key) == ("norm" in name)
        }
        found[part] += parameter.numel()
    assert found == transformer.parameters(shape)


def test_three_queries_that_ask_for_different_things() -> None:
    """Scores [4, 2, 5], [1, 4, 1], [6, 0, 4], halved; e^0.5 = 1.6487, e^1 = 2.7183 and so on."""
    weights = transformer.attention_weights(QUERIES, KEYS, causal=False)
    assert weights[0] == pytest.approx([0.3315, 0.1220, 0.5465], abs=1e-4)
    assert weights[1] == pytest.approx([0.1543, 0.6914, 0.1543], abs=1e-4)
    assert weights[2] == pytest.approx([0.7054, 0.0351, 0.2595], abs=1e-4)
    masked = transformer.attention_weights(QUERIES, KEYS, causal=True)
    assert masked[0] == [1, 0, 0] and masked[2] == weights[2]
    assert masked[1] == pytest.approx([0.1824, 0.8176, 0], abs=1e-4)
    for row, output in zip(
        masked, transformer.attention(QUERIES, KEYS, VALUES, causal=True), strict=True
    ):
        assert output == pytest.approx([4 * weight for weight in row] + [1])


def test_torch_attends_as_the_three_queries_do() -> None:
    q, k, v = (torch.tensor(x, dtype=torch.float64)[None, None] for x in (QUERIES, KEYS, VALUES))
    for causal in (False, True):
        ours = transformer.attention(QUERIES, KEYS, VALUES, causal)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert torch.allclose(torch.tensor(ours, dtype=torch.float64), theirs[0, 0]), causal


def test_the_tables_of_the_three_queries() -> None:
    row = "| 2 | 6, 0, 4 | 3.0, 0.0, 2.0 | 0.705, 0.035, 0.259 | 2.82, 0.14, 1.04, 1.00 |"
    assert transformer.three_tokens_table(causal=False).splitlines()[4] == row
    masked = transformer.three_tokens_table(causal=True).splitlines()
    assert masked[4] == row
    assert masked[2] == "| 0 | 4, –, – | 2.0, –, – | 1.000, 0.000, 0.000 | 4.00, 0.00, 0.00, 1.00 |"
    assert transformer.vectors(QUERIES) == "(1, 0, 2, 0), (0, 2, 0, 1) and (2, 0, 0, 2)"


@pytest.mark.parametrize(
    ("scores", "weights"),
    [
        ([0.5], [1]),
        ([0.3, 0.7], [0.401, 0.599]),
        ([0.2, 0.4, 0.6], [0.269, 0.329, 0.402]),
        ([0.1, 0.3, 0.5, 0.8], [0.175, 0.213, 0.260, 0.352]),
    ],
)
def test_softmax_of_a_few_scores(scores: list[float], weights: list[float]) -> None:
    assert transformer.softmax(scores) == pytest.approx(weights, abs=5e-4)


def test_a_norm_leaves_a_root_mean_square_of_one() -> None:
    assert transformer.rms_norm([3.0, 4.0, 0.0, 0.0]) == pytest.approx([1.2, 1.6, 0, 0], abs=1e-6)
    assert transformer.rms_norm_row([3.0, 4.0, 0.0, 0.0]) == "1.20, 1.60, 0.00, 0.00"
    x = [0.5, -2.0, 3.0, 1.0]
    ours = TorchOps().rms_norm(torch.tensor(x), torch.ones(4), 1e-6)
    assert transformer.rms_norm(x) == pytest.approx(ours.tolist(), abs=1e-6)


@pytest.mark.parametrize("position", [0, 1, 7, 300])
def test_rotation_is_that_of_our_layer(position: int) -> None:
    x = [0.5, -2.0, 3.0, 1.0, 0.25, 4.0]
    rotary = RotaryEmbedding(RopeConfig(theta=10_000.0), 6, 301, LayerContext())
    cos, sin = rotary.cos[position][None], rotary.sin[position][None]
    ours = rotate(torch.tensor(x)[None, None], cos, sin)[0, 0]
    assert transformer.rotate(x, position) == pytest.approx(ours.tolist(), abs=1e-4)


def test_a_turned_score_depends_on_the_distance_only() -> None:
    pairs = [(5, 3), (105, 103), (5, 4), (7, 7)]
    lines = transformer.turned_scores_table(pairs, theta=10_000).splitlines()[2:]
    near, far, other, same = (float(line.split("|")[5]) for line in lines)
    # Pair 0: (2, 0) and (2, 1), turned by the distance; pair 1: (0, 2) and (0, 1), by a hundredth.
    assert (
        near
        == far
        == pytest.approx(4 * math.cos(2) + 2 * math.sin(2) + 2 * math.cos(0.02), abs=1e-4)
    )
    assert other == pytest.approx(4 * math.cos(1) + 2 * math.sin(1) + 2 * math.cos(0.01), abs=1e-4)
    assert same == 6
    assert lines[0].startswith("| 10,000 | 5 | 3 | 2 |")


def test_the_slowest_pair_of_qwen3_turns_once_in_five_million_tokens() -> None:
    assert transformer.turn_in_tokens(0, 128, 1e6) == pytest.approx(6.2832, abs=1e-4)
    assert transformer.turn_in_tokens(63, 128, 1e6) == pytest.approx(5.0633e6, rel=1e-4)


def test_eight_query_heads_share_two_kv_heads() -> None:
    assert transformer.kv_heads_row(8, 2) == "0, 0, 0, 0, 1, 1, 1, 1"
