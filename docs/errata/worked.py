"""The numbers of the page on common errors, computed from the data of the examples."""

from fractions import Fraction


def rounded(values: list[float], digits: int = 3) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def accepted_drafts(rate: float, drafts: int) -> float:
    """Expected drafts before the first rejection: a + a^2 + ... (Leviathan et al. 2022)."""
    return sum(rate**i for i in range(1, drafts + 1))


def tokens_per_round(rate: float, drafts: int) -> float:
    """The accepted drafts and one more token: the correction, or the one after the last draft."""
    return 1 + accepted_drafts(rate, drafts)


def speculative_speedup(rate: float, drafts: int, draft_cost: float) -> float:
    """Tokens per round over its time, in steps of the target: one, plus the cost of the drafts."""
    return tokens_per_round(rate, drafts) / (1 + drafts * draft_cost)


def after_rejection(target: list[float], draft: list[float], *, residual: bool) -> list[float]:
    """Distribution of one token of speculative sampling.

    A draft t is accepted with probability min(1, target / draft). After a rejection the token is
    drawn from max(0, target - draft), or, if not `residual`, from the target itself.
    """
    kept = [min(p, q) for p, q in zip(target, draft, strict=True)]
    rest = [max(0.0, p - q) for p, q in zip(target, draft, strict=True)] if residual else target
    rejected = 1 - sum(kept)
    return [a + rejected * b / sum(rest) for a, b in zip(kept, rest, strict=True)]


def kept_by_top_p(probabilities: list[str], p: str, *, drop_above: bool) -> int:
    """How many of the ordered probabilities are kept, in exact arithmetic.

    Those until their sum reaches p; with `drop_above`, those whose predecessors sum to at most p.
    """
    exact, border = [Fraction(text) for text in probabilities], Fraction(p)
    before = [sum(exact[:i], Fraction(0)) for i in range(len(exact))]
    return sum(mass <= border if drop_above else mass < border for mass in before)


def batch_gain(weights_gb: float, kv_gb: float, sequences: int) -> float:
    """Tokens a second relative to one sequence, if a step takes as long as reading memory."""
    alone = weights_gb + kv_gb
    return sequences * alone / (weights_gb + sequences * kv_gb)


def shortest_with_waste(percent: float, block_size: int) -> float:
    """Tokens at which the expected empty end of the last block is this percentage."""
    empty = (block_size - 1) / 2
    return empty * (100 - percent) / percent


def largest_hole(reserved: list[int], freed: list[int]) -> int:
    """The longest run of neighbouring reservations that are all free."""
    longest = run = 0
    for i, size in enumerate(reserved):
        run = run + size if i in freed else 0
        longest = max(longest, run)
    return longest


def pairs_seen(tokens: int) -> int:
    """Query-key pairs of causal attention: each token sees itself and all before it."""
    return tokens * (tokens + 1) // 2


def quantize(x: float, scale: float, zero_point: int) -> int:
    """Affine 8-bit quantization: the zero point is an integer code, added after the division."""
    return min(255, max(0, round(x / scale) + zero_point))


def subtracted_first(x: float, scale: float, zero_point: int) -> int:
    """The same with the zero point subtracted from x, as if it were a value."""
    return round((x - zero_point) / scale)


def rank_groups(ranks: int, size: int, *, neighbours: bool) -> list[list[int]]:
    """Groups of `size` ranks: neighbours (tensor parallel), or a stride apart (pipeline)."""
    if neighbours:
        return [[*range(first, first + size)] for first in range(0, ranks, size)]
    stride = ranks // size
    return [[*range(first, ranks, stride)] for first in range(stride)]
