"""Programmatic dependent launch: a kernel starts before the previous kernel has finished.

Between two kernels of a stream a GPU is idle for about a microsecond: one drains, the next is
launched. A kernel with `launch_pdl=True` may start as soon as every program of the kernel before it
has called `gdc_launch_dependents` or has ended. It prepares what does not depend on that kernel,
and `gdc_wait` waits until all its writes are visible. Every program must wait, even if it has no
work: the next kernel waits only for this one.

Of several such kernels in a row, one may start before the last but one has finished, since a kernel
lets the next one start before it waits itself. So data that a kernel reads before it waits must be
older than all of them. In a step they are: the embedding is launched without this option, after the
step's integers were copied.

Decode attention always does this. With `kernel_config={"dependent_launch": True}`, so do all other
kernels but attention over chunks; some of them read weights before they wait, which no step writes.
"""

import functools
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda


def launch_options(is_dependent: bool) -> dict[str, Any]:
    """Return the kernel's constant IS_DEPENDENT and, where the GPU supports it, the launch option.

    is_dependent: whether dependent launch is wanted.
    """
    if is_dependent and has_dependent_launch():
        return {"IS_DEPENDENT": True, "launch_pdl": True}
    return {"IS_DEPENDENT": False}


@triton.jit
def wait_for_previous_kernel(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel start, and wait for the previous one. Called before anything is read."""
    if IS_DEPENDENT:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


def has_dependent_launch() -> bool:
    """Return True if the current GPU supports dependent launch: from Hopper on."""
    return not triton.knobs.runtime.interpret and current_capability() >= 90


def current_capability() -> int:
    """Return the compute capability of the current GPU as an integer: 90 for Hopper."""
    return _capability(triton.runtime.driver.active.get_current_device())


@functools.cache
def _capability(device: int) -> int:
    """Return the compute capability of `device`, which must be the current one."""
    return triton.runtime.driver.active.get_current_target().arch
