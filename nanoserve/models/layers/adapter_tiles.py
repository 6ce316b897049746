"""The tokens of a step, by adapter, in the tiles that a GPU's kernel of adapters reads.

`nanoserve.kernels.triton.low_rank` computes 16 tokens of the same adapter at once. Which these are
is written to the same memory in every step, so that a graph that was captured once finds there the
tokens of each step that it replays.
"""

import numpy as np
import torch
from torch import Tensor

from nanoserve.sampling.host_copies import copy_into

TILE = 16  # tokens; the fewest rows of a product of tensor cores


def most_tiles(num_tokens: int, num_places: int) -> int:
    """Return the most tiles that so many tokens can take, with so many adapters among them."""
    return (num_tokens + (TILE - 1) * min(num_tokens, num_places)) // TILE


def tiles_of(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each tile, int32 [num_tiles, 16], and its place, int32 [num_tiles].

    places: by token, -1 for none; such a token is in no tile. Entries of a tile that has fewer
    tokens are -1.
    """
    by_place = tokens_by_place(places)
    counts = np.array([-(-len(one) // TILE) for one in by_place.values()], dtype=np.int64)
    tiles = np.full((int(counts.sum()), TILE), -1, dtype=np.int32)
    for first, one in zip(np.cumsum(counts) - counts, by_place.values(), strict=True):
        tiles[first:].reshape(-1)[: len(one)] = one
    return tiles, np.repeat(np.array([*by_place], dtype=np.int32), counts)


def tokens_by_place(places: np.ndarray) -> dict[int, np.ndarray]:
    """Return the tokens of each place, ascending. places: by token, -1 for none."""
    order = np.argsort(places, kind="stable")
    present, firsts = np.unique(places[order], return_index=True)
    parts = np.split(order, firsts[1:]) if len(order) else []
    by_place = dict(zip(present.tolist(), parts, strict=True))
    by_place.pop(-1, None)
    return by_place


class PlaceTiles:
    """The tiles of a step, in memory of a device at fixed addresses.

    most_tokens: of a step.
    """

    def __init__(self, most_tokens: int, num_places: int, device: torch.device) -> None:
        self._num_places, self._most = num_places, most_tiles(most_tokens, num_places)
        # The places of all tiles, and behind them the tokens, so that one copy has both. Kernels
        # are compiled for addresses that are multiples of 16 bytes.
        self._first = -(-self._most // TILE) * TILE
        num_entries = self._first + self._most * TILE
        self._memory = torch.full((num_entries,), -1, dtype=torch.int32, device=device)

    def fill(self, places: np.ndarray) -> tuple[Tensor, Tensor]:
        """Send the tiles of a step to the device, and return their `views`; all others are empty.

        places: by token, -1 for none.
        """
        tokens, of_tiles = tiles_of(places)
        num_tiles = len(of_tiles)
        if num_tiles > self._most:
            raise ValueError(f"{len(places)} tokens take {num_tiles} tiles, of {self._most}")
        entries = np.full(self._first + num_tiles * TILE, -1, dtype=np.int32)
        entries[:num_tiles] = of_tiles
        entries[self._first :] = tokens.reshape(-1)
        copy_into(self._memory[: len(entries)], entries)
        return self.views(num_tiles)

    def views_of_graph(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the views of as many tiles as any step of so many tokens can take."""
        return self.views(most_tiles(num_tokens, self._num_places))

    def views(self, num_tiles: int) -> tuple[Tensor, Tensor]:
        """Return the tokens [num_tiles, 16] and the places [num_tiles] of the first tiles."""
        places, tokens = self._memory[:num_tiles], self._memory[self._first :].view(-1, TILE)
        return tokens[:num_tiles], places
