"""A solution of `exercise.py`."""

from dataclasses import dataclass


@dataclass
class Running:
    name: str
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    arrival: int
    priority: int = 0


def schedule_running(
    running: list[Running],
    num_free_blocks: int,
    block_size: int,
    budget: int,
    threshold: int = 0,
    by_priority: bool = False,
) -> tuple[dict[str, int], list[str]]:
    def order(seq: Running) -> tuple[int, int]:
        return (seq.priority if by_priority else 0, seq.arrival)

    planned: dict[str, int] = {}
    victims: list[str] = []
    blocks = {seq.name: seq.num_blocks for seq in running}  # of the sequences that still run
    for seq in running:
        if seq.name not in blocks:
            continue
        n = min(seq.num_tokens - seq.num_computed_tokens, budget, threshold or budget)
        wanted = -(-(seq.num_computed_tokens + n) // block_size)
        num_new = max(0, wanted - seq.num_blocks)
        while seq.name in blocks and num_new > num_free_blocks:
            victim = max((other for other in running if other.name in blocks), key=order)
            victims.append(victim.name)
            num_free_blocks += blocks.pop(victim.name)
            budget += planned.pop(victim.name, 0)
        if seq.name in blocks:
            planned[seq.name] = n
            budget -= n
            blocks[seq.name] += num_new
            num_free_blocks -= num_new
    return planned, victims
