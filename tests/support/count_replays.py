"""Which graphs are replayed, and how often."""

import torch

from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.cuda_graphs import SizedGraphs
from nanoserve.worker.graph_programs import DecodeProgram
from nanoserve.worker.sampling_program import SamplingProgram


def count_replays(graphs: SizedGraphs) -> list[int]:
    """A list that gets the size of each replayed graph."""
    sizes: list[int] = []
    replay = graphs.replay

    def counted(size: int) -> torch.Tensor:
        sizes.append(size)
        return replay(size)

    graphs.replay = counted
    return sizes


def decode_graphs(device: CudaDevice) -> SizedGraphs:
    """The graphs of decode steps."""
    (program,) = (p for p in device.programs if isinstance(p, DecodeProgram))
    return program.graphs


def choices(device: CudaDevice) -> SizedGraphs:
    """The graphs that sample decode steps."""
    return next(p for p in device.programs if isinstance(p, SamplingProgram)).choices
