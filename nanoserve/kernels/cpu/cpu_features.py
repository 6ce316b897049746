"""What the processor is, as the compiler of our kernels sees it."""

import functools
import platform

from llvmlite import binding
from numba.core import config


@functools.cache
def features() -> frozenset[str]:
    """Instruction sets in LLVM's names, such as "avx2", "avx512vnni" or "dotprod".

    Whoever has numba compile for another processor (NUMBA_CPU_NAME, "generic" included) has none
    but what NUMBA_CPU_FEATURES lists: LLVM does not tell what a name stands for.
    """
    if config.CPU_NAME or config.CPU_FEATURES:
        listed = (config.CPU_FEATURES or "").split(",")
        return frozenset(name[1:] for name in listed if name.startswith("+"))
    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


def converts_float16() -> bool:
    """Whether it has instructions for it. Else LLVM calls functions that a process need not have,
    and ends the process if it has not.
    """
    return has("f16c") or platform.machine() not in ("x86_64", "AMD64")


def has(*names: str) -> bool:
    """Whether the processor has all of these."""
    return features().issuperset(names)
