"""What runs on processors with less than this one: numba compiles for them in another process."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="of x86 processors"
)
SUPPORT = Path(__file__).parents[2] / "support"
AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+lzcnt,+movbe"
PROCESSORS = {
    "AVX2": ("haswell", AVX2, ["pairs of bytes", "pairs of nibbles", "bytes", "nibbles"]),
    "no vectors to speak of": ("x86-64", "+sse2", ["bytes", "nibbles"]),
}
SCRIPT = """
import torch
from fixed_point import assert_scores, assert_values
from integer_weights import assert_product, random_codes, random_matrix
from nanoserve.kernels.cpu.dequantized_linear import DequantizedPanels
from nanoserve.kernels.cpu.gemm_select import forms
from nanoserve.kernels.cpu.float_linear import FloatPanels, best_kind
from nanoserve.kernels.cpu.isa import KINDS, kinds_here
from nanoserve.kernels.cpu.integer_linear import IntegerPanels
from nanoserve.kernels.cpu.cpu_features import converts_float16, has
from nanoserve.kernels.cpu.low_rank import add_low_rank

print(",".join(kinds_here()), has("avx2"), has("avx512f"))
for kind in kinds_here():
    bits = KINDS[kind].bits
    for group_size in (128, 32):
        matrix = random_matrix(bits, 65, 128, group_size, has_offset=False)
        x = random_codes(13, 128)
        assert_product(IntegerPanels(*matrix.operands(), kind=kind)(x), matrix, x)
# Whatever the float16 of the inputs takes here, the process lives on.
assert_product(IntegerPanels(*matrix.operands(), kind=kind)(x.half()), matrix, x)
for bits in (8, 4):
    matrix, x = random_matrix(bits, 65, 128, 32, has_offset=True), torch.randn(13, 128)
    expected = FloatPanels(matrix.dequantize())(x)
    assert torch.equal(DequantizedPanels(*matrix.operands())(x), expected)
    assert DequantizedPanels(*matrix.operands())(x.half()).isfinite().all()
for dtype in (torch.bfloat16, torch.float32, torch.float16):
    form = next(iter(forms(dtype).values()))
    assert (form is FloatPanels) is (dtype != torch.float16 or converts_float16())
    assert best_kind(dtype).startswith("widened")
    x, weight = torch.randn(13, 67).to(dtype), torch.randn(70, 67).to(dtype)
    y, exact = form(weight)(x), x.double() @ weight.double().T
    bound = 1e-5 * (x.double().abs() @ weight.double().abs().T)
    bound += torch.finfo(dtype).eps * exact.abs()
    assert ((y.double() - exact).abs() <= bound).all()
    alone = torch.cat([form(weight)(row) for row in x.split(1)])
    assert form is not FloatPanels or torch.equal(y, alone)
for head_dim in (40, 96, 128):
    assert_scores(2, 37, head_dim)
    assert_values(2, 37, head_dim)
x, a, b = (torch.randn(shape).bfloat16() for shape in ((7, 33), (1, 33, 16), (1, 3, 70)))
y, exact = torch.zeros(7, 70).bfloat16(), x.double() @ a[0, :, :3].double() @ b[0].double()
ends, firsts, tokens, starts = [[0, 3]], [0, 70], [*range(7)], [0, 7]  # a group of 7 rows
indices = (torch.tensor(one, dtype=torch.int32) for one in (ends, firsts, tokens, starts, [0]))
add_low_rank(x, y, a, b, *indices)
assert ((y.double() - exact).abs() <= 1e-2 * exact.abs() + 1e-3).all()
"""


@needs_x86
@pytest.mark.size("full")  # compiles all anew; test_integer_tiles.py runs AVX2's products here
@pytest.mark.parametrize("processor", PROCESSORS)
def test_products_are_right_there(processor: str) -> None:
    name, features, kinds = PROCESSORS[processor]
    path = os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])
    environment = os.environ | {
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": features,
        "PYTHONPATH": path,
    }
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    here, has_avx2, has_avx512 = ended.stdout.strip().rsplit(" ", 2)
    assert here.split(",") == kinds
    assert (has_avx2, has_avx512) == (str("avx2" in features), "False")


@pytest.mark.size("full")
@pytest.mark.parametrize("product", ["float", "integer"])
def test_a_second_process_compiles_nothing_again(product: str, tmp_path: Path) -> None:
    """A cache that grew with each process would hold the same product thousands of times."""
    scripts = {
        "float": """
from nanoserve.kernels.cpu.float_linear import FloatPanels, _product
FloatPanels(torch.ones(65, 64))(torch.ones(3, 64))
compiled = _product("widened float32")
""",
        "integer": """
from nanoserve.kernels.cpu.integer_linear import IntegerPanels, _product
from nanoserve.models.quantization.online import quantize_int8
form = IntegerPanels(*quantize_int8(torch.ones(65, 64)).operands())
form(torch.ones(3, 64))
compiled = _product("float32", *form._form)
""",
    }
    script = f"import torch\n{scripts[product]}\nprint(sum(compiled.stats.cache_misses.values()))"
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", script]
    counts = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [int(count) for count in counts] == [1, 0]
