"""Programmatic dependent launch: a kernel starts before the previous kernel has finished.

Between two kernels of a stream a GPU is idle for about a microsecond: one drains, the next is
launched. A kernel with `launch_pdl=True` may start as soon as every program of the kernel before it
has called `gdc_launch_dependents` or has ended. It prepares what does not depend on that kernel,
and `gdc_wait` waits until all its writes are visible. Data that a kernel reads before it waits must
be older than the kernel before it. Every program must wait, even if it has no work: the next kernel
waits only for this one.
"""

import functools

import triton


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
