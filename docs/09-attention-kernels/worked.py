"""Worked numbers of the attention kernels: traffic, online softmax, shares and their merge."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """Keys that are looked at together: one query's scores of them, and a number as each value."""

    scores: tuple[float, ...]
    values: tuple[float, ...]


class State(NamedTuple):
    """What is kept of all scores so far."""

    maximum: float
    total: float  # of exp(score - maximum)
    acc: float  # of exp(score - maximum) * value


class Part(NamedTuple):
    """What one program of several hands on."""

    out: float
    lse: float  # log of the sum of exp(score)


TILES = (Tile((1.0, 3.0), (10.0, 20.0)), Tile((2.0, 5.0), (30.0, 40.0)))


def score_bytes(tokens: int, heads: int, dtype_bytes: int) -> int:
    """Bytes of the score matrices [heads, tokens, tokens] of one layer."""
    return heads * tokens * tokens * dtype_bytes


def qkvo_bytes(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of q, k, v and the output of one layer's attention."""
    return tokens * (2 * heads + 2 * kv_heads) * head_dim * dtype_bytes


def kv_bytes(rows: int, context: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of K and V that the decode rows of one step see in one layer."""
    return rows * context * 2 * kv_heads * head_dim * dtype_bytes


def decode_intensity(group: int, dtype_bytes: int) -> float:
    """Operations per byte of K and V, when `group` query heads use what is read once.

    A key costs head_dim multiplications and additions for its score, its value as many again.
    """
    return group * 4 / (2 * dtype_bytes)


def exact(tiles: Sequence[Tile] = TILES) -> float:
    """Softmax over all scores, in two passes, and the mean of the values."""
    scores = [score for tile in tiles for score in tile.scores]
    values = [value for tile in tiles for value in tile.values]
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def online_states(tiles: Sequence[Tile] = TILES) -> list[State]:
    """The state after each tile (Milakov and Gimelshein 2018; Dao et al. 2022)."""
    state, states = State(-math.inf, 0.0, 0.0), []
    for tile in tiles:
        maximum = max(state.maximum, *tile.scores)
        rescale = math.exp(state.maximum - maximum)
        weights = [math.exp(score - maximum) for score in tile.scores]
        acc = sum(w * v for w, v in zip(weights, tile.values, strict=True))
        state = State(maximum, state.total * rescale + sum(weights), state.acc * rescale + acc)
        states.append(state)
    return states


def online_table(tiles: Sequence[Tile] = TILES) -> str:
    """`online_states` as Markdown."""
    lines = [
        "| tile | scores | values | rescale | maximum | sum | accumulated | accumulated / sum |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    before = -math.inf
    for i, (tile, state) in enumerate(zip(tiles, online_states(tiles), strict=True)):
        rescale, mean = math.exp(before - state.maximum), state.acc / state.total
        lines.append(
            f"| {i} | {_listed(tile.scores)} | {_listed(tile.values)} | {rescale:.4f} "
            f"| {state.maximum:g} | {state.total:.4f} | {state.acc:.4f} | {mean:.4f} |"
        )
        before = state.maximum
    return "\n".join(lines)


def parts(tiles: Sequence[Tile] = TILES) -> list[Part]:
    """Each tile on its own, as by a program that sees no other."""
    states = [online_states([tile])[0] for tile in tiles]
    return [Part(s.acc / s.total, s.maximum + math.log(s.total)) for s in states]


def merge(parts: Sequence[Part]) -> float:
    """The parts' mean, weighted by their sums of exponentials (Dao et al. 2023)."""
    largest = max(part.lse for part in parts)
    weights = [math.exp(part.lse - largest) for part in parts]
    return sum(w * part.out for w, part in zip(weights, parts, strict=True)) / sum(weights)


def plain_mean(parts: Sequence[Part]) -> float:
    """What one gets by forgetting the weights."""
    return sum(part.out for part in parts) / len(parts)


def parts_table(tiles: Sequence[Tile] = TILES) -> str:
    """`parts` and their weights, as Markdown."""
    lines = ["| part | output | log-sum-exp | weight |", "|---|---:|---:|---:|"]
    found = parts(tiles)
    largest = max(part.lse for part in found)
    for i, part in enumerate(found):
        weight = math.exp(part.lse - largest)
        lines.append(f"| {i} | {part.out:.4f} | {part.lse:.4f} | {weight:.4f} |")
    return "\n".join(lines)


def tile_starts(lengths: Sequence[int], block_q: int) -> list[int]:
    """The first tile of each row, and how many programs are launched for one KV head.

    Row r starts at (tokens before it) // block_q + r: nobody counts the tiles of the rows before.
    """
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [end // block_q + i for i, end in enumerate(ends)]


def tiles_table(lengths: Sequence[int], block_q: int) -> str:
    """Which program works for whom, as Markdown."""
    starts = tile_starts(lengths, block_q)
    lines = ["| program | row | its tokens |", "|---|---|---|"]
    for row, (length, first, last) in enumerate(zip(lengths, starts, starts[1:], strict=False)):
        for tile in range(last - first):
            begin, end = tile * block_q, min(length, (tile + 1) * block_q) - 1
            tokens = f"{begin} to {end}" if begin < length else "none: it returns at once"
            lines.append(f"| {first + tile} | {row} | {tokens} |")
    return "\n".join(lines)


def shares(contexts: Sequence[int], tile_n: int, num_shares: int) -> list[list[tuple[int, int]]]:
    """Of each share the tiles that it has, as (row, tile): all rows' tiles, cut into equal parts.

    As `nanoserve.kernels.decode_attention_kernels` has it.
    """
    tiles = [(row, i) for row, n in enumerate(contexts) for i in range(-(-n // tile_n))]
    size = -(-len(tiles) // num_shares)
    return [tiles[i * size : (i + 1) * size] for i in range(num_shares)]


def num_shares(multiprocessors: int, num_kv_heads: int, programs: int = 2) -> int:
    """As many as there are places for a program of each KV head, two programs on a processor."""
    return programs * multiprocessors // num_kv_heads


def shares_table(contexts: Sequence[int], tile_n: int, count: int) -> str:
    """Which share has which tiles of which row, as Markdown."""
    lines = ["| share | " + " | ".join(f"tiles of row {i}" for i in range(len(contexts))) + " |"]
    lines.append("|---" * (len(contexts) + 1) + "|")
    for share, tiles in enumerate(shares(contexts, tile_n, count)):
        cells = (_listed([i for row, i in tiles if row == r]) for r in range(len(contexts)))
        lines.append(f"| {share} | {' | '.join(cells)} |")
    return "\n".join(lines)


def longest_part(contexts: Sequence[int], tile_n: int, num_places: int) -> float:
    """A program per row, on as many places: the time of the last one over that of equal shares."""
    free_at = [0] * num_places
    for n in contexts:  # in order, each on the place that is free first
        first = free_at.index(min(free_at))
        free_at[first] += -(-n // tile_n)
    return max(free_at) / (sum(free_at) / num_places)


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
