"""Blocks, KV slots and unused memory: the arithmetic of chapters 1 and 4."""


def holes(sizes: list[int], freed: list[int]) -> list[int]:
    """Return the lengths of the holes if reservations of `sizes` lie in a row and some are freed.

    Adjacent holes are one.
    """
    found, hole = [], 0
    for i, size in enumerate(sizes):
        if i in freed:
            hole += size
        elif hole:
            found, hole = [*found, hole], 0
    return [*found, hole] if hole else found


def blocks_needed(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def unused_in_blocks(tokens: int, block_size: int) -> float:
    """Return the share of a sequence's KV slots without a token; only its last block has any."""
    slots = blocks_needed(tokens, block_size) * block_size
    return 1 - tokens / slots


def mean_unused(block_size: int) -> float:
    """Return the mean of a last block's empty KV slots, if 1 to all tokens are equally likely."""
    return (block_size - 1) / 2


def tokens_for_waste(share: float, block_size: int) -> float:
    """Return the length from which the mean waste is below `share`: u / (n + u) = share."""
    unused = mean_unused(block_size)
    return unused / share - unused


def slot(block_table: list[int], position: int, block_size: int) -> int:
    """Kwon et al. 2023, section 4.3: physical block x block size + offset."""
    return block_table[position // block_size] * block_size + position % block_size


def slot_table(block_table: list[int], positions: list[int], block_size: int) -> str:
    """Markdown: how each position is found."""
    lines = ["| position | logical block | offset | physical block | KV slot |"]
    lines.append("|---:|---:|---:|---:|---:|")
    for position in positions:
        logical, offset = divmod(position, block_size)
        lines.append(
            f"| {position} | {logical} | {offset} | {block_table[logical]} | "
            f"{slot(block_table, position, block_size)} |"
        )
    return "\n".join(lines)


def table_share(block_size: int, per_token: int) -> float:
    """Return the bytes of an int32 entry of the block table over the bytes of its block."""
    return 4 / (block_size * per_token)


def block_size_table(
    sizes: list[int], tokens: int, context: int, head_dim: int, dtype_bytes: int
) -> str:
    """Markdown: what a block size costs.

    Mean waste of a sequence of about `tokens` tokens, entries of the table of one of `context`
    tokens, the contiguous piece of K that one head reads, and the mean number of tokens that a
    shared prefix loses because only whole blocks are shared.
    """
    lines = ["| block size | mean waste | table entries | run per head | prefix lost |"]
    lines.append("|---:|---:|---:|---:|---:|")
    for size in sizes:
        unused = mean_unused(size)
        lines.append(
            f"| {size} | {unused / (tokens + unused):.1%} | {blocks_needed(context, size):,} | "
            f"{size * head_dim * dtype_bytes:,} B | {unused:.1f} tokens |"
        )
    return "\n".join(lines)
