"""Measure matrix products by weight form and number of rows once, and store the rates."""

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ROWS = (1, 16, 256)
MATRIX_BYTES = 2**26  # more than most caches hold
_INPUTS = 2048
_MANY_ROWS = 64  # from here on, arithmetic is the limit, and a sixteenth of the matrix suffices
_HOPELESS = 4.0  # slowdown, relative to the fastest form, beyond which a form is dropped
_FORMAT = 2  # version of the file's format and of the forms


def rates(
    dtype: torch.dtype, forms: Mapping[str, Callable[[Tensor], Any]]
) -> dict[str, dict[int, float]]:
    """Return the operations per second of each form, by number of rows.

    Forms that are far too slow are omitted, except the first. A matrix product has two operations
    per weight and row. The benchmark uses torch's current number of threads. The file is
    `~/.cache/nanoserve/products-*.json`, or in XDG_CACHE_HOME if that is set.
    """
    file = _file(str(dtype), list(forms))
    with suppress(OSError, ValueError, TypeError, AttributeError):
        stored = {
            name: {int(n): float(rate) for n, rate in of.items()}
            for name, of in json.loads(file.read_text()).items()
        }
        if next(iter(forms)) in stored and all(of.keys() == {*ROWS} for of in stored.values()):
            return stored
    measured = _measure(dtype, forms)
    with suppress(OSError):  # if the home is read-only, the benchmark runs each time
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(measured))
        new.replace(file)
    return measured


def _measure(
    dtype: torch.dtype, forms: Mapping[str, Callable[[Tensor], Any]]
) -> dict[str, dict[int, float]]:
    started = time.perf_counter()
    weight = torch.full((MATRIX_BYTES // dtype.itemsize // _INPUTS, _INPUTS), 0.5, dtype=dtype)
    part = weight[: len(weight) // 16]
    measured: dict[str, dict[int, float]] = {name: {} for name in forms}
    few, many = ([n for n in ROWS if (n >= _MANY_ROWS) is is_many] for is_many in (False, True))
    for matrix, numbers in ((weight, few), (part, many)):
        made = {name: forms[name](matrix) for name in measured}
        for rows in numbers:
            x = torch.full((rows, _INPUTS), 0.5, dtype=dtype)
            for _ in range(3):  # interleaved, so that a slow moment affects all forms
                for name, of in measured.items():
                    rate = 2 * rows * matrix.numel() / _seconds(made[name], x)
                    of[rows] = max(rate, of.get(rows, 0.0))
            best = max(of[rows] for of in measured.values())
            measured = {
                name: of
                for name, of in measured.items()
                if best <= _HOPELESS * of[rows] or name == next(iter(forms))
            }
    logger.info(f"measured matrix products of {dtype} in {time.perf_counter() - started:.2f} s")
    return measured


def _seconds(form: Callable[[Tensor], Tensor], x: Tensor) -> float:
    start = time.perf_counter()
    form(x)
    return time.perf_counter() - start


def _file(dtype: str, names: list[str]) -> Path:
    """Return the path of the file, whose name depends on everything that may change a rate."""
    facts = [_FORMAT, dtype, names, torch.get_num_threads(), torch.__version__, _processor()]
    facts += [os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")]
    if find_spec("numba") is not None:
        from nanoserve.kernels.cpu.cpu_features import features

        facts.append(sorted(features()))
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):  # the user has no home
        cache = tempfile.gettempdir()
    return Path(cache) / "nanoserve" / f"products-{key}.json"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line
    return platform.processor()
