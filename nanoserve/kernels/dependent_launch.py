"""Programmatic dependent launch: a kernel that comes before the one before it is over.

Between two kernels of a stream a GPU does nothing for about a microsecond: one drains, the next is
sent for. A kernel that is launched with `launch_pdl=True` may come as soon as every program of the
one before has called `gdc_launch_dependents`, prepares what does not depend on it, and waits in
`gdc_wait` until all that it has written is there. Every program must wait, also one that has
nothing to do: the next kernel waits for this one only.
"""

import functools

import triton


def has_dependent_launch() -> bool:
    """Whether the GPU that kernels are launched on can do it: from Hopper on."""
    return not triton.knobs.runtime.interpret and _current_capability() >= 90


@functools.cache
def _current_capability() -> int:
    return triton.runtime.driver.active.get_current_target().arch
