"""Vector operations as LLVM IR, for inner loops that numba does not vectorise well.

numba has no vector type, so a computation on vectors must be one `@intrinsic`: a function that
generates LLVM instructions. LLVM splits a vector of 16 numbers into the processor's registers: one
of AVX-512, two of AVX2, four of NEON.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from nanoserve.kernels.cpu.cpu_features import has

LANES = 16
REGISTER = 16 if has("avx512f") else 8  # floats per register of AVX-512, or AVX2
BYTE, HALF_WORD, WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
FLOAT, HALF = ir.FloatType(), ir.HalfType()
FLOATS = ir.VectorType(FLOAT, LANES)
HALVES = ir.VectorType(HALF, LANES)
WORDS = ir.VectorType(WORD, LANES)


def constant(kind: ir.Type, value: float, lanes: int = LANES) -> ir.Constant:
    """Return a constant vector of equal numbers."""
    return ir.Constant(ir.VectorType(kind, lanes), [ir.Constant(kind, value)] * lanes)


def offset(b: ir.IRBuilder, address: ir.Value, *pairs: tuple[Any, Any]) -> ir.Value:
    """Return address + the sum of times x stride over (times, stride), integers or IR values."""
    for pair in pairs:
        times, stride = (n if isinstance(n, ir.Value) else address.type(n) for n in pair)
        address = b.add(address, b.mul(times, stride))
    return address


class Rows(NamedTuple):
    address: ir.Value
    stride: ir.Value  # bytes from one row to the next

    def at(self, b: ir.IRBuilder, row: Any, *more: tuple[Any, Any]) -> ir.Value:
        """Return the address of a row plus the pairs in `more`: see `offset`."""
        return offset(b, self.address, (row, self.stride), *more)

    def moved(self, b: ir.IRBuilder, *pairs: tuple[Any, Any]) -> "Rows":
        return Rows(offset(b, self.address, *pairs), self.stride)


def load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def load_floats(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """Load a vector stored as FLOATS or HALVES; return FLOATS."""
    if kind == HALVES:
        return b.fpext(load(b, address, HALVES, LANES * 2), FLOATS)
    return load(b, address, FLOATS, LANES * 4)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    """Store a vector, aligned to its elements only: rows of an output may begin anywhere."""
    number = value.type.element
    size = 4 if isinstance(number, ir.FloatType) else 2
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=size)


def splat(b: ir.IRBuilder, number: ir.Value, lanes: int = LANES) -> ir.Value:
    """Return a vector with all lanes equal to `number`."""
    kind = ir.VectorType(number.type, lanes)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), number, WORD(0))
    return b.shuffle_vector(first, first, constant(WORD, 0, lanes))


def shuffled(
    b: ir.IRBuilder, x: ir.Value, places: Sequence[int], y: ir.Value | None = None
) -> ir.Value:
    """Return the lanes `places` of x followed by y."""
    kind = ir.VectorType(WORD, len(places))
    return b.shuffle_vector(x, x if y is None else y, ir.Constant(kind, [*places]))


def part(b: ir.IRBuilder, vector: ir.Value, first: int, size: int) -> ir.Value:
    """Return the lanes [first, first + size) of a vector."""
    return shuffled(b, vector, range(first, first + size))


def joined(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    return shuffled(b, low, range(2 * low.type.count), high)


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic by name, such as a processor's instruction."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def multiply_add(b: ir.IRBuilder, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
    return call(b, f"llvm.fmuladd.v{x.type.count}f32", x.type, x, y, total)


def prefetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line at `address`, for reading, into the second-level cache."""
    pointer = b.inttoptr(address, BYTE.as_pointer())
    is_write, locality, is_data = WORD(0), WORD(2), WORD(1)
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, is_write, locality, is_data)


def rounded(b: ir.IRBuilder, numbers: ir.Value, dtype: str) -> ir.Value:
    """Round float32 to "float32", "float16" or "bfloat16" (as bits), ties to even."""
    if dtype == "float32":
        return numbers
    if dtype == "float16":
        return b.fptrunc(numbers, HALVES)
    bits = b.bitcast(numbers, WORDS)
    is_odd = b.and_(b.lshr(bits, constant(WORD, 16)), constant(WORD, 1))
    bits = b.add(bits, b.add(is_odd, constant(WORD, 0x7FFF)))
    return b.trunc(b.lshr(bits, constant(WORD, 16)), ir.VectorType(HALF_WORD, LANES))


class Accumulators:
    """Accumulators of a loop, rows x columns vectors: variables that LLVM keeps in registers."""

    def __init__(self, b: ir.IRBuilder, rows: int, columns: int, start: ir.Constant) -> None:
        self._b, self._start = b, start
        self._places: dict[tuple[int, int], Any] = {}
        for row in range(rows):
            for column in range(columns):
                self._places[row, column] = cgutils.alloca_once(b, start.type)
        self.clear()

    @property
    def places(self) -> Iterable[tuple[int, int]]:
        """The (row, column) of every vector, row by row."""
        return self._places.keys()

    def clear(self) -> None:
        for place in self._places.values():
            self._b.store(self._start, place)

    def __getitem__(self, at: tuple[int, int]) -> ir.Value:
        return self._b.load(self._places[at])

    def __setitem__(self, at: tuple[int, int], value: ir.Value) -> None:
        self._b.store(value, self._places[at])
