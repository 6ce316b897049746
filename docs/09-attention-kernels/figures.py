"""Tiles of a chunk's attention, and the equal shares of decode rows."""

from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

# A chunk at the end of a context, and the tiles of 16-bit values with head_dim 128: rows of a tile
# (tokens times heads of a group), and keys. Qwen3-0.6B has two query heads for each KV head.
CONTEXT, CHUNK = 500, 200
BLOCK_M, TILE_N, GROUP = 128, 64, 2
ROWS, SHARES = (300, 20, 180), 3  # decode rows' keys: the chapter's example


def tiles_of_a_chunk() -> str:
    """Draw which tiles of keys each program computes without masks, with masks, or never reads."""
    figure = svg.Figure("Tiles of queries and keys of a chunk under the causal mask", 470)
    block_q = BLOCK_M // GROUP
    tiles = key_tiles(CONTEXT, CHUNK, block_q)
    left, top, scale = 130, 92, 0.9
    width, height = TILE_N * scale, block_q * scale
    figure.text(left, 30, f"keys 0 to {CONTEXT - 1}, {TILE_N} to a tile", 16, "start", bold=True)
    for n in range(-(-CONTEXT // TILE_N)):
        figure.text(left + width * n + 2, 78, n * TILE_N, 14, "start", svg.SOFT)
    first = CONTEXT - CHUNK
    for i, (plain, last) in enumerate(tiles):
        y = top + height * i
        begin = first + i * block_q
        end = min(CONTEXT, begin + block_q)
        figure.text(left - 10, y + 26, "queries", 14, "end")
        figure.text(left - 10, y + 43, f"{begin} to {end - 1}", 14, "end")
        for n in range(-(-CONTEXT // TILE_N)):
            fill = svg.PALE_GREEN if n < plain else svg.PALE_ORANGE if n < last else svg.WHITE
            figure.rect(left + width * n, y, width, height, fill, svg.SOFT, radius=0)
    bottom = top + height * len(tiles)
    corner = (left + scale * first, top)
    figure.path([corner, (left + scale * CONTEXT, top + scale * CHUNK)], svg.RED, stroke_width=3)
    figure.line(corner[0], 46, corner[0], bottom, svg.RED, 1, "5 4")
    figure.text(corner[0] + 6, 56, "the chunk begins", 14, "start", svg.RED)
    legend = (
        (svg.PALE_GREEN, "without masks"),
        (svg.PALE_ORANGE, "with masks"),
        (svg.WHITE, "never read"),
    )
    for i, (fill, words) in enumerate(legend):
        figure.rect(left + 160 * i, bottom + 18, 18, 18, fill, svg.SOFT)
        figure.text(left + 160 * i + 26, bottom + 32, words, 15, "start")
    _group(figure, left, bottom + 62)
    return str(figure)


def equal_shares() -> str:
    """Draw the key tiles of all decode rows in a line, divided into shares of equal length."""
    figure = svg.Figure("Key tiles of decode rows, divided into equal shares", 316)
    shares = worked.shares(ROWS, TILE_N, SHARES)
    owner = {tile: share for share, tiles in enumerate(shares) for tile in tiles}
    figure.text(18, 34, f"tiles of {TILE_N} keys, row by row", 16, "start", bold=True)
    x, size = 30.0, 66
    edges: dict[int, list[float]] = {}
    for row, keys in enumerate(ROWS):
        start = x
        for i in range(-(-keys // TILE_N)):
            share = owner[row, i]
            figure.rect(x, 78, size - 4, 62, svg.PALE[share], svg.COLOURS[share], 1.5)
            held = min(TILE_N, keys - i * TILE_N)
            figure.rect(x, 132, (size - 4) * held / TILE_N, 8, svg.COLOURS[share], radius=0)
            figure.text(x + size / 2 - 2, 112, f"{row}.{i}", 15)
            edges.setdefault(share, []).append(x)
            x += size
        figure.text((start + x) / 2 - 2, 68, f"row {row}: {keys} keys", 14, fill=svg.SOFT)
        x += 12
    for share, places in edges.items():
        colour, end = svg.COLOURS[share], places[-1] + size - 4
        figure.path(
            [(places[0], 152), (places[0], 162), (end, 162), (end, 152)], colour, stroke_width=2
        )
        middle = (places[0] + end) / 2
        figure.text(middle, 184, f"share {share}", 16, fill=colour, bold=True)
        figure.text(middle, 204, f"{len(places)} tiles", 14, fill=colour)
    for i, words in enumerate(_merges(shares)):
        figure.text(18, 248 + 24 * i, words, 15, "start")
    return str(figure)


def key_tiles(context: int, chunk: int, block_q: int) -> list[tuple[int, int]]:
    """Return for each tile of queries the number of key tiles without masks, and of all it reads.

    As `chunk_attention_kernel` counts them when there is no sliding window.
    """
    found = []
    for q_tile in range(-(-chunk // block_q)):
        first_position = context - chunk + q_tile * block_q
        num_keys = min(context, first_position + block_q)
        last = -(-num_keys // TILE_N)
        found.append((min((first_position + 1) // TILE_N, last), last))
    return found


def _merges(shares: list[list[tuple[int, int]]]) -> list[str]:
    """Return one sentence for each row."""
    found = []
    for row in range(len(ROWS)):
        having = [str(i) for i, tiles in enumerate(shares) if any(r == row for r, _ in tiles)]
        if len(having) == 1:
            found.append(f"row {row}: share {having[0]} has all of it, nothing to merge")
        else:
            found.append(f"row {row}: shares {' and '.join(having)}, merged by their log-sum-exp")
    return found


def _group(figure: svg.Figure, x: float, y: float) -> None:
    """Draw how the rows of one tile are numbered."""
    tokens = BLOCK_M // GROUP
    words = f"a tile has {BLOCK_M} rows: {tokens} queries of {GROUP} heads that read one KV head"
    figure.text(x - 112, y + 12, words, 15, "start")
    cells = [f"q{m // GROUP} h{m % GROUP}" for m in range(6)]
    cells += ["...", *(f"q{m // GROUP} h{m % GROUP}" for m in range(BLOCK_M - 2, BLOCK_M))]
    for i, cell in enumerate(cells):
        colour = (int(cell[1:-3]) % 2) if cell != "..." else None
        fill = svg.WHITE if colour is None else (svg.PALE_BLUE, svg.PALE_PURPLE)[colour]
        figure.rect(x - 112 + 76 * i, y + 24, 72, 30, fill, svg.FAINT)
        figure.text(x - 112 + 76 * i + 36, y + 45, cell, 15)
