"""The chapter's step as a picture: the pool of KV slots above, the packed batch below."""

from pathlib import Path

import facts
import svg

worked = facts.load(Path(__file__).with_name("worked.py"))

NUM_BLOCKS = 10
_SIZE = worked.EXAMPLE_BLOCK_SIZE


def pool_and_batch() -> str:
    """Draw where each new token's K and V are stored, and its fields in the batch."""
    figure = svg.Figure("The pool of KV slots, and the packed batch of one step", 560)
    figure.text(18, 34, "pool: 10 blocks of 4 KV slots", 16, "start", bold=True)
    figure.text(702, 34, "dark: written by this step", 14, "end", svg.SOFT)
    for block in range(NUM_BLOCKS):
        _block(figure, block)
    figure.text(18, 238, "the packed batch", 16, "start", bold=True)
    _batch(figure)
    return str(figure)


def _owner(slot: int) -> tuple[int, int] | None:
    """Return the token at the KV slot `slot` after the step, as (row, position)."""
    for index, row in enumerate(worked.EXAMPLE):
        for position in range(row.computed + row.new):
            if row.table[position // _SIZE] * _SIZE + position % _SIZE == slot:
                return index, position
    return None


def _block(figure: svg.Figure, block: int) -> None:
    x, y = 18 + 138 * (block % 5), 70 + 78 * (block // 5)
    figure.text(x + 64, y - 7, "0: dummy" if block == 0 else block, 14, fill=svg.SOFT)
    for offset in range(_SIZE):
        owner = _owner(block * _SIZE + offset)
        fill, words, ink = "#dfe2e9" if block == 0 else svg.WHITE, "", svg.INK
        if owner:
            index, position = owner
            row = worked.EXAMPLE[index]
            is_new = position >= row.computed
            fill = svg.COLOURS[index] if is_new else svg.PALE[index]
            ink = svg.WHITE if is_new else svg.INK
            words = f"{row.name}{position}"
        figure.rect(x + 32 * offset, y, 32, 34, fill, svg.FAINT, radius=0)
        figure.text(x + 32 * offset + 16, y + 23, words, 15, fill=ink)
    figure.rect(x, y, 128, 34, stroke=svg.SOFT, stroke_width=1.5, radius=0)


def _batch(figure: svg.Figure) -> None:
    fields = worked.fields()
    owners = [i for i, row in enumerate(worked.EXAMPLE) for _ in range(row.new)]
    names = [worked.EXAMPLE[i].name for i in owners]
    tokens = [f"{name}{p}" for name, p in zip(names, fields["positions"], strict=True)]
    lines = {
        "input_ids": tokens,
        "positions": fields["positions"],
        "slot_mapping": fields["slot_mapping"],
    }
    left, width = 150, 60
    for i, (field, values) in enumerate(lines.items()):
        y = 256 + 42 * i
        figure.text(left - 10, y + 24, field, 15, "end")
        for j, value in enumerate(values):
            figure.rect(
                *(left + width * j, y, width - 3, 36, svg.PALE[owners[j]]),
                stroke=svg.COLOURS[owners[j]],
            )
            figure.text(left + width * j + (width - 3) / 2, y + 24, value, 15)
    figure.text(left - 14, 420, "cu_seqlens_q", 15, "end")
    for i, end in enumerate(fields["cu_seqlens_q"]):
        x = left + width * end - 1.5
        figure.line(x, 384, x, 402, svg.INK, 2)
        figure.text(x, 420, end, 15)
        if i:
            middle = (x + left + width * fields["cu_seqlens_q"][i - 1]) / 2
            length = fields["context_lens"][i - 1]
            figure.text(middle, 456, length, 15, fill=svg.COLOURS[i - 1])
    figure.text(left - 10, 456, "context_lens", 15, "end")
    figure.text(left - 10, 510, "output_rows", 15, "end")
    for output in fields["output_rows"]:
        x = left + width * output + width / 2
        figure.arrow(x, 468, x, 492, svg.RED, 2, 9)
        figure.text(x, 512, output, 15, fill=svg.RED, bold=True)
    words = "arrows: logits for sampling; c is in the middle of its prompt"
    figure.text(left, 540, words, 14, "start", svg.SOFT)
