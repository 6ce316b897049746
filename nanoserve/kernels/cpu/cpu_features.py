"""Features of the processor for which numba compiles the kernels."""

import functools
import platform
from typing import Any

from llvmlite import binding
from numba.core import config as numba_config

config: Any = numba_config  # numba sets its attributes when it is imported


@functools.cache
def features() -> frozenset[str]:
    """Return the instruction sets by LLVM's names, such as "avx2", "avx512vnni" or "dotprod".

    If numba compiles for another processor (NUMBA_CPU_NAME, including "generic"), only the features
    in NUMBA_CPU_FEATURES count: LLVM does not expose the features of a named processor.
    """
    if config.CPU_NAME or config.CPU_FEATURES:
        listed = (config.CPU_FEATURES or "").split(",")
        return frozenset(name[1:] for name in listed if name.startswith("+"))
    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


def converts_float16() -> bool:
    """Return True if the processor has instructions for float16 conversion.

    Without them, LLVM calls library functions; if these are missing, it ends the process.
    """
    return has("f16c") or platform.machine() not in ("x86_64", "AMD64")


def has(*names: str) -> bool:
    """Return True if the processor has all of these features."""
    return features().issuperset(names)
