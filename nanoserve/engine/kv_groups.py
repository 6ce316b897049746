"""Groups of layers whose K and V are needed equally long.

A layer with full attention reads K and V of all earlier tokens; one with a sliding window (Mistral,
Gemma, gpt-oss) reads the last `window` only, its own included. So layers of one kind form a group
that has a block table of its own, and a group with a window gives back the blocks behind it.

All groups take their blocks from one pool. For that a block must be equally large in each of them:
groups have equally many layers, and a kind that has more of them has several groups. Gemma 3 1B,
26 layers, of which 22 have a window of 512: one group of 4 layers with full attention, six groups
of up to 4 with the window. A block then holds 4 layers' K and V of `block_size` tokens.
"""

from collections.abc import Iterable
from typing import NamedTuple

_MOST_PADDING = 1.5  # up to here, a kind of fewer layers is padded to the size of one of more


class KVCacheGroup(NamedTuple):
    window: int | None  # how many tokens a query sees, its own included; None for all
    layers: tuple[int, ...]  # indices in the model


def group_layers(sliding_windows: Iterable[int | None]) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model whose layers have these windows, the widest kind first.

    A group's layers are spread over the model, so that each stage of a pipeline has about as many
    of one group as of another.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(sliding_windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) <= _MOST_PADDING * min(counts) else min(counts)
    groups = []
    for window in sorted(kinds, key=lambda window: (window is not None, -(window or 0))):
        layers = kinds[window]
        num_groups = -(-len(layers) // size)
        groups += [KVCacheGroup(window, tuple(layers[i::num_groups])) for i in range(num_groups)]
    return tuple(groups)
