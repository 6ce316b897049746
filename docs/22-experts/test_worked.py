"""Chapter 22's numbers against hand-computed ones, simulations, transformers and the engine."""

import json
import math
import random
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nanoserve.checkpoint.moe_config import MoEConfig
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.experts import SparseMoE
from nanoserve.models.layers.tensor_parallel import TensorParallel

from . import scenario, worked

QWEN = "Qwen3-30B-A3B"


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("name", worked.MODELS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    shape = worked.MODELS[name]
    settings = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "num_experts_per_tok": shape.top_k,
        "tie_word_embeddings": False,
    }
    with torch.device("meta"):
        if name == QWEN:
            experts = {"num_experts": shape.experts, "moe_intermediate_size": shape.expert_size}
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **experts))
        else:
            experts = {"num_local_experts": shape.experts, "intermediate_size": shape.expert_size}
            model = MixtralForCausalLM(MixtralConfig(**settings, **experts))
    assert worked.total(name) == sum(each.numel() for each in model.parameters())


def test_what_the_models_names_say() -> None:
    assert cells(worked.parameter_table()) == [
        [QWEN, "8 of 128", "30.53", "3.35", "95%"],
        ["Mixtral-8x7B", "2 of 8", "46.70", "12.88", "97%"],
    ]
    # 120 of 128 experts in 48 layers are not used: 120 x 48 x 3 x 2048 x 768.
    assert worked.total(QWEN) - worked.active(QWEN) == 120 * 48 * 3 * 2048 * 768


def test_touched_experts_over_all_possible_choices() -> None:
    choices = list(combinations(range(5), 2))
    for tokens in (1, 2, 3):
        counts = [len(set().union(*each)) for each in product(choices, repeat=tokens)]
        assert worked.touched(tokens, 5, 2) == pytest.approx(sum(counts) / len(counts)), tokens
    assert worked.touched(1, 128, 8) == pytest.approx(8)
    assert worked.touched(10_000, 128, 8) == pytest.approx(128)


def test_what_a_step_reads() -> None:
    # Outside the experts, by hand: attention 18,874,368 a layer, norms 4,352, router 262,144.
    outside = 48 * (18_874_368 + 4_352 + 262_144) + 2048 + 151_936 * 2048
    assert worked.read_bytes(1, QWEN) == pytest.approx(2 * (outside + 48 * 8 * 4_718_592))
    rows = cells(worked.batch_table([1, 64, 4096], QWEN))
    assert [row[:3] for row in rows] == [
        ["1", "8.0 of 128", "6.084 GB"],
        ["64", "125.9 of 128", "0.930 GB"],
        ["4,096", "128.0 of 128", "0.015 GB"],
    ]
    assert [float(row[4]) for row in rows] == [1.0, 9.8, 1.0]
    assert [row[3] for row in rows] == ["1.8 ms", "17.8 ms", "25.2 ms"]
    assert worked.rows_per_expert(64, QWEN) == 4


def test_a_mixture_is_bound_by_memory_much_longer() -> None:
    assert worked.balanced_tokens(QWEN, is_dense=True) == 296  # 989 TFLOP/s over 3.35 TB/s
    tokens = worked.balanced_tokens(QWEN)
    whole = worked.read_bytes(10**6, QWEN) / 3.35e12
    assert worked.step_seconds(tokens - 1, QWEN) == pytest.approx(whole, rel=1e-9)
    assert worked.step_seconds(tokens + 10, QWEN) > whole * 1.001
    assert tokens / 296 == pytest.approx(
        worked.read_bytes(10**6, QWEN) / worked.read_bytes(1, QWEN), rel=0.01
    )


def test_a_softmax_of_the_best_is_a_renormalised_softmax_of_all() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        logits = [rng.gauss(0, 2) for _ in range(8)]
        rows = cells(worked.routing_table(logits, rng.randint(1, 8)))
        assert rows[1][1] == rows[2][1], logits
        assert rows[1][2] == "1.000" and float(rows[0][2]) <= 1, logits


def test_a_router_by_hand() -> None:
    # e^2, e, 1, 1/e are 7.389, 2.718, 1, 0.368 of 11.475.
    assert [row[1:3] for row in cells(worked.routing_table([2.0, 1.0, 0.0, -1.0], 2))] == [
        ["0.644, 0.237", "0.881"],
        ["0.731, 0.269", "1.000"],
        ["0.731, 0.269", "1.000"],
        ["0.546, 0.454", "1.000"],  # 0.881 and 0.731
    ]


def test_pairs_by_expert() -> None:
    ids = [[0, 2], [2, 1], [0, 1], [2, 0]]
    assert cells(worked.grouping_table(ids, 4)) == [
        ["0", "0, 4, 7", "0, 2, 3"],
        ["1", "3, 5", "1, 2"],
        ["2", "1, 2, 6", "0, 1, 3"],
        ["3", "none", "none"],
    ]
    assert worked.products(ids, is_grouped=False) == 16
    assert worked.products(ids, is_grouped=True) == 6


@pytest.mark.parametrize(("experts", "ranks"), [(10, 4), (128, 8), (3, 4), (8, 3)])
def test_experts_of_ranks_are_the_engines(experts: int, ranks: int) -> None:
    moe = MoEConfig(experts, 1, intermediate_size=4, norm_topk_prob=True)
    config = SimpleNamespace(moe=moe, hidden_size=8, hidden_act="silu")
    homes = []
    for rank in range(ranks):
        parallel = ParallelContext(TensorParallel(rank, ranks))
        layer = SparseMoE(config, 0, LayerContext(parallel=parallel))
        homes += [rank] * len(layer.down)
        assert layer.first_expert == homes.index(rank) if rank in homes else True
    assert homes == [worked.rank_of(expert, experts, ranks) for expert in range(experts)]
    if (experts, ranks) == (10, 4):
        shown = [row[1] for row in cells(worked.rank_table(10, 4))]
        assert shown == ["0, 1", "2, 3, 4", "5, 6", "7, 8, 9"]


def test_the_simulation_agrees_with_the_formula() -> None:
    generator = np.random.default_rng(7)
    ids = worked.choose(500, 12, 3, 0.0, generator)
    assert all(len(set(row)) == 3 for row in ids.tolist())
    for tokens in (1, 16, 64):
        experts, busiest, rank = worked.simulate(tokens, QWEN, skew=0.0, ranks=8)
        assert experts == pytest.approx(worked.touched(tokens, 128, 8), rel=0.03), tokens
        assert busiest >= rank >= 1
    rows = [
        [float(cell) for cell in row[2:]] for row in cells(worked.imbalance_table([64], QWEN, 8))
    ]
    assert rows[1][0] < rows[0][0] and rows[1][1] > rows[0][1] and rows[1][2] > rows[0][2]
    popular = np.bincount(worked.choose(4000, 12, 3, 1.0, generator).ravel(), minlength=12)
    assert popular.max() > 3 * popular.min()


def test_what_ranks_send() -> None:
    # The probability that none of a token's eight experts is among the 16 of a rank.
    missed = math.prod((112 - i) / (128 - i) for i in range(8))
    assert worked.ranks_of_a_token(QWEN, 8) == pytest.approx(8 * (1 - missed))
    generator = np.random.default_rng(1)
    homes = worked.choose(4000, 128, 8, 0.0, generator) // 16
    counted = np.mean([len(set(row)) for row in homes.tolist()])
    assert worked.ranks_of_a_token(QWEN, 8) == pytest.approx(counted, rel=0.02)
    # On two ranks: half of 4 KiB to the other one, and half of the sums.
    assert worked.sent_all_reduce(QWEN, 2) == 4096
    assert worked.sent_all_to_all(QWEN, 2) == pytest.approx(4096, rel=0.02)
    shown = {row[0]: row[1:] for row in cells(worked.sent_table([8, 32], QWEN))}
    assert shown == {"8": ["5.3", "7.0 KiB", "4.7 KiB"], "32": ["7.4", "7.8 KiB", "1.8 KiB"]}


def test_copies_of_busy_experts() -> None:
    """40 becomes four copies of 10, 20 two of 10; each rank gets two of load 10 and a small one."""
    loads = [40, 20, 10, 10, 8, 6, 4, 2]
    assert worked.in_order(loads, 4) == [60, 20, 14, 6]
    assert worked.with_copies(loads, 4, 0) == [42, 24, 18, 16]
    assert worked.with_copies(loads, 4, 4) == [28, 26, 24, 22]
    assert [row[2] for row in cells(worked.placement_table(loads, 4, 4))] == [
        "2.40",
        "1.68",
        "1.12",
    ]
    assert worked.physical_per_rank(256, 32, 32) == 9  # vLLM's example, DeepSeek-R1


def test_the_scheduler_does_not_see_experts(tmp_path: Path) -> None:
    """A dense model and a mixture get the same plans for the same requests."""
    scenario.mixture_of_experts(tmp_path / "mixture")
    scenario._run(tmp_path / "dense", None)

    def plans(file: str) -> list:
        lines = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        keys = ("seq", "kind", "computed", "new", "hits", "blocks")
        return [[[row[key] for key in keys] for row in line["rows"]] for line in lines[1:-1]]

    assert plans("mixture") == plans("dense")
    assert len(plans("mixture")) == 12
