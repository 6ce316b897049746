"""Products of quantized weights in Triton against float64; without a GPU in the interpreter."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.kernels.triton import grouped_linear, quantized_linear
from nanoserve.kernels.triton.grouped_linear import grouped_product, pack_groups
from nanoserve.kernels.triton.quantized_linear import scaled_product
from nanoserve.kernels.triton.quantized_rows import GROUP_SIZES, quantize_rows
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.models.quantization.gpu_method import QuantizedLinearMethod
from nanoserve.models.quantization.online import quantize_fp8, quantize_int8
from nanoserve.models.quantization.schemes import Scheme

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of a row's norm; 16 bits round weights, sums or both, and the interpreter truncates bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
CODE_DTYPES = [torch.int8, torch.float8_e4m3fn]


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    errors = (found.double() - expected).norm(dim=1)
    assert (errors <= tolerance * expected.norm(dim=1)).all(), errors  # false for NaN, too


# ---------------------------------------------------------------- rows of activations


@pytest.mark.parametrize("inputs", [7, 300, 2049])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_of_rows_are_the_nearest(dtype: torch.dtype, inputs: int) -> None:
    x = torch.randn(4, inputs, device=DEVICE).to(dtype)
    x[1] *= 1e4
    x[2] = 0
    codes, scales = quantize_rows(x, torch.int8)
    wanted = x.float().abs().amax(dim=1) / 127
    wanted[2] = 2.0**-126
    torch.testing.assert_close(scales, wanted, rtol=2e-7, atol=0)
    assert torch.equal(codes, (x.float() / scales[:, None]).round().to(torch.int8))
    assert codes.abs().amax(dim=1).tolist() == [127, 127, 0, 127]
    eighth, scales = quantize_rows(x, torch.float8_e4m3fn)
    # Torch's own rounding to e4m3.
    assert torch.equal(
        eighth.float(), (x.float() / scales[:, None]).to(torch.float8_e4m3fn).float()
    )


@pytest.mark.parametrize("code_dtype", CODE_DTYPES)
def test_what_is_not_finite_stays_in_its_row(code_dtype: torch.dtype) -> None:
    x = torch.randn(5, 300, device=DEVICE)
    wanted = quantize_rows(x, code_dtype)
    x[1, 299], x[3, 0], x[4, 7] = torch.nan, torch.inf, -torch.inf
    codes, scales = quantize_rows(x, code_dtype)
    assert scales.isnan().tolist() == [False, True, False, True, True]
    for row in (0, 2):
        assert torch.equal(codes[row].float(), wanted[0][row].float())
        assert scales[row] == wanted[1][row]
    weight, weight_scale = quantize_rows(torch.randn(6, 300, device=DEVICE), code_dtype)
    product = scaled_product(codes, scales, weight, weight_scale, torch.float32)
    assert product.isnan().all(dim=1).tolist() == [False, True, False, True, True]
    assert product[[0, 2]].isfinite().all()


def test_the_largest_of_other_ranks_counts() -> None:
    x = torch.randn(3, 40, device=DEVICE)
    elsewhere = torch.tensor([9.0, 0.0, torch.nan], device=DEVICE)
    codes, scales = quantize_rows(x, torch.int8, elsewhere)
    alone_codes, alone_scales = quantize_rows(x, torch.int8)
    whole = torch.cat([x, elsewhere[:, None]], dim=1)
    whole_codes, whole_scales = quantize_rows(whole, torch.int8)
    assert torch.equal(codes[:2], whole_codes[:2, :40]) and torch.equal(
        scales[:2], whole_scales[:2]
    )
    assert torch.equal(codes[1], alone_codes[1]) and scales[1] == alone_scales[1]
    assert scales[2].isnan()


@pytest.mark.small(inputs=[300])
@pytest.mark.parametrize("inputs", [7, 300, 2049])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_codes_of_groups_are_the_nearest(group_size: int, inputs: int) -> None:
    """The last group may have fewer inputs; what is not finite stays in its group."""
    x = torch.randn(4, inputs, device=DEVICE) * 10 ** torch.randn(inputs, device=DEVICE)
    x[1] = 0
    x[2, inputs - 1], x[3, 0] = torch.nan, -torch.inf
    codes, scales = quantize_rows(x, torch.int8, group_size=group_size)
    padded = torch.nn.functional.pad(x, (0, -inputs % group_size))
    largest = padded.unflatten(1, (-1, group_size)).abs().amax(dim=2)
    wanted = (largest / 127).clamp(min=2.0**-126)
    is_finite = largest.isfinite()
    assert scales.shape == wanted.shape and (scales.isnan() == ~is_finite).all()
    torch.testing.assert_close(scales[is_finite], wanted[is_finite], rtol=2e-7, atol=0)
    each = scales.repeat_interleave(group_size, dim=1)[:, :inputs]
    nearest = (x / each).round().nan_to_num(0.0)
    assert torch.equal(codes, nearest.where(each.isfinite(), 0).to(torch.int8))


# ---------------------------------------------------------------- codes by codes


def exact(x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: Any) -> torch.Tensor:
    return (x.double() @ w.double().T) * x_scale.double()[:, None] * w_scale.double()


@pytest.mark.parametrize(
    "shape",
    [
        (1, 33, 300),
        pytest.param((5, 70, 96), marks=pytest.mark.size("full")),
        (17, 65, 130),
        pytest.param((130, 129, 40), marks=pytest.mark.small(code_dtype=[torch.int8])),
    ],
    ids=str,
)
@pytest.mark.parametrize("code_dtype", CODE_DTYPES)
def test_products_of_codes(code_dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    rows, outputs, inputs = shape
    x, x_scale = quantize_rows(torch.randn(rows, inputs, device=DEVICE), code_dtype)
    weight, scale = quantize_rows(torch.randn(outputs, inputs, device=DEVICE), code_dtype)
    if code_dtype == torch.int8:
        x[0], weight[0], weight[1] = -128, -128, 127  # the whole range
    found = scaled_product(x, x_scale, weight, scale, torch.float32)
    assert_near(found, exact(x, x_scale, weight, scale), 1e-6)
    assert_near(scaled_product(x, x_scale, weight, scale, torch.float16), found.double(), 1e-3)


@pytest.mark.small(group_size=[32], shape=[(17, 65, 130), (1, 33, 300)])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("shape", [(1, 33, 300), (17, 65, 130), (130, 129, 40)], ids=str)
def test_products_of_codes_in_groups(shape: tuple[int, int, int], group_size: int) -> None:
    rows, outputs, inputs = shape
    x = torch.randn(rows, inputs, device=DEVICE) * 10 ** torch.randn(inputs, device=DEVICE)
    x, x_scale = quantize_rows(x, torch.int8, group_size=group_size)
    weight, scale = quantize_rows(torch.randn(outputs, inputs, device=DEVICE), torch.int8)
    x[0], weight[0], weight[1] = -128, -128, 127  # the whole range
    found = scaled_product(x, x_scale, weight, scale, torch.float32, group_size)
    rounded = x.double() * x_scale.double().repeat_interleave(group_size, dim=1)[:, :inputs]
    assert_near(found, rounded @ (weight.double() * scale.double()[:, None]).T, 1e-6)


def test_the_shapes_meet_all_tile_configurations() -> None:
    for config in (
        quantized_linear.tile_config,
        lambda n: quantized_linear.tile_config(n, 32),
        lambda n: grouped_linear.tile_config(n, DTYPES[1]),
    ):
        assert len({config(rows) for rows in (1, 17, 130)}) == 3
        assert {config(rows) for rows in range(1, 300)} == {config(n) for n in (1, 17, 130)}


def test_sums_that_float32_could_not_hold_are_exact() -> None:
    """2048 x 127 x 127 is above 2^25: in float32 the 1 that is added to it would be lost."""
    weight = torch.zeros(1, 2048 + 256 + 2048, dtype=torch.int8, device=DEVICE)
    weight[0, :2048], weight[0, 2048], weight[0, -2048:] = 127, 1, -127
    x = weight.abs()
    one = torch.ones(1, device=DEVICE)
    assert scaled_product(x, one, weight, one, torch.float32).item() == 1


@pytest.mark.small(num_rows=[20], group_size=[32])
@pytest.mark.parametrize("group_size", [None, 32, 128])
@pytest.mark.parametrize("num_rows", [2, 20, 140])
def test_a_row_of_integers_does_not_depend_on_its_neighbours(
    num_rows: int, group_size: int | None
) -> None:
    """Bit for bit, whatever the tiles."""
    x = torch.randn(num_rows, 130, device=DEVICE)
    weight, scale = quantize_rows(torch.randn(40, 130, device=DEVICE), torch.int8)

    def product(rows: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize_rows(rows, torch.int8, group_size=group_size)
        return scaled_product(codes, scales, weight, scale, torch.float32, group_size)

    together = product(x)
    for row in (0, num_rows // 2, num_rows - 1):
        assert torch.equal(product(x[row : row + 1])[0], together[row])


def test_no_rows() -> None:
    x, scale = quantize_rows(torch.empty(0, 64, device=DEVICE), torch.int8)
    weight, weight_scale = quantize_rows(torch.randn(8, 64, device=DEVICE), torch.int8)
    assert scaled_product(x, scale, weight, weight_scale, torch.float32).shape == (0, 8)
    grouped = pack_groups(weight, weight_scale[:, None])
    assert grouped_product(torch.empty(0, 64, device=DEVICE), grouped).shape == (0, 8)


class ScaledMM:
    """Stands in for `torch._scaled_mm`, which a CPU has too, and refuses some of its products."""

    def __init__(self, refuses: Callable[[int, int], bool] = lambda rows, inputs: False) -> None:
        self.calls: list[tuple[int, int]] = []
        self._refuses, self._scaled_mm = refuses, torch._scaled_mm

    def __call__(self, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        # What CUDA's wants: a in rows, b in columns, a float32 scale for each, contiguous.
        (rows, inputs), outputs = a.shape, b.shape[1]
        assert a.stride() == (inputs, 1) and b.stride() == (1, inputs)
        assert options["scale_a"].shape == (rows, 1) and options["scale_b"].shape == (1, outputs)
        assert options["scale_a"].is_contiguous() and options["scale_b"].is_contiguous()
        assert options["use_fast_accum"] is False
        self.calls.append((rows, inputs))
        if self._refuses(rows, inputs):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLt\n...")
        return self._scaled_mm(a, b, **options)


def linear_of_e4m3(
    inputs: int, outputs: int, scaled_mm: ScaledMM, monkeypatch: pytest.MonkeyPatch
) -> RowParallelLinear:
    """Loaded anew, whatever was tried before."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(quantized_linear, "_least_rows", {})
    method = QuantizedLinearMethod(Scheme(8, is_fp8=True), DEVICE, torch.bfloat16)
    context = LayerContext(dtype=torch.bfloat16, linear_method=method)
    layer = RowParallelLinear(inputs, outputs, context)
    return filled(layer, method, torch.randn(outputs, inputs, device=DEVICE))


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (64, 40), (40, 48)])
def test_e4m3_in_bfloat16_is_torchs_product(
    inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch takes the sizes, and with so many rows that it is faster."""
    scaled_mm = ScaledMM()
    monkeypatch.setattr(quantized_linear, "_TRIED_ROWS", (5, 6))
    layer = linear_of_e4m3(inputs, outputs, scaled_mm, monkeypatch)
    scaled_mm.calls.clear()
    for rows in (5, 4):
        x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
        found = layer(x)
        assert found.dtype == torch.bfloat16
        codes, x_scale = quantize_rows(x, torch.float8_e4m3fn)
        assert_near(found, exact(codes, x_scale, layer.form.codes, layer.form.scale), 1e-2)
    assert scaled_mm.calls == [(5, inputs)] * (inputs + outputs == 112)


@pytest.mark.parametrize(
    ("refuses", "least"),
    [
        (lambda rows, inputs: inputs >= 96 and rows <= 8, 9),  # as on Hopper, but for the numbers
        (lambda rows, inputs: True, quantized_linear.NEVER),
        (lambda rows, inputs: rows == 1, 3),
        (lambda rows, inputs: rows % 2 == 1, quantized_linear.NEVER),
    ],
    ids=["many inputs with few rows", "all", "one row", "odd numbers of rows"],
)
def test_what_torch_refuses_is_multiplied_here(
    refuses: Callable[[int, int], bool],
    least: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is asked while loading, and never again: a refusal would spoil a graph's capture."""
    caplog.set_level("INFO", logger="nanoserve")
    monkeypatch.setattr(quantized_linear, "_TRIED_ROWS", (1, 3, 8, 9, 10, 11))
    scaled_mm = ScaledMM(refuses)
    layer = linear_of_e4m3(96, 32, scaled_mm, monkeypatch)
    assert layer.form.scaled_mm_from == least
    (told,) = caplog.messages
    own = "any number" if least == quantized_linear.NEVER else f"up to {least - 1}"
    assert f"96 inputs, 32 outputs and {scaled_mm.calls[-1][0]} rows" in told
    assert f"used for {own}" in told and told.endswith("NOT_SUPPORTED when calling cublasLt")
    for rows in (1, 3, 8, 9):
        scaled_mm.calls.clear()
        x = torch.randn(rows, 96, device=DEVICE).bfloat16()
        found = layer(x)
        codes, x_scale = quantize_rows(x, torch.float8_e4m3fn)
        assert_near(found, exact(codes, x_scale, layer.form.codes, layer.form.scale), 1e-2)
        assert scaled_mm.calls == [(rows, 96)] * (rows >= least)


def test_each_pair_of_sizes_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_mm = ScaledMM()
    layer = linear_of_e4m3(96, 32, scaled_mm, monkeypatch)
    tried = [(rows, 96) for rows in reversed(quantized_linear._TRIED_ROWS)]
    assert {(129, 96), (256, 96), (257, 96)} < set(tried)
    assert layer.form.scaled_mm_from == 129 and scaled_mm.calls == tried
    form = layer.form
    rows_of = quantized_linear.least_scaled_mm_rows
    assert rows_of(form.codes, form.scale, torch.bfloat16) == 129
    assert scaled_mm.calls == tried
    # Other results than bfloat16 are not even asked for.
    assert rows_of(form.codes, form.scale, torch.float16) == quantized_linear.NEVER
    assert rows_of(form.codes[:16].contiguous(), form.scale[:16], torch.bfloat16) == 129
    assert len(scaled_mm.calls) == 2 * len(tried)


def test_out_of_memory_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_memory(*args: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "_scaled_mm", has_no_memory)
    monkeypatch.setattr(quantized_linear, "_least_rows", {})
    weight, scale = quantize_rows(torch.randn(32, 96, device=DEVICE), torch.float8_e4m3fn)
    with pytest.raises(torch.OutOfMemoryError):
        quantized_linear.least_scaled_mm_rows(weight, scale, torch.bfloat16)


# ---------------------------------------------------------------- groups


def random_matrix(
    outputs: int, inputs: int, group: int, bits: int, has_offset: bool
) -> QuantizedMatrix:
    """Codes of the whole range, scales of either sign and of very different sizes."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(low, high, (outputs, inputs), dtype=torch.int8, device=DEVICE)
    shape = (outputs, inputs // group)
    scale = torch.randn(shape, device=DEVICE) * 10 ** torch.rand(shape, device=DEVICE)
    offset = torch.randn(shape, device=DEVICE) * 3 if has_offset else None
    return QuantizedMatrix(codes, scale, offset, bits=bits)


@pytest.mark.small(dtype=[torch.float32], has_offset=[True], group=[16, 32, 128])
@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize(
    ("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 128), (4, 16)]
)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.full(group=[32])),
        pytest.param(torch.float16, marks=pytest.mark.full(group=[128])),
    ],
)
def test_products_of_groups(dtype: torch.dtype, bits: int, group: int, has_offset: bool) -> None:
    for rows, outputs, num_groups in ((1, 33, 3), (18, 70, 2), (130, 65, 1)):
        matrix = random_matrix(outputs, num_groups * group, group, bits, has_offset)
        x = torch.randn(rows, num_groups * group, device=DEVICE).to(dtype)
        found = grouped_product(x, pack_groups(*matrix.operands()))
        assert found.dtype == dtype
        assert_near(found, x.double() @ matrix.dequantize().double().T, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("bits", "inputs", "groups"), [(4, 50, 1), (4, 36, 2), (4, 33, 1), (8, 33, 3)]
)
def test_groups_of_odd_sizes(bits: int, inputs: int, groups: int) -> None:
    matrix = random_matrix(9, inputs, inputs // groups, bits, True)
    x = torch.randn(3, inputs, device=DEVICE)
    assert_near(
        grouped_product(x, pack_groups(*matrix.operands())),
        x.double() @ matrix.dequantize().double().T,
        2e-6,
    )


@pytest.mark.small(dtype=[torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_products_with_a_scale_per_output(kind: str, dtype: torch.dtype) -> None:
    """Every code but NaN's, in another order for each output."""
    codes = torch.arange(-128, 128, device=DEVICE).to(torch.int8)
    if kind == "e4m3":
        codes = codes[codes.view(torch.float8_e4m3fn).float().isfinite()]
    codes = torch.stack([codes[torch.randperm(len(codes))] for _ in range(40)])
    scale = torch.randn(40, 1, device=DEVICE)
    matrix = QuantizedMatrix(codes, scale, is_e4m3=kind == "e4m3")
    for rows in (1, 18, 130):
        x = torch.randn(rows, codes.shape[1], device=DEVICE).to(dtype)
        found = grouped_product(x, pack_groups(*matrix.operands()))
        assert_near(found, x.double() @ matrix.dequantize().double().T, TOLERANCE[dtype])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_few_rows_share_the_gpu_by_parts_of_the_inputs(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of unequal sizes, too: 9 steps or 18 in 4 parts."""
    found: list[int] = []
    num_parts = grouped_linear._num_parts
    monkeypatch.setattr(
        grouped_linear, "_num_parts", lambda *args: found.append(num_parts(*args)) or found[-1]
    )
    inputs = 36 * 32 if bits == 4 else 18 * 32
    matrix = random_matrix(40, inputs, 32, bits, True)
    x = torch.randn(3, inputs, device=DEVICE)
    product = grouped_product(x, pack_groups(*matrix.operands()))
    assert found == [4]
    assert_near(product, x.double() @ matrix.dequantize().double().T, 2e-6)


def test_int4_takes_half_a_byte() -> None:
    weight = pack_groups(*random_matrix(6, 64, 32, 4, False).operands())
    assert weight.codes.nbytes == 6 * 32 and weight.inputs == 64


@pytest.mark.parametrize(
    ("codes", "scale", "offset"),
    [
        (torch.zeros(6, 64), torch.ones(6, 2), None),
        (torch.zeros(6, 64, dtype=torch.int8), torch.ones(6), None),
        (torch.zeros(6, 64, dtype=torch.int8), torch.ones(5, 2), None),
        (torch.zeros(6, 64, dtype=torch.int8), torch.ones(6, 3), None),
        (torch.zeros(6, 64, dtype=torch.int8), torch.ones(6, 2), torch.ones(6, 1)),
    ],
    ids=["floats", "flat scales", "other outputs", "unequal groups", "other offsets"],
)
def test_weights_that_do_not_fit_are_refused(
    codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None
) -> None:
    with pytest.raises(ValueError, match="must be"):
        pack_groups(codes, scale, offset)


# ---------------------------------------------------------------- layers


def filled(layer: Any, method: QuantizedLinearMethod, weight: torch.Tensor) -> Any:
    made = method.to_integers(weight, False)
    if isinstance(layer, RowParallelLinear):
        start = layer.tp.rank * layer.part
        made = made.columns(start, start + layer.part)
    method.fill(layer, "weight", made)
    layer.process_after_loading()
    return layer


def split_over_two(method: QuantizedLinearMethod, inputs: int, group: Any) -> None:
    """One after the other; the largest values of a row lie on the second only."""
    half = inputs // 2
    x = torch.randn(5, inputs, device=DEVICE)
    x[:, half:] *= 20
    weight = torch.randn(30, inputs, device=DEVICE)
    weight[:, half:] *= 3
    alone = RowParallelLinear(inputs, 30, LayerContext(linear_method=method))
    expected = filled(alone, method, weight)(x)
    layers = []
    for rank in range(2):
        parallel = ParallelContext(TensorParallel(rank, 2, group))
        context = LayerContext(parallel=parallel, linear_method=method)
        layers.append(filled(RowParallelLinear(inputs, 30, context), method, weight))
    parts = [part.contiguous() for part in x.split(half, dim=1)]
    if hasattr(group, "seen"):  # the first time through is for what ranks tell each other
        for layer, part in zip(layers, parts, strict=True):
            layer(part)
        group.seen = [torch.stack(group.seen).amax(dim=0)] * 2
    products = [layer(part) for layer, part in zip(layers, parts, strict=True)]
    torch.testing.assert_close(sum(products), expected, rtol=2e-6, atol=1e-4)


class Ranks:
    """Two ranks that run one after the other."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.told = 0

    def all_reduce(self, x: torch.Tensor) -> None:
        """The test adds."""

    def largest(self, x: torch.Tensor) -> None:
        if self.told < 2:
            self.seen.append(x.clone())
        else:
            x.copy_(self.seen[0])
        self.told += 1


@pytest.mark.parametrize("inputs", [128, 96, 72])
def test_split_inputs_get_the_codes_of_the_whole(inputs: int) -> None:
    """e4m3 has one scale for a row; ranks with 48 or 36 inputs cut a group of 32."""
    fp8 = QuantizedLinearMethod(Scheme(8, is_fp8=True), DEVICE, torch.float32)
    split_over_two(fp8, inputs, Ranks())
    if inputs % 64:
        int8 = QuantizedLinearMethod(Scheme(8), DEVICE, torch.float32, "int8")
        split_over_two(int8, inputs, Ranks())


@pytest.mark.parametrize(
    ("scheme", "activations"),
    [
        (Scheme(8), None),
        (Scheme(8), "int8"),
        (Scheme(8, is_fp8=True), "none"),
        (Scheme(4), None),
    ],
    ids=str,
)
def test_ranks_with_whole_groups_ask_each_other_nothing(
    scheme: Scheme, activations: str | None
) -> None:
    method = QuantizedLinearMethod(scheme, DEVICE, torch.float32, activations)
    split_over_two(method, 128, SimpleNamespace(all_reduce=lambda y: None))


def test_a_rows_large_input_leaves_the_others_their_bits() -> None:
    """As real models have it: some inputs are thousands of times larger than the median."""
    torch.manual_seed(3)
    weight = torch.randn(40, 256, device=DEVICE)
    weight[:, 7] = 0  # or nothing else would count
    x = torch.randn(6, 256, device=DEVICE)
    x[:, 7] = 2e4
    errors = {}
    for name, scheme, activations in (
        ("floats", Scheme(8), None),
        ("int8", Scheme(8), "int8"),
        ("fp8", Scheme(8, is_fp8=True), None),
        ("fp8, floats", Scheme(8, is_fp8=True), "none"),
    ):
        method = QuantizedLinearMethod(scheme, DEVICE, torch.float32, activations)
        layer = ColumnParallelLinear(256, {"a": 40}, LayerContext(linear_method=method))
        found = filled(layer, method, weight)(x)
        errors[name] = ((found - x @ weight.T).norm() / (x @ weight.T).norm()).item()
    rows = quantize_rows(x, torch.int8)  # with a scale per row, nothing is left
    assert rows[0].count_nonzero() == len(x)
    # The 31 neighbours of the large one, an eighth of all inputs, are lost with its scale.
    assert errors["floats"] < 0.02 < errors["int8"] < 0.45
    assert errors["fp8, floats"] < errors["fp8"] < 0.1


@pytest.mark.parametrize("scheme", [Scheme(4), Scheme(8, is_fp8=True)], ids=str)
def test_int8_activations_want_int8_weights(scheme: Scheme) -> None:
    method = QuantizedLinearMethod(scheme, DEVICE, torch.float32, "int8")
    layer = ColumnParallelLinear(64, {"a": 5}, LayerContext(linear_method=method))
    with pytest.raises(ValueError, match=r"quantization_activations='int8' .*(4-bit|e4m3)"):
        filled(layer, method, torch.randn(5, 64, device=DEVICE))


@pytest.mark.parametrize(
    ("scheme", "make"),
    [(Scheme(8), quantize_int8), (Scheme(8, is_fp8=True), quantize_fp8)],
    ids=["int8", "fp8"],
)
def test_weights_are_made_in_pieces(
    scheme: Scheme, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.models.quantization.gpu_method._MAX_VALUES", 100)
    weight = torch.randn(7, 40, device=DEVICE)
    made = QuantizedLinearMethod(scheme, DEVICE, torch.float32).to_integers(weight, False)
    assert torch.equal(made.codes, make(weight).codes)
    assert torch.equal(made.scale, make(weight).scale)


def test_fp8_weights_are_torchs_rounding() -> None:
    weight = torch.randn(9, 50) * 10 ** torch.randn(9, 1)
    weight[4] = 0
    weight[5, 3] = torch.inf
    found = quantize_fp8(weight).dequantize()
    rest = [0, 1, 2, 3, 6, 7, 8]
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    wanted = (weight / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(found[rest], wanted[rest])
    assert found[4].eq(0).all() and found[5].isnan().all()
    error = (found - weight)[rest].abs()
    assert (error <= weight[rest].abs() / 16 + scale[rest] * 2.0**-10).all()


def test_what_does_not_fit_is_refused() -> None:
    x, scale = torch.zeros(3, 32, dtype=torch.int8), torch.zeros(3)
    weight, weight_scale = torch.zeros(5, 32, dtype=torch.int8), torch.zeros(5)
    for change, message in (
        ({"weight": weight[:, :8]}, r"\[rows, inputs\].*\[5, 8\]"),
        ({"weight": weight.view(torch.float8_e4m3fn)}, "both int8 or both"),
        ({"x_scale": weight_scale}, "a scale for each row"),
        ({"weight_scale": weight_scale.double()}, "must be float32"),
        ({"x": x.repeat(2, 1)[::2]}, "contiguous"),
        ({"group_size": 32}, r"each row and 32 inputs"),
        ({"group_size": 48}, r"group_size=48 must be one of \[32, 64, 128\]"),
    ):
        wrong = {"x": x, "x_scale": scale, "weight": weight, "weight_scale": weight_scale} | change
        with pytest.raises(ValueError, match=message):
            scaled_product(**wrong, dtype=torch.float32)
    with pytest.raises(ValueError, match="code_dtype"):
        quantize_rows(torch.zeros(3, 8), torch.uint8)
    eighths = [t.view(torch.float8_e4m3fn) for t in (x, weight)]
    with pytest.raises(ValueError, match="e4m3 has a scale for a whole row"):
        scaled_product(eighths[0], scale, eighths[1], weight_scale, torch.float32, 32)
    with pytest.raises(ValueError, match=r"largest must be float32 \[3, 2\]"):
        quantize_rows(torch.zeros(3, 40), torch.int8, torch.zeros(3), 32)
    with pytest.raises(ValueError, match=r"\[rows, inputs\]"):
        quantize_rows(torch.zeros(8, 3).T, torch.int8)
    with pytest.raises(ValueError, match=r"float32 \[3\]"):
        quantize_rows(torch.zeros(3, 8), torch.int8, torch.zeros(2))
    grouped = pack_groups(*random_matrix(4, 64, 32, 4, False).operands())
    for wrong in (torch.zeros(2, 32), torch.zeros(2, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match="64 inputs"):
            grouped_product(wrong, grouped)


def test_a_column_parallel_layer_has_a_bias_and_any_number_of_dimensions() -> None:
    method = QuantizedLinearMethod(Scheme(8), DEVICE, torch.float32)
    layer = ColumnParallelLinear(
        32, {"a": 5}, LayerContext(device=DEVICE, linear_method=method), bias=True
    )
    layer.bias.copy_(torch.arange(5.0))
    weight, x = torch.randn(5, 32, device=DEVICE), torch.randn(2, 3, 32, device=DEVICE)
    found = filled(layer, method, weight)(x)
    torch.testing.assert_close(found, x @ weight.T + layer.bias, rtol=0, atol=0.3)
    assert found.shape == (2, 3, 5)
