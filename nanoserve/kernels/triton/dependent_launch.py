"""Programmatic dependent launch: a kernel that comes before the one before it is over.

Between two kernels of a stream a GPU does nothing for about a microsecond: one drains, the next is
sent for. A kernel that is launched with `launch_pdl=True` may come as soon as every program of the
one before has called `gdc_launch_dependents` or has ended, prepares what does not depend on it, and
waits in `gdc_wait` until all that it has written is there. What a kernel reads before it waits must
be older than the kernel before it. Every program must wait, also one that has nothing to do: the
next kernel waits for this one only.
"""

import functools

import triton


def has_dependent_launch() -> bool:
    """Whether the GPU that kernels are launched on can do it: from Hopper on."""
    return not triton.knobs.runtime.interpret and current_capability() >= 90


def current_capability() -> int:
    """Of the GPU that kernels are launched on: 90 of Hopper."""
    return _capability(triton.runtime.driver.active.get_current_device())


@functools.cache
def _capability(device: int) -> int:
    """Of the one that is current."""
    return triton.runtime.driver.active.get_current_target().arch
