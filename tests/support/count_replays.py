"""Which graphs are replayed, and how often."""

import torch

from nanoserve.worker.cuda_graphs import DecodeGraphs


def count_replays(graphs: DecodeGraphs) -> list[int]:
    """A list that gets the size of each replayed graph."""
    sizes: list[int] = []
    replay = graphs.replay

    def counted(size: int) -> torch.Tensor:
        sizes.append(size)
        return replay(size)

    graphs.replay = counted
    return sizes
