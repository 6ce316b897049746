"""Choose the storage form of float weights, by a benchmark that runs once per machine.

The fastest form depends on the processor and on the number of rows. So each form that is available
multiplies a matrix that exceeds the cache, with 1, 16 and 256 rows; the rates are stored in a file.
It takes a few tenths of a second.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from nanoserve.kernels.cpu import calibration, packed_linear
from nanoserve.kernels.cpu.torch_linear import Form, Packed, Plain, WidenedTiles

logger = logging.getLogger(__name__)

_OURS, _ONEDNN = "own tiles", "oneDNN packed"
_CLEARLY = 1.1  # speed-up below which differences count as noise, and the earlier form is kept


class Choice(NamedTuple):
    name: str
    make: Callable[[Tensor], Form]


def forms(dtype: torch.dtype) -> dict[str, Callable[[Tensor], Form]]:
    """Return the available forms by name; the first is the default without a benchmark."""
    found: dict[str, Callable[[Tensor], Form]] = {}
    if find_spec("numba") is not None:
        from nanoserve.kernels.cpu.cpu_features import converts_float16
        from nanoserve.kernels.cpu.float_linear import FloatPanels

        if dtype != torch.float16 or converts_float16():
            found[_OURS] = FloatPanels
    if dtype == torch.bfloat16 and packed_linear.works():
        found[_ONEDNN] = Packed
    if dtype != torch.float32:
        found["torch, widened tiles"] = WidenedTiles
    return found | {"torch": Plain}


def choose_form(dtype: torch.dtype, num_bytes: int, batch_invariant: bool = False) -> Choice:
    """Return the form for a model of `num_bytes`; for a small one, no benchmark is run.

    batch_invariant: choose our own tiles, whose results for a row do not depend on the number of
    rows. Raises `ValueError` if they are not available.
    """
    found = forms(dtype)
    name = next(iter(found))
    if batch_invariant:
        if name != _OURS:
            raise ValueError(
                f"batch_invariant=True needs numba, and a processor that converts {dtype}, for the "
                f"matrix products: pip install 'nanoserve[cpu]'"
            )
        return Choice(name, found[name])
    if find_spec("numba") is None:
        logger.info(
            "without numba, torch computes matrix products; for faster products: "
            "pip install 'nanoserve[cpu]'"
        )
    if num_bytes < calibration.MATRIX_BYTES or len(found) == 1:
        return Choice(name, found[name])
    measured = calibration.rates(dtype, found)
    choice = _best(found, measured)
    listed = "; ".join(
        f"{name} {', '.join(f'{rate / 1e9:.0f}' for rate in measured[name].values())}"
        for name in found
        if name in measured
    )
    rows = ", ".join(map(str, calibration.ROWS))
    logger.info(
        f"matrix products of {dtype} weights: {choice.name} ({torch.get_num_threads()} threads; "
        f"10^9 operations per second at {rows} rows: {listed})"
    )
    return choice


def _best(
    found: Mapping[str, Callable[[Tensor], Form]], measured: Mapping[str, Mapping[int, float]]
) -> Choice:
    """Return the form with the smallest worst-case slowdown, or two forms that share memory."""
    best = {rows: max(rate[rows] for rate in measured.values()) for rows in calibration.ROWS}

    def slowest(rate: Mapping[int, float]) -> float:
        return max(best[rows] / max(rate[rows], 1.0) for rows in calibration.ROWS)

    name = next(iter(found))
    for other in measured:
        if slowest(measured[name]) > _CLEARLY * slowest(measured[other]):
            name = other
    if {_OURS, _ONEDNN} <= measured.keys() and name in (_OURS, _ONEDNN):
        ours, theirs = measured[_OURS], measured[_ONEDNN]
        for rows in calibration.ROWS:
            if all(theirs[n] > _CLEARLY * ours[n] for n in calibration.ROWS if n >= rows):
                return _shared(found, rows) or Choice(name, found[name])
    return Choice(name, found[name])


def _shared(found: Mapping[str, Callable[[Tensor], Form]], rows: int) -> Choice | None:
    """Combine our tiles for few rows with oneDNN from about `rows` on; None if layouts differ."""
    from nanoserve.kernels.cpu.float_linear import SharedPanels, shares_memory

    before = max((n for n in calibration.ROWS if n < rows), default=0)
    if not before:
        return Choice(_ONEDNN, found[_ONEDNN])
    if not shares_memory():
        return None
    first = math.isqrt(before * rows)  # geometric mean of the two measured numbers of rows
    make = functools.partial(SharedPanels, num_rows=first)
    return Choice(f"{_OURS} below {first} rows, {_ONEDNN} above", make)
