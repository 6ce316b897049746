"""CUDA graphs: the launches of a step are captured once and replayed with one call.

A step of a small model launches a few hundred kernels of a few microseconds each; when Python
launches them one by one, the GPU is idle most of the time. A captured graph has fixed addresses and
a fixed number of rows: so every graph reads the one device buffer that batches are copied to, and a
batch between two captured sizes is padded with dummy rows.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch
from tqdm import tqdm

from nanoserve.worker.cuda import Cuda


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows to capture, ascending; the last one is `max_num_seqs` itself.

    Powers of two up to 16, then every 16 up to 256, then every 64: so a step has few padding rows,
    and 256 sequences take 20 graphs. For 20: [1, 2, 4, 8, 16, 20].
    """
    sizes = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class SizedGraphs:
    """One captured graph for each number of rows or tokens in `sizes`, which is ascending."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self._replays: dict[int, Callable[[], None]] = {}
        self.outputs: dict[int, torch.Tensor] = {}  # by size, overwritten by each replay

    def size_for(self, num_rows: int) -> int:
        """Return the smallest captured size that holds `num_rows`, which is at most the largest."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def capture(
        self, cuda: Cuda, launch: Callable[[int], torch.Tensor], *, shows_progress: bool = True
    ) -> None:
        """Capture `launch(num_rows)`, which returns a tensor, at every size.

        The largest size comes first: the smaller ones then fit into the memory that it has
        reserved.
        """
        pool = cuda.graph_pool()
        sizes = self.sizes[::-1]
        for size in tqdm(sizes, "Capturing CUDA graphs", disable=not shows_progress):
            replay, output = cuda.capture(partial(launch, size), pool)
            self._replays[size], self.outputs[size] = replay, output

    def replay(self, size: int) -> torch.Tensor:
        """Launch the graph of `size`; return its output, which the next replay overwrites."""
        self._replays[size]()
        return self.outputs[size]
