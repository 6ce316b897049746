"""A pool of blocks and the block tables of two sequences: chapter 4's example and another."""

from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

BLOCK_SIZE, NUM_BLOCKS = 16, 13
# Names, block tables and tokens. The first is the chapter's; its last block holds seven tokens.
SEQUENCES = (("A", (5, 2, 8, 12), 55), ("B", (3, 10), 20))
FOLLOWED = 35  # a position of A


def pool_and_tables() -> str:
    """Draw which positions lie in which block, and which KV slots are empty."""
    figure = svg.Figure(
        "Block tables of two sequences, and the pool in which their blocks lie", 430
    )
    for index in range(len(SEQUENCES)):
        _table(figure, index)
    figure.text(18, 222, "pool", 16, "start", bold=True)
    words = (
        f"a block has {BLOCK_SIZE} KV slots; coloured ones hold a token; block 0 is the dummy block"
    )
    figure.text(18, 418, words, 14, "start", svg.SOFT)
    for block in range(NUM_BLOCKS):
        _block(figure, block)
    slot = worked.slot(list(SEQUENCES[0][1]), FOLLOWED, BLOCK_SIZE)
    block, offset = divmod(slot, BLOCK_SIZE)
    words = f"position {FOLLOWED} of A: block {block}, offset {offset}, KV slot {slot}"
    figure.text(702, 222, words, 15, "end", svg.RED, bold=True)
    return str(figure)


def _table(figure: svg.Figure, index: int) -> None:
    """Draw a sequence's name, and each entry with the positions that it stands for."""
    name, table, num_tokens = SEQUENCES[index]
    y = 22 + 92 * index
    figure.text(18, y + 34, f"{name}: {num_tokens} tokens", 16, "start", bold=True)
    for i, block in enumerate(table):
        x = 148 + 138 * i
        first, last = i * BLOCK_SIZE, min(num_tokens, (i + 1) * BLOCK_SIZE) - 1
        held = FOLLOWED in range(first, last + 1) and index == 0
        stroke = svg.RED if held else svg.COLOURS[index]
        figure.rect(x, y, 130, 56, svg.PALE[index], stroke, 3 if held else 1)
        figure.text(x + 65, y + 22, f"{first} to {last}", 14, fill=svg.SOFT)
        figure.text(x + 65, y + 45, f"block {block}", 16)


def _block(figure: svg.Figure, block: int) -> None:
    column, row = block % 7, block // 7
    x, y, cell = 18 + 99 * column, 262 + 86 * row, 11
    owner = [
        (index, i)
        for index, (_, table, _) in enumerate(SEQUENCES)
        for i, b in enumerate(table)
        if b == block
    ]
    words = "dummy" if block == 0 else f"{block}"
    if owner:
        words += f": {SEQUENCES[owner[0][0]][0]}[{owner[0][1]}]"
    figure.text(x + 45, y - 6, words, 14)
    for offset in range(BLOCK_SIZE):
        fill = svg.WHITE if block else "#dfe2e9"
        slot = block * BLOCK_SIZE + offset
        if owner:
            index, i = owner[0]
            is_filled = i * BLOCK_SIZE + offset < SEQUENCES[index][2]
            fill = svg.PALE[index] if is_filled else fill
        if slot == worked.slot(list(SEQUENCES[0][1]), FOLLOWED, BLOCK_SIZE):
            fill = svg.RED
        left, top = x + offset % 8 * cell, y + offset // 8 * 22
        figure.rect(left, top, cell, 22, fill, svg.FAINT, radius=0)
    outline = svg.COLOURS[owner[0][0]] if owner else svg.SOFT
    figure.rect(x, y, 8 * cell, 44, stroke=outline, stroke_width=1.5)
