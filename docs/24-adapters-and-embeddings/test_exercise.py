"""The exercise of chapter 24, against weights into which each adapter is merged."""

import random

import numpy as np
import pytest

from .exercise import Adapter, batched_lora, segments


class Products:
    """Multiplies, counts, and fails on a product that makes a matrix as large as the weight."""

    def __init__(self, weight: np.ndarray, num_rows: int) -> None:
        self.calls: list[str] = []
        self._weight, self._num_rows = weight, num_rows

    def __call__(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.calls.append(f"{a.shape} @ {b.shape}")
        assert len(a) <= self._num_rows, f"{self.calls[-1]}: its rows are not tokens"
        return a @ b


def by_merged_weights(x, weight, adapters, adapter_of) -> np.ndarray:
    """The result row by row, each with its own merged weight."""
    rows = []
    for row, number in zip(x, adapter_of.tolist(), strict=True):
        own = weight
        if number:
            adapter = adapters[number]
            own = weight + adapter.scaling * adapter.b @ adapter.a
        rows.append(own @ row)
    return np.array(rows)


def check(x, weight, adapters, adapter_of) -> None:
    case = f"{adapter_of=}, x of {x.shape}, weight of {weight.shape}, "
    case += f"ranks { ({n: len(each.a) for n, each in adapters.items()}) }"
    before = x.copy(), weight.copy(), adapter_of.copy()
    product = Products(weight, len(x))
    y = batched_lora(x, weight, adapters, adapter_of, product)
    expected = by_merged_weights(x, weight, adapters, adapter_of)
    np.testing.assert_allclose(y, expected, atol=1e-10, err_msg=case)
    present = {number for number in adapter_of.tolist() if number}
    assert len(product.calls) == 1 + 2 * len(present), f"{case}: {product.calls}"
    plain = adapter_of == 0
    assert np.array_equal(y[plain], (x @ weight.T)[plain]), f"{case}: rows without an adapter"
    for kept, given in zip(before, (x, weight, adapter_of), strict=True):
        assert np.array_equal(kept, given), f"{case}: an argument was changed"


def test_rows_are_sorted_by_adapter() -> None:
    given = np.array([1, 0, 2, 1, 2, 2, 2, 2])
    order, spans = segments(given)
    assert order.tolist() == [1, 0, 3, 2, 4, 5, 6, 7], f"{given=}"
    assert spans == {1: slice(1, 3), 2: slice(3, 8)}, f"{given=}"


def test_a_batch_without_adapters_is_one_product() -> None:
    order, spans = segments(np.array([0, 0]))
    assert order.tolist() == [0, 1] and spans == {}, "adapter_of=[0, 0]"
    check(np.ones((2, 3)), np.ones((4, 3)), {}, np.array([0, 0]))


def test_the_token_of_the_chapter() -> None:
    weight = np.array([[1.0, 0, 2], [0, 1, 1], [3, 0, 0], [1, 1, 1]])
    adapter = Adapter(np.array([[1.0, 0, -1]]), np.array([[1.0], [0], [2], [0]]), 2.0)
    x = np.array([[1.0, 2, 3]])
    y = batched_lora(x, weight, {7: adapter}, np.array([7]), np.matmul)
    assert y.tolist() == [[3, 5, -5, 6]], f"{y=}"
    y = batched_lora(x, weight, {7: adapter}, np.array([0]), np.matmul)
    assert y.tolist() == [[7, 5, 3, 6]], f"without the adapter {y=}"


@pytest.mark.parametrize("seed", range(60))
def test_a_mixed_batch_equals_merged_weights(seed: int) -> None:
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    inputs, outputs = rng.randint(1, 12), rng.randint(1, 12)
    adapters = {
        number: Adapter(
            draw.normal(size=(rank, inputs)), draw.normal(size=(outputs, rank)), rng.uniform(0.1, 2)
        )
        for number in rng.sample(range(1, 50), rng.randint(1, 6))
        for rank in [rng.randint(1, 4)]
    }
    # Sequences of one token, as in decode, and chunks of a prompt.
    tokens = [rng.choice([1, 1, 1, 5]) for _ in range(rng.randint(1, 10))]
    numbers = [n for size in tokens for n in [rng.choice([0, *adapters])] * size]
    x = draw.normal(size=(len(numbers), inputs))
    check(x, draw.normal(size=(outputs, inputs)), adapters, np.array(numbers))
