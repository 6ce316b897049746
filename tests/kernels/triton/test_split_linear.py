"""Products whose inputs are split over programs, against float64; and where they are used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from program_order import ORDERS, programs_in_order
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.kernels.triton import split_linear, split_work
from nanoserve.kernels.triton.act_and_mul import ACTIVATIONS
from nanoserve.models.layers import triton_ops
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import ColumnParallelLinear, UnquantizedLinearMethod
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.layers.triton_ops import TritonOps

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}  # of a row's norm
CHOSEN = [None, *ACTIVATIONS]


def draw(num_rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, a weight, and counters of arrivals."""
    x, weight = torch.randn(num_rows, inputs), torch.randn(outputs, inputs) * inputs**-0.5
    arrivals = torch.zeros(split_work.most_arrivals(DEVICE), dtype=torch.int32)
    return [x.to(DEVICE, dtype), weight.to(DEVICE, dtype), arrivals.to(DEVICE)]


def assert_right(x: Any, weight: Any, arrivals: Any, activation: str | None) -> torch.Tensor:
    out = split_linear.split_linear(x, weight, arrivals, activation)
    expected = x.double() @ weight.double().T
    if activation is not None:
        expected = TorchOps().act_and_mul(expected, activation)
    assert out.dtype == x.dtype and out.shape == expected.shape
    errors = (out.double() - expected).norm(dim=1)
    assert (errors <= TOLERANCE[x.dtype] * expected.norm(dim=1)).all(), errors  # no NaN, either
    assert not arrivals.any()  # ready for the next launch
    return out


@pytest.mark.small(num_rows=[1, 17, 130], dtype=[torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", CHOSEN)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 64), (520, 200), (33, 96)])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 64, 65, 130, 256])
def test_products_of_few_rows(
    num_rows: int, inputs: int, outputs: int, dtype: torch.dtype, activation: str | None
) -> None:
    x, weight, arrivals = draw(num_rows, inputs, outputs, dtype)
    if DEVICE.type == "cpu":
        is_split = split_linear.num_parts(num_rows, weight) > 1
        config = split_linear.tile_config(num_rows, dtype)
        padded = -(-num_rows // config.block_m) * config.block_m
        assert is_split == (inputs >= 4 * max(config.block_k, padded))
    assert_right(x, weight, arrivals, activation)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter's order")
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("order", ["backwards", "in turns"])
def test_the_order_in_which_parts_arrive_changes_no_bit(order: str, activation: str | None) -> None:
    x, weight, arrivals = draw(5, 2048, 72, torch.float32)
    parts = split_linear.num_parts(5, weight)
    assert parts == 16 and {ORDERS[order](i, parts) for i in range(parts)} == {*range(parts)}
    forwards = assert_right(x, weight, arrivals, activation)
    with programs_in_order(2, order) as ran:
        assert torch.equal(assert_right(x, weight, arrivals, activation), forwards)
    assert ran[:parts] != sorted(ran[:parts])


def test_there_are_programs_for_the_whole_gpu() -> None:
    """Of Qwen3-0.6B's products; one that has enough tiles anyway is not split."""

    def parts(num_rows: int, outputs: int, inputs: int) -> int:
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
        return split_linear.num_parts(num_rows, weight)

    for num_rows, expected in ((1, [4, 8, 2, 8]), (64, [4, 16, 2, 16]), (256, [2, 4, 2, 4])):
        shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
        assert [parts(num_rows, *shape) for shape in shapes] == expected, num_rows
    assert parts(1, 151_936, 1024) == 1
    most = split_work.most_arrivals(torch.device("meta"))
    for num_rows in (1, 16, 17, 64, 65, 256):
        for outputs in range(16, 20_000, 48):
            config = split_linear.tile_config(num_rows, torch.bfloat16)
            tiles = -(-num_rows // config.block_m) * -(-outputs // config.block_n)
            # Of a gated product, tiles have half the outputs of half as many: one more at most.
            assert parts(num_rows, outputs, 8192) == 1 or tiles + tiles % 2 <= most


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": torch.zeros(257, 64)}, "x must have at most 256 rows"),
        ({"x": torch.zeros(2, 65)}, r"x must be \[rows, inputs\]"),
        ({"x": torch.zeros(2, 64).double()}, "both must be float32, float16 or bfloat16"),
        ({"x": torch.zeros(64, 2).T}, "both must be contiguous"),
        ({"weight": torch.zeros(31, 64), "activation": "silu"}, "with an even weight"),
        ({"activation": "relu"}, "activation='relu' must be one of"),
        ({"arrivals": torch.zeros(3, dtype=torch.int32)}, r"arrivals must be int32 \[264\]"),
    ],
)
def test_what_it_cannot_multiply_is_refused(change: dict[str, Any], told: str) -> None:
    given = {"x": torch.zeros(2, 64), "weight": torch.zeros(32, 64)}
    given |= {"arrivals": torch.zeros(1000, dtype=torch.int32)} | change
    with pytest.raises(ValueError, match=told):
        split_linear.split_linear(**given)


# ---------------------------------------------------------------- where it is used


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str | None]]:
    """Rows and activation of the products that are split or gated."""
    seen: list[tuple[int, str | None]] = []

    def look(x: torch.Tensor, weight: Any, arrivals: Any, activation: Any, **options: Any) -> Any:
        seen.append((len(x), activation))
        return split_linear.split_linear(x, weight, arrivals, activation, **options)

    monkeypatch.setattr(triton_ops, "split_linear", look)
    return seen


def test_products_that_gain_nothing_are_the_librarys(products: list[tuple[int, Any]]) -> None:
    """Of many rows, or of so few inputs that they are not split."""
    ops, weight = TritonOps(splits_products=True), torch.randn(64, 2048)
    for num_rows in (3, 256, 257):
        x = torch.randn(num_rows, 2048)
        assert torch.allclose(ops.linear(x, weight), x @ weight.T, atol=1e-3)
        assert torch.equal(TritonOps().linear(x, weight), TorchOps().linear(x, weight))
    ops.linear(torch.randn(3, 64), torch.randn(64, 64))  # two steps
    ops.linear(torch.randn(2048, 3).T, weight)
    assert products == [(3, None), (256, None)]


class Doubled(UnquantizedLinearMethod):
    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().apply(layer, x)


@pytest.mark.parametrize("kind", ["plain", "bias", "another method"])
def test_gated_products_of_other_layers_are_two_kernels(
    kind: str, products: list[tuple[int, Any]]
) -> None:
    method = Doubled() if kind == "another method" else None
    context = LayerContext(ops=TritonOps(splits_products=True), linear_method=method)
    layer = ColumnParallelLinear(512, {"gate": 48, "up": 48}, context, bias=kind == "bias")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(3, 512)
    found = context.ops.gated_product(layer, x, "silu")
    assert torch.allclose(found, TorchOps().act_and_mul(layer(x), "silu"), atol=1e-5)
    gated = [activation for _, activation in products if activation]
    assert gated == (["silu"] if kind == "plain" else [])


@pytest.mark.size("full")  # two engines, of which one is interpreted
def test_an_engines_tokens_are_those_without(
    tmp_path: Path, products: list[tuple[int, Any]], by_size: Callable[..., Any]
) -> None:
    """With drafts, a prefix in the cache, a small pool, and the other variants of kernels."""
    make_qwen3(tmp_path, hidden_size=256, intermediate_size=256)
    prompts = [[1], [2] * 17, list(range(40)), [*range(32), 9], [5, 6, 7, 5, 6, 7, 5]]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=4, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu"}
    options |= {"max_num_seqs": 3, "num_kv_blocks": 7, "max_model_len": 64}
    options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 2}
    found = []
    names = ("split_products", "merge_in_attention", "dependent_launch")
    for kernels in ({}, dict.fromkeys(names, True)):
        backend = {"attention_backend": "triton"} if kernels else {}
        with LLM(tmp_path, **options, **backend, kernel_config=kernels) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    kinds = {activation for _, activation in products}
    assert kinds == {None, "silu"} and min(rows for rows, _ in products) <= 3


def test_a_gpu_is_asked_once_for_its_multiprocessors() -> None:
    assert split_work.num_multiprocessors(torch.device("cpu")) == 132
    assert split_work.num_multiprocessors(torch.device("meta"), 8) == 8
