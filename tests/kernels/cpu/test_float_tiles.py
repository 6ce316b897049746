"""Our products of 16 and 32 bits against float64, and a row's independence of its neighbours."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from nanoserve.kernels.cpu import attention, tile_walk
from nanoserve.kernels.cpu.cpu_features import converts_float16, has
from nanoserve.kernels.cpu.float_linear import FloatPanels, best_kind
from nanoserve.kernels.cpu.float_tiles import KINDS
from nanoserve.worker.threads import threads

# Half a unit in the last place, as a part of the number.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
RUNS_HERE = {
    "widened float32": True,
    "widened bfloat16": True,
    "widened float16": converts_float16(),
    "pairs of bfloat16": has("avx512bf16"),
}
ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 13, 64, 70)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two of them in each of several test processes would wait for each other."""
    with threads(1):
        yield


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if not RUNS_HERE[request.param]:
        pytest.skip("this processor has no instructions for it")
    return request.param


def random(kind: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(getattr(torch, KINDS[kind].dtype))


def assert_right(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """As near as sums of float32 and the rounding of the result allow (Higham 2002, eq. 3.5)."""
    wide, wide_weight = x.double(), weight.double()
    exact, magnitudes = wide @ wide_weight.T, wide.abs() @ wide_weight.abs().T
    bound = (x.shape[-1] + 2) * 2**-24 * magnitudes
    bound = bound + ROUNDING[x.dtype] * (exact.abs() + bound) + 2**-25
    assert y.dtype == x.dtype and y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all()


def sizes(full_size: bool) -> Iterator[tuple[int, int]]:
    """Outputs and inputs."""
    for outputs in (1, 63, 64, 65, 200):
        for inputs in (1, 2, 3, 64, 130):
            if full_size or 65 in (outputs, inputs) or 130 in (outputs, inputs) or inputs == 3:
                yield outputs, inputs


def test_products_are_those_of_float64(kind: str, full_size: bool) -> None:
    for outputs, inputs in sizes(full_size):
        weight = random(kind, outputs, inputs)
        form = FloatPanels(weight, kind)
        # Rows are tiled alike in all panels: every number of them in two of these.
        is_each = full_size and outputs == 65
        for num_rows in (*range(1, 71), 600) if is_each else ROWS:
            x = random(kind, num_rows, inputs)
            assert_right(form(x), x, weight)
    x = random(kind, 600, 130)  # several chunks of rows
    weight = random(kind, 200, 130)
    assert_right(FloatPanels(weight, kind)(x), x, weight)


def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    """Bit for bit, as many and whichever they are: wherever a tile of rows begins and ends."""
    form, x = FloatPanels(random(kind, 200, 130), kind), random(kind, 600, 130)
    alone = torch.cat([form(row) for row in x.split(1)])
    assert torch.equal(form(x), alone)
    for num_rows in range(1, 65):
        assert torch.equal(form(x[:num_rows]), alone[:num_rows]), num_rows
        assert torch.equal(form(x[num_rows:64]), alone[num_rows:64]), num_rows
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    assert torch.equal(form(x[order]), alone[order])


def test_any_number_of_threads_computes_each_panel_once(kind: str) -> None:
    for num_panels in (1, 3, 33):
        weight, x = random(kind, 64 * num_panels, 130), random(kind, 5, 130)
        form = FloatPanels(weight, kind)
        for num_threads in (1, os.cpu_count()):
            with threads(num_threads):
                for _ in range(3):
                    assert_right(form(x), x, weight)


def test_what_is_no_number_goes_where_it_belongs(kind: str) -> None:
    x, weight = random(kind, 7, 66), random(kind, 70, 66)
    x[1, 3], x[4, 65], x[5, 0] = torch.nan, torch.inf, -torch.inf
    weight[66, 2], weight[8, 65] = torch.inf, torch.nan
    y, exact = FloatPanels(weight, kind)(x), x.double() @ weight.double().T
    assert torch.equal(y.isnan(), exact.isnan())
    assert torch.equal(y.isposinf(), exact.isposinf()) and y.isposinf().any()
    assert torch.equal(y.isneginf(), exact.isneginf()) and y.isneginf().any()


def test_inputs_of_any_shape(kind: str) -> None:
    weight = random(kind, 65, 31)
    form, wide = FloatPanels(weight, kind), random(kind, 10, 62)
    for x in (wide[:, ::2], random(kind, 31, 9).T, wide[::3, 31:]):
        assert not x.is_contiguous()
        assert torch.equal(form(x), form(x.contiguous()))
        assert_right(form(x), x, weight)
    assert torch.equal(form(wide[3, :31]), form(wide[3:4, :31])[0])
    cube = random(kind, 3, 5, 31)
    assert torch.equal(form(cube), form(cube.view(15, 31)).view(3, 5, 65))
    assert form(wide[:0, :31]).shape == (0, 65)


def test_weights_that_are_a_part_of_others(kind: str) -> None:
    whole, x = random(kind, 90, 77), random(kind, 3, 40)
    for weight in (whole[7:80, 5:45], whole.T[:70, 3:43]):
        assert_right(FloatPanels(weight, kind)(x), x, weight)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_the_best_kind_is_of_the_dtype(dtype: torch.dtype) -> None:
    name = best_kind(dtype)
    assert getattr(torch, KINDS[name].dtype) == dtype
    if dtype == torch.bfloat16:
        assert (name == "pairs of bfloat16") is has("avx512bf16")


@pytest.mark.parametrize(
    ("functions", "sources", "others"),
    [
        (
            {"float_tiles", "integer_tiles", "dequantized_tiles"},
            tile_walk.SOURCES,
            {"ops", "packing", "cpu_features"},
        ),
        ({"attention"}, attention.SOURCES, {"checks", "ops", "cpu_features", "tile_walk"}),
    ],
)
def test_numbas_cache_knows_the_files_that_instructions_come_from(
    functions: set[str], sources: tuple[str, ...], others: set[str]
) -> None:
    """All that they import of this folder, but for what gives them no more than a number."""
    folder = Path(tile_walk.__file__).parent
    seen, waiting = set(), set(functions)
    while waiting:
        seen.add(name := waiting.pop())
        text = (folder / f"{name}.py").read_text()
        modules = re.findall(r"^from nanoserve\.kernels\.cpu\.(\w+) import", text, re.MULTILINE)
        for names in re.findall(r"^from nanoserve\.kernels\.cpu import (.+)$", text, re.MULTILINE):
            modules += names.split(", ")
        waiting |= {*modules} - seen - others
    assert seen - functions == {*sources}


def test_another_text_is_another_product(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = tile_walk.written_by()
    for name in tile_walk.SOURCES:
        shutil.copy(Path(tile_walk.__file__).with_name(f"{name}.py"), tmp_path)
    monkeypatch.setattr(tile_walk, "__file__", str(tmp_path / "tile_walk.py"))
    assert tile_walk.written_by() == before
    (tmp_path / "vectors.py").write_text("LANES = 8")
    assert tile_walk.written_by() != before
