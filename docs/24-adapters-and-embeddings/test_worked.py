"""Chapter 24's numbers by hand; products against merged weights, keys by the block manager."""

import itertools

import numpy as np
import pytest

from nanoserve.cli.bench.shapes import SHAPES

from . import worked


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_the_matrices_are_those_of_the_model() -> None:
    shape = SHAPES["llama-3.1-8b"]
    hidden, heads = shape["hidden_size"], shape["head_dim"] * shape["num_key_value_heads"]
    assert worked.MATRICES["k"] == worked.MATRICES["v"] == (hidden, heads)
    assert worked.MATRICES["down"] == (shape["intermediate_size"], hidden)
    layers = shape["num_hidden_layers"]
    matrices = layers * sum(a * b for a, b in worked.MATRICES.values())
    tables = 2 * shape["vocab_size"] * hidden
    assert matrices + tables + (2 * layers + 1) * hidden == worked.PARAMETERS


def test_the_size_of_an_adapter() -> None:
    assert worked.adapter_parameters(8, "q v") == 32 * 8 * (8192 + 5120) == 3_407_872
    all_seven = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert worked.adapter_parameters(16) == 32 * 16 * all_seven == 41_943_040
    assert cells(worked.adapter_table([8]))[0] == ["q, v", "8", "3,407,872", "7 MB", "0.04%"]
    assert worked.fleet_gigabytes(100, 16, merged=True) == pytest.approx(1606.05, abs=0.01)
    assert worked.fleet_gigabytes(100, 16, merged=False) == pytest.approx(24.45, abs=0.01)
    assert worked.extra_share(16) == pytest.approx(16 * all_seven / 218_103_808)


def test_what_a_step_reads() -> None:
    rows = cells(worked.step_table(16, [0, 1, 64], rows=64))
    assert rows[0] == ["0", "0.00 GB", "4.8 ms", "0.00 GB", "4.8 ms"]  # 16.06 / 3.35
    assert rows[1] == ["1", "0.08 GB", "4.8 ms", "5.37 GB", "6.4 ms"]
    assert rows[2][1] == rows[2][3]


def test_both_ways_of_a_small_product() -> None:
    assert [row[1] for row in cells(worked.small_table())][-2:] == ["**[3, 5, -5, 6]**"] * 2


def test_a_small_batch() -> None:
    rows = cells(worked.mixed_table())
    assert all(row[4] == row[5] for row in rows)
    assert rows[1][3] == rows[1][4] == "[7, 5, 3, 6]"  # no adapter
    assert rows[2][4] == "[3, 5, -5, 6]"
    # W x = [1, 0, 3, 1]; A x = [0, 1], and B turns this into 1 for each output
    assert rows[0][3:5] == ["[1, 0, 3, 1]", "[2, 1, 4, 2]"]


def test_a_batch_equals_merged_weights() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        weight = rng.normal(size=(5, 7))
        adapters = {
            n: worked.Adapter(rng.normal(size=(n, 7)), rng.normal(size=(5, n)), 0.5)
            for n in (1, 2, 3)
        }
        adapter_of = rng.integers(0, 4, size=12)
        x = rng.normal(size=(12, 7))
        y = worked.batched(x, weight, adapters, adapter_of)
        own = [adapters[n].merged(weight) if n else weight for n in adapter_of]
        expected = [each @ row for each, row in zip(own, x, strict=True)]
        np.testing.assert_allclose(y, expected, err_msg=f"{adapter_of=}")
        assert np.array_equal(y[adapter_of == 0], (x @ weight.T)[adapter_of == 0])


def test_rows_of_a_packed_batch() -> None:
    table = cells(worked.batch_table([("A", 1, 1), ("B", 1, 0), ("C", 1, 2), ("D", 1, 1)]))
    assert [row[:3] for row in table] == [
        ["none", "[1]", "B"],
        ["1", "[0, 3]", "A, D"],
        ["2", "[2]", "C"],
    ]


def test_equal_tokens_under_another_key_are_not_found() -> None:
    assert [row[2] for row in cells(worked.hits_table())] == ["0", "64", "0", "64", "0", "0"]


def test_a_limit_of_adapters() -> None:
    rows = cells(worked.limit_table("XYXZY", [4, 3, 2, 2, 5], 2))
    assert [row[2] for row in rows] == ["1", "1", "1", "4", "5"]  # Z waits for Y's end, Y for X's
    assert [row[3] for row in rows] == ["1", "1", "1", "5", "1"]
    assert worked.starving(5, skips=False) == worked.starving(50, skips=False) == 11
    assert worked.starving(5, skips=True) == 1 + 8 * 5 + 10
    assert worked.starving(50, skips=True) == 1 + 8 * 50 + 10


def test_the_engine_equals_merged_weights() -> None:
    found, num_rows = worked.served()
    assert all(one.token_ids == one.merged for one in found)
    assert len({one.text for one in found}) == len(worked.SERVED)  # adapters matter
    assert num_rows == [len(worked.SERVED)] * 10  # all of them in each step
    assert [row[3] for row in cells(worked.served_table())] == ["10 of 10"] * 4


def test_pooling() -> None:
    assert [worked.pooled(how) for how in ("first", "last")] == [[1.0, 0.0], [0.8, 0.6]]
    assert worked.pooled("mean") == [0.707, 0.707]  # (7, 7) / 3
    for sizes in ([3], [1, 2], [2, 1], [1, 1, 1]):
        assert worked.mean_in_chunks(sizes) == worked.pooled("mean"), sizes
    assert len(cells(worked.pooling_table())) == 3


def test_a_pooler_keeps_slots_apart() -> None:
    pooler = worked.MeanPooler(num_slots=2, hidden_size=2)
    for row, slot in zip(worked.HIDDEN, itertools.cycle([0, 1])):
        pooler.add(row[None], np.array([slot]))
    assert pooler.take(1).tolist() == [0.0, 1.0]
    assert pooler.take(0) == pytest.approx(np.array([7, 3]) / np.hypot(7, 3))
    pooler.add(worked.HIDDEN[:1], np.array([0]))  # the slot belongs to another sequence now
    assert pooler.take(0).tolist() == [1.0, 0.0]


def test_rerankers_and_images() -> None:
    assert worked.rerank_tokens(100, 300, 20) == 32_000
    assert worked.probability_of_yes(1.0, 1.0) == 0.5
    assert worked.probability_of_yes(2.0, 0.0) == pytest.approx(0.8808, abs=1e-4)
    assert worked.image_tokens(1024, 768) == 37 * 27 == 999
