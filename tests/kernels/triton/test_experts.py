"""Sums of experts, in torch and in Triton, against float64; without a GPU in the interpreter."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from nanoserve.checkpoint.moe_config import PLAIN_SWIGLU, SwiGLU
from nanoserve.kernels.triton import experts as kernels
from nanoserve.kernels.triton.experts import ExpertCodes, fused_experts, tile_config
from nanoserve.models.layers.experts import sum_of_experts, swiglu_and_mul
from nanoserve.models.quantization.gpu_method import expert_codes
from nanoserve.models.quantization.online import quantize_int4, quantize_int8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of a row's norm. In 16 bits there are several roundings; the interpreter truncates bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
IMPLEMENTATIONS = pytest.mark.parametrize("run", [sum_of_experts, fused_experts])


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN and the largest integers: what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Step:
    """The arguments of both implementations."""

    hidden: torch.Tensor
    expert_ids: torch.Tensor
    expert_weights: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    first_expert: int = 0
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    swiglu: SwiGLU = PLAIN_SWIGLU

    def expected(self) -> torch.Tensor:
        """Token by token, in float64."""
        out = torch.zeros_like(self.hidden, dtype=torch.float64)
        for token, ids in enumerate(self.expert_ids.tolist()):
            x = self.hidden[token].double()
            for choice, expert in enumerate(ids):
                if not 0 <= expert - self.first_expert < len(self.down):
                    continue
                here, (alpha, limit, offset) = expert - self.first_expert, self.swiglu
                of_gate_up, of_down = (bias[here].double() for bias in self.biases or self.zeros())
                gate, up = (self.gate_up[here].double() @ x + of_gate_up).chunk(2)
                if limit is not None:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                gated = gate * torch.sigmoid(alpha * gate) * (up + offset)
                product = self.down[here].double() @ gated + of_down
                out[token] += self.expert_weights[token, choice].double() * product
        return out

    def zeros(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate_up.new_zeros(self.gate_up.shape[:2]), self.down.new_zeros(
            self.down.shape[:2]
        )

    def assert_right(self, out: torch.Tensor) -> None:
        expected = self.expected()
        assert out.dtype == self.hidden.dtype and out.is_contiguous()
        errors = (out.double() - expected).norm(dim=1)
        # False for NaN, too; a token without experts here has zeros.
        assert (errors <= TOLERANCE[out.dtype] * expected.norm(dim=1)).all(), errors


def make_step(
    num_tokens: int,
    hidden: int,
    size: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype = torch.float32,
    only: list[int] | None = None,
) -> Step:
    """Random experts of each token, among `only` some; those that nobody chose have NaN weights."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    chosen = only or list(range(num_experts))
    places = torch.rand(num_tokens, len(chosen), device=DEVICE).topk(top_k, dim=-1).indices
    ids = torch.tensor(chosen, device=DEVICE)[places]
    gate_up = randn(num_experts, 2 * size, hidden) / hidden**0.5
    down = randn(num_experts, hidden, size)
    used = torch.isin(torch.arange(num_experts, device=DEVICE), ids)
    gate_up[~used], down[~used] = torch.nan, torch.nan
    weights = torch.rand(num_tokens, top_k, device=DEVICE)
    return Step(randn(num_tokens, hidden), ids, weights, gate_up, down)


def of_rank(step: Step, first: int, end: int) -> Step:
    """What a rank has that owns the experts [first, end)."""
    return replace(
        step,
        gate_up=step.gate_up[first:end].clone(),
        down=step.down[first:end].clone(),
        biases=None if step.biases is None else tuple(b[first:end].clone() for b in step.biases),
        first_expert=first,
    )


# The smallest and the largest tiles; sizes that these divide, and sizes that they do not.
SHAPES = {
    "one token": (1, 40, 24, 2, 5),
    "few pairs": (9, 128, 64, 3, 7),
    "off the tile": (23, 130, 70, 2, 6),
    "one expert": (37, 70, 33, 1, 1),
    "many pairs": (150, 70, 40, 2, 3),
    "many experts": (5, 24, 17, 8, 70),
    "a thousand pairs and more": (700, 20, 9, 2, 3),
}


@pytest.mark.small(dtype=[torch.float32], name=["one token", "off the tile", "many pairs"])
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_random_experts(name: str, dtype: torch.dtype, run: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(len(name))
    step = make_step(*SHAPES[name], dtype=dtype)
    step.assert_right(run(**vars(step)))


def test_the_shapes_meet_both_tile_configurations() -> None:
    for dtype in DTYPES:
        small, large = tile_config(1, 1, dtype), tile_config(10**6, 1, dtype)
        used = {tile_config(t * k, e, dtype) for t, _, _, k, e in SHAPES.values()}
        assert used == {small, large} and small.block_m < large.block_m


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [20, pytest.param(200, marks=pytest.mark.size("full"))])
@pytest.mark.small(only=[[4], [2, 5]])
@pytest.mark.parametrize("only", [[4], [0], [2, 5], [1, 2, 3]])
def test_experts_that_nobody_chose(
    only: list[int], num_tokens: int, run: Callable[..., torch.Tensor]
) -> None:
    """Whether it is one expert that takes all tokens, or the first or the last has none."""
    torch.manual_seed(num_tokens)
    step = make_step(num_tokens, 24, 20, top_k=1, num_experts=6, only=only)
    step.assert_right(run(**vars(step)))


@IMPLEMENTATIONS
@pytest.mark.small(bounds=[(0, 2), (3, 5), (1, 4)])
@pytest.mark.parametrize("num_tokens", [3, pytest.param(100, marks=pytest.mark.size("full"))])
@pytest.mark.parametrize("bounds", [(0, 2), (2, 3), (3, 5), (1, 4)])
def test_experts_of_other_ranks_are_left_to_them(
    bounds: tuple[int, int], num_tokens: int, run: Callable[..., torch.Tensor]
) -> None:
    torch.manual_seed(num_tokens)
    step = of_rank(make_step(num_tokens, 40, 24, top_k=2, num_experts=5), *bounds)
    step.assert_right(run(**vars(step)))


@IMPLEMENTATIONS
def test_a_rank_without_experts_or_tokens_for_them_adds_nothing(
    run: Callable[..., torch.Tensor],
) -> None:
    step = make_step(7, 16, 8, top_k=2, num_experts=5, only=[0, 1, 2])
    for bounds in ((5, 5), (3, 5)):
        assert torch.equal(run(**vars(of_rank(step, *bounds))), torch.zeros_like(step.hidden))


@IMPLEMENTATIONS
def test_the_ranks_together_have_the_sum(run: Callable[..., torch.Tensor]) -> None:
    step = make_step(30, 40, 24, top_k=3, num_experts=7)
    parts = [run(**vars(of_rank(step, *bounds))) for bounds in ((0, 2), (2, 4), (4, 7))]
    step.assert_right(sum(parts))


@pytest.mark.small(num_experts=[None, 1000])
@pytest.mark.parametrize("num_experts", [None, 3, 1000])
def test_how_many_experts_other_ranks_have_changes_tiles_only(num_experts: int | None) -> None:
    step = make_step(60, 40, 24, top_k=2, num_experts=3)
    step.assert_right(fused_experts(**vars(step), num_experts=num_experts))


@IMPLEMENTATIONS
def test_a_token_does_not_depend_on_its_neighbours(run: Callable[..., torch.Tensor]) -> None:
    step = make_step(120, 40, 24, top_k=2, num_experts=4)
    together = run(**vars(step))
    per_token = {"hidden", "expert_ids", "expert_weights"}
    for token in (0, 61, 119):
        alone = {n: x[token : token + 1] if n in per_token else x for n, x in vars(step).items()}
        torch.testing.assert_close(run(**alone)[0], together[token], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_and_weights_of_any_type(dtype: torch.dtype) -> None:
    step = make_step(9, 40, 24, top_k=2, num_experts=4)
    ids, weights = step.expert_ids.to(dtype), step.expert_weights.bfloat16()
    step = replace(step, expert_ids=ids, expert_weights=weights)
    step.assert_right(fused_experts(**vars(step)))


@pytest.mark.parametrize("num_pairs", [1, 8, 63, 64, 65, 1000, 16_384])
@pytest.mark.parametrize("num_experts", [1, 3, 128])
def test_the_grid_has_room_for_the_most_tiles_that_there_can_be(
    num_pairs: int, num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the most when all experts but one have a single pair."""
    grids = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            return lambda *args, **kwargs: grids.append((grid, kwargs["BLOCK_M"]))

    monkeypatch.setattr(kernels, "_product_kernel", Recorder())
    out, x = torch.empty(num_pairs, 64), torch.empty(num_pairs, 8)
    weight = torch.empty(num_experts, 64, 8)
    for config in (tile_config(1, 1, x.dtype), tile_config(10**6, 1, x.dtype)):
        kernels._product(out, x, weight, kernels._Pairs(x, x), config, {"IS_DEPENDENT": False})
        (num_tiles, _), block_m = grids.pop()
        most = 0
        for num_used in range(1, min(num_experts, num_pairs) + 1):
            loads = [1] * (num_used - 1) + [num_pairs - num_used + 1]
            most = max(most, sum(-(-load // block_m) for load in loads))
        assert num_tiles == most


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 1, 8)}, "dimensions"),
        ({"hidden": torch.zeros(4, 8)}, r"for each token.*\[4, 8\].*\[3, 2\]"),
        ({"hidden": torch.zeros(3, 9)}, r"gate_up must be.*\[3, 9\]"),
        ({"hidden": torch.zeros(8, 3).T}, "hidden must be contiguous"),
        ({"hidden": torch.zeros(3, 8, dtype=torch.float64)}, "float64"),
        ({"expert_ids": torch.zeros(3, 1, dtype=torch.int64)}, "one row for each token"),
        ({"expert_ids": torch.zeros(3, 2)}, "int32 or int64"),
        ({"expert_weights": torch.zeros(2, 2)}, "one row for each token"),
        ({"expert_weights": torch.zeros(3, 2, dtype=torch.int64)}, "must be floating"),
        ({"gate_up": torch.zeros(5, 12, 8)}, "gate_up must be"),
        ({"gate_up": torch.zeros(4, 11, 8)}, "gate_up must be"),
        (
            {"gate_up": torch.zeros(4, 12, 8, dtype=torch.float16)},
            "share one of float32, float16, bfloat16",
        ),
        ({"down": torch.zeros(4, 8, 7)}, "gate_up must be"),
        ({"down": torch.zeros(4, 6, 8).transpose(1, 2)}, "down must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "hidden": torch.zeros(3, 8),
        "expert_ids": torch.zeros(3, 2, dtype=torch.int64),
        "expert_weights": torch.zeros(3, 2),
        "gate_up": torch.zeros(4, 12, 8),
        "down": torch.zeros(4, 8, 6),
    }
    with pytest.raises(ValueError, match=message):
        fused_experts(**(arguments | change))


# ---------------------------------------------------------------- biases and other gates


def with_biases(step: Step, *, has_swiglu: bool = True) -> Step:
    """The gate is clamped for many, from both sides."""
    biases = tuple(torch.randn_like(zeros) for zeros in step.zeros())
    swiglu = SwiGLU(1.702, 0.7, 1.0) if has_swiglu else PLAIN_SWIGLU
    return replace(step, biases=biases, swiglu=swiglu)


@pytest.mark.small(dtype=[torch.float32], name=["off the tile"])
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_biases_and_a_clamped_gate(
    name: str, dtype: torch.dtype, run: Callable[..., torch.Tensor]
) -> None:
    torch.manual_seed(len(name))
    step = with_biases(make_step(*SHAPES[name], dtype=dtype))
    out = run(**vars(step))
    if dtype == torch.float32:
        step.assert_right(out)
    else:  # a bias may be far larger than what is rounded before it
        expected = step.expected()
        errors = (out.double() - expected).norm(dim=1)
        assert (errors <= 2 * TOLERANCE[dtype] * (1 + expected.norm(dim=1))).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("swiglu", [(1.0, None, 0.5), (2.0, None, 0.0), (1.0, 0.3, 0.0)])
def test_each_constant_of_a_gate(
    swiglu: tuple[float, float | None, float], run: Callable[..., torch.Tensor]
) -> None:
    step = replace(make_step(9, 40, 24, top_k=2, num_experts=4), swiglu=SwiGLU(*swiglu))
    step.assert_right(run(**vars(step)))


@IMPLEMENTATIONS
def test_the_ranks_together_have_each_bias_once(run: Callable[..., torch.Tensor]) -> None:
    step = with_biases(make_step(30, 40, 24, top_k=3, num_experts=7))
    parts = [run(**vars(of_rank(step, *bounds))) for bounds in ((0, 2), (2, 4), (4, 7))]
    step.assert_right(sum(parts))


@IMPLEMENTATIONS
def test_a_clamped_gate_hides_no_nan(run: Callable[..., torch.Tensor]) -> None:
    step = with_biases(make_step(3, 40, 24, top_k=2, num_experts=4))
    step.hidden[1] = torch.nan
    out = run(**vars(step))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_the_compiled_gate_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="pip install 'nanoserve[cpu]'")
    from nanoserve.models.layers.numba_ops import NumbaOps

    step = with_biases(make_step(9, 40, 24, top_k=2, num_experts=4))
    step.assert_right(sum_of_experts(**vars(step), ops=NumbaOps()))
    gate_up = 20 * torch.randn(5, 64)
    gate_up[2, 7] = gate_up[3, 40] = torch.nan
    wanted, found = swiglu_and_mul(gate_up, step.swiglu), []
    for few in (2**30, 0):
        monkeypatch.setattr("nanoserve.kernels.cpu.ops.FEW", few)
        found.append(NumbaOps().swiglu(gate_up, step.swiglu))
        torch.testing.assert_close(found[-1], wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())


def test_biases_that_do_not_fit_are_refused() -> None:
    step = with_biases(make_step(3, 24, 8, top_k=2, num_experts=5))
    for change in (step.biases[::-1], tuple(bias.bfloat16() for bias in step.biases)):
        with pytest.raises(ValueError, match="a bias must be"):
            fused_experts(**vars(replace(step, biases=change)))


# ---------------------------------------------------------------- weights in 8 bits


def in_codes(weight: torch.Tensor) -> tuple[ExpertCodes, torch.Tensor]:
    """And what they stand for, in float64."""
    matrix = quantize_int8(weight.flatten(0, 1))
    codes = expert_codes(matrix.split(weight.shape[1]))
    return codes, (matrix.codes.double() * matrix.scale.double()).view(weight.shape)


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_tokens", [9, pytest.param(150, marks=pytest.mark.size("full"))])
def test_experts_of_codes(num_tokens: int, run: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(num_tokens)
    step = make_step(num_tokens, 70, 33, top_k=2, num_experts=3)
    (gate_up, plain_gate_up), (down, plain_down) = in_codes(step.gate_up), in_codes(step.down)
    out = run(**vars(replace(step, gate_up=gate_up, down=down)))
    replace(step, gate_up=plain_gate_up, down=plain_down).assert_right(out)


def test_other_codes_of_experts_become_int8() -> None:
    weight = torch.randn(2 * 6, 64)
    codes = expert_codes(quantize_int4(weight, 32).split(6))
    assert codes.codes.dtype == torch.int8 and codes.codes.shape == (2, 6, 64)
    found = (codes.codes * codes.scale[..., None]).flatten(0, 1)
    wanted = quantize_int4(weight, 32).dequantize()
    assert ((found - wanted).abs() <= wanted.abs().amax(dim=1, keepdim=True) / 253).all()


def test_codes_without_their_scales_are_refused() -> None:
    with pytest.raises(ValueError, match=r"for each output.*\[2, 3\]"):
        ExpertCodes(torch.zeros(2, 4, 8, dtype=torch.int8), torch.zeros(2, 3))
