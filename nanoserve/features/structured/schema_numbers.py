"""Write numbers in JSON schemas so that llguidance reads them correctly.

llguidance converts each number of a schema to a float64, and each bound of an integer from there to
an int64. A number that this would change is rejected here. llguidance's JSON parser is also off by
the last bit for one float64 in eleven, so such numbers are spelled in another way.
"""

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from nanoserve.utils.checks import is_int, shown

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_INT64 = 2**63
_LOWEST = -(_INT64 - 1024)  # the lowest float64 above the lowest int64
_EXACT = 2**53  # up to here, float64 holds every integer
_MOST_MULTIPLE = 2**32 - 1
_SMALLEST_STEP = 1e-12
_MOST_RESPELLED = 1000
_STRING_OR_FLOAT = re.compile(
    r'"(?:[^"\\]|\\.)*"|(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?', re.DOTALL
)


def float_of(text: str) -> float:
    """Return the float64 of a JSON number. Raises `ValueError` if it is too large or too small."""
    value = float(text)
    if math.isinf(value) or (value == 0 and Decimal(text) != 0):
        raise ValueError(f"{text} is beyond the range of a float64")
    return value


def check_values(values: Any) -> int:
    """Check that no number in `const` or `enum` would be changed by the library.

    Returns the number of values. Raises `ValueError` that names the number.
    """
    stack, num_values = [values], 0
    while stack:
        value = stack.pop()
        num_values += 1
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
        elif is_int(value) and (abs(value) >= _INT64 or not _is_held(value)):
            raise ValueError(
                f"{shown(value)} is an integer that a float64 does not hold exactly{_ADVICE}"
            )
        elif isinstance(value, float) and not _is_written_as_it_is(value):
            raise ValueError(f"{value} is a number that a float64 does not hold exactly{_ADVICE}")
    return num_values


def checked_bound(name: str, value: Any) -> Any:
    """Return a bound that the library reads as `value`. Raises `ValueError` if there is none.

    name: one of `BOUNDS`. A minimum of -2^63, which code generators write for int64, becomes the
    lowest one that the library can keep, 1024 above.
    """
    if isinstance(value, bool) and name.startswith("exclusive"):
        return value  # in draft 4 it is a boolean
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={shown(value)} must be a number")
    if (name, value) == ("minimum", -_INT64):
        return _LOWEST
    if isinstance(value, int) and (name, value) != ("maximum", _INT64 - 1) and not _is_held(value):
        raise ValueError(
            f"{name}={shown(value)} is an integer that a float64 does not hold exactly{_ADVICE}"
        )
    if abs(value) >= _INT64 and (name, value) != ("maximum", _INT64 - 1):
        raise ValueError(f"{name}={shown(value)} is beyond 2^63{_ADVICE}")
    if isinstance(value, float) and not _is_written_as_it_is(value):
        raise ValueError(
            f"{name}={value} is a number that a float64 does not hold exactly{_ADVICE}"
        )
    if name.startswith("exclusive") and abs(value) >= _EXACT:
        raise ValueError(f"{name}={shown(value)} is beyond 2^53{_ADVICE}")
    return value


_ADVICE = "; use a smaller number, or a string instead"


def check_multiple(value: Any) -> Fraction:
    """Return the exact value of `multipleOf`. Raises `ValueError` if the library cannot keep it.

    The library multiplies it by ten until it is an integer, which must fit 32 bits.
    """
    is_good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if not is_good or value > _MOST_MULTIPLE:
        raise ValueError(f"multipleOf={shown(value)} must be a number in (0, {_MOST_MULTIPLE}]")
    scaled, num_places = float(value), 0
    while scaled % 1 and scaled <= _MOST_MULTIPLE:
        scaled, num_places = scaled * 10, num_places + 1
    exact = Fraction(Decimal(repr(value)))
    if scaled > _MOST_MULTIPLE or Fraction(int(scaled), 10**num_places) != exact:
        raise ValueError(
            f"multipleOf={shown(value)} cannot be kept exactly by the library; use an integer, or "
            f"a number with fewer digits"
        )
    return exact


def check_common_multiples(multiples: set[Fraction]) -> None:
    """Raise `ValueError` if a combination of the steps may exceed the library's 32 bits.

    multiples: the values of `multipleOf` in a schema.
    """
    scale = math.lcm(*(step.denominator for step in multiples)) if multiples else 1
    product = math.prod(int(step * scale) for step in multiples)
    if len(multiples) > 1 and max(product, scale) > _MOST_MULTIPLE:
        names = sorted(map(float, multiples))[:8]
        raise ValueError(
            f"multipleOf has different values whose common multiple may exceed {_MOST_MULTIPLE}: "
            f"{names}"
        )


class OpenBounds:
    """Exclusive bounds, adjusted where the library would allow the bound itself.

    It allows "0" for a number above 0 and up to 0.5, and "-0" for a number from -0.5 and below 0.
    This happens if an integer is excluded and the other bound is less than 1 away. In these cases
    the bound is moved by at most 1e-12.
    """

    def __init__(self, schemas: Iterator[dict[str, Any]]) -> None:
        self._above: dict[int, float] = {}  # by integer, the nearest upper bound above it
        self._below: dict[int, float] = {}  # by integer, the nearest lower bound below it
        for schema in schemas:
            for name in BOUNDS:
                value = schema.get(name)
                if isinstance(value, float) and math.isfinite(value) and value % 1:
                    self._note(name, value)

    def moved(self, name: str, value: Any) -> Any:
        """Return the bound to pass to the library instead of `value`."""
        if isinstance(value, bool) or not name.startswith("exclusive") or value % 1:
            return value
        is_lower = name == "exclusiveMinimum"
        near = (self._above if is_lower else self._below).get(int(value))
        if near is None or (value < 0 if is_lower else value > 0):
            return value
        step = min(_SMALLEST_STEP, 10.0 ** (math.floor(math.log10(abs(near - value))) - 3))
        moved = value + step if is_lower else value - step
        return math.nextafter(value, near) if moved == value else moved

    def _note(self, name: str, value: float) -> None:
        if "aximum" in name:
            place = math.floor(value)
            self._above[place] = min(value, self._above.get(place, value))
        else:
            place = math.ceil(value)
            self._below[place] = max(value, self._below.get(place, value))


def spelled(text: str) -> str:
    """Return JSON in which the library reads each number with a fraction or exponent correctly.

    Raises `ValueError` if a number has no such spelling, or if too many have to be spelled again.
    """
    num_respelled = 0

    def respell(found: re.Match[str]) -> str:
        nonlocal num_respelled
        whole, fraction, exponent = found.group(2, 3, 4)
        if whole is None or (fraction is None and exponent is None):
            return found[0]
        places = int(exponent or 0) - len(fraction or "")
        value = abs(float(found[0]))
        if _read(int(whole + (fraction or "")), places) == value:
            return found[0]
        num_respelled += 1
        if num_respelled > _MOST_RESPELLED:
            raise ValueError(
                f"more than {_MOST_RESPELLED} numbers have 16 digits or more; write them with fewer"
            )
        return found[1] + _other_spelling(value)

    return _STRING_OR_FLOAT.sub(respell, text)


def _other_spelling(value: float) -> str:
    """Return a spelling of a float64 > 0 that the library reads as this number."""
    exact = Decimal(value)
    for num_digits in range(20, 15, -1):
        shift = num_digits - 1 - exact.adjusted()
        nearest = int(exact.scaleb(shift).to_integral_value())
        unit = max(1, nearest >> 53)  # digits that differ by less are the same float64
        for digits in range(nearest - 40 * unit, nearest + 41 * unit, unit):
            if _read(digits, -shift) == value:
                return f"{digits}e{-shift}"
    raise ValueError(
        f"{value} has no spelling that the library reads correctly; round it to fewer digits"
    )


def _read(digits: int, exponent: int) -> float | None:
    """Return `digits` * 10^exponent as the library's parser computes it, or None."""
    if digits >= 2**64:
        return None
    value = float(digits)
    if exponent < -308:
        value, exponent = value / 1e308, exponent + 308
    if not -308 <= exponent <= 308:
        return None
    power = float(f"1e{abs(exponent)}")
    return value * power if exponent >= 0 else value / power


def _is_written_as_it_is(value: float) -> bool:
    """Return True if a float64 equals its shortest decimal representation.

    A large float64 may not, because zeros replace the digits that are not needed to read it.
    """
    return abs(value) < _EXACT or Decimal(repr(value)) == Decimal(value)


def _is_held(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False
