"""What `interpreter.prepare` leaves out, nobody misses."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


@triton.jit
def _twice(x):
    return tl.sum(x, axis=0) * 2  # `sum` lies in a module that sees `core` of the language


@triton.jit
def _kernel(source, target, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    row = tl.load(source + tl.program_id(0) * SIZE + index)
    tl.store(target + tl.program_id(0), _twice(row) + _twice(row * 10))


def test_a_launch_patches_what_it_needs_and_leaves_the_language_as_it_was() -> None:
    before = dict(vars(tl)), dict(vars(tl.math))
    for _ in range(2):
        source, target = torch.arange(24.0).reshape(3, 8), torch.zeros(3)
        _kernel[(3,)](source, target, 8)
        assert target.tolist() == [28 * 22.0, 92 * 22.0, 156 * 22.0]
        assert (dict(vars(tl)), dict(vars(tl.math))) == before


def test_a_kernel_that_fails_leaves_the_next_launch_alone() -> None:
    """It patches anew: what is left of the failed one would be the language unpatched."""
    source, target = torch.arange(8.0).reshape(1, 8), torch.zeros(1)
    with pytest.raises(interpreter.InterpreterError):
        _kernel[(1,)](source, target, 7)
    _kernel[(1,)](source, target, 8)
    assert target.tolist() == [28 * 22.0]


def test_types_of_arrays_are_those_that_the_interpreter_means() -> None:
    original = interpreter._get_np_dtype.__closure__[0].cell_contents
    for dtype in (tl.int1, tl.int32, tl.uint64, tl.float16, tl.bfloat16, tl.float8e4nv):
        for kind in (dtype, tl.pointer_type(dtype), tl.block_type(dtype, [4])):
            assert interpreter._get_np_dtype(kind) == original(kind)
        pointers = tl.block_type(tl.pointer_type(dtype), [4])
        assert interpreter._get_np_dtype(pointers) == original(pointers)


@triton.jit
def _sum_of_two(source, target):
    total = tl.load(source) + tl.load(source + 1)
    tl.device_assert(total > 0, "which nobody looks at")
    tl.store(target, total)


def test_sums_of_integers_overflow_as_they_did() -> None:
    """With `debug` the interpreter would refuse them; without it, the check has no effect."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    source, results = torch.tensor([2**31 - 1, 2], dtype=torch.int32), []
    for is_checked in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            options = replace(builder.options, sanitize_overflow=is_checked)
            patch.setattr(builder, "options", options)
            target = torch.zeros(1, dtype=torch.int32)
            _sum_of_two[(1,)](source, target)
            results.append(target.item())
    assert results == [-(2**31) + 1] * 2
