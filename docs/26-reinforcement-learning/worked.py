"""Chapter 26's numbers: the time of a step, advantages, clipped ratios, orders of additions.

`runs.json` has what `python -m training.grpo` printed, with machine and date; nothing here trains.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from tables import table

# LLaMA-3.1-8B in 16 bits on an H100, whose arithmetic reaches half of its peak (chapter 25).
PARAMETERS, KV_BYTES = 8_030_261_248, 131_072
BANDWIDTH, FLOPS = 3.35e12, 989e12 / 2
NUM_ANSWERS, PROMPT, MEAN_LENGTH = 128, 200, 2_000  # of a GPU

# ---------------------------------------------------------------- the time of a step


def answer_lengths(varied: bool, limit: int | None = None) -> np.ndarray:
    """Return the lengths of a GPU's answers: all equal, or quantiles of an exponential
    distribution with the same mean, which are cut at `limit`."""
    if not varied:
        return np.full(NUM_ANSWERS, MEAN_LENGTH)
    quantiles = (np.arange(NUM_ANSWERS) + 0.5) / NUM_ANSWERS
    lengths = np.round(-MEAN_LENGTH * np.log1p(-quantiles)).astype(np.int64)
    return np.minimum(lengths, limit or lengths.max())


def rollout_seconds(lengths: np.ndarray) -> float:
    """Time of all decode steps; each reads the weights, and K and V of the unfinished answers."""
    steps = np.arange(lengths.max())
    unfinished = (lengths[:, None] > steps).sum(axis=0)
    read = 2 * PARAMETERS + unfinished * (PROMPT + steps) * KV_BYTES
    return float(read.sum() / BANDWIDTH)


def update_seconds(lengths: np.ndarray) -> float:
    """Time of a forward and a backward pass: six operations for each parameter and token."""
    return float(6 * PARAMETERS * (lengths + PROMPT).sum() / FLOPS)


def step_table() -> str:
    """Table: what rollouts and the update take, by the lengths of the answers."""
    cases = [
        ("all 2,000 tokens", answer_lengths(varied=False)),
        ("varied, 2,000 on average", answer_lengths(varied=True)),
        ("the same, cut at 4,000", answer_lengths(varied=True, limit=4_000)),
    ]
    rows = []
    for name, lengths in cases:
        rollouts, update = rollout_seconds(lengths), update_seconds(lengths)
        share = f"{rollouts / (rollouts + update):.0%}"
        rows.append((name, f"{lengths.max():,}", f"{rollouts:.0f} s", f"{update:.0f} s", share))
    return table(("answers", "the longest", "rollouts", "update", "the engine's share"), rows)


# ---------------------------------------------------------------- advantages, ratios

CLIP = 0.2


def advantages(rewards: list[float]) -> np.ndarray:
    """Rewards of the answers to one question, relative to their mean, in standard deviations."""
    values = np.array(rewards, dtype=np.float64)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-4)


def advantage_table(counts: list[int]) -> str:
    """Table: the advantages of right and wrong answers if this many of eight are right."""
    rows = []
    for count in counts:
        found = advantages([1.0] * count + [0.0] * (8 - count))
        right = f"{found[0] + 0.0:+.2f}" if count else ""
        wrong = f"{found[-1] + 0.0:+.2f}" if count < 8 else ""
        rows.append((f"{count} of 8", right, wrong))
    return table(("right answers", "a right one's advantage", "a wrong one's"), rows)


def clipped_term(engine: float, trainer: float, advantage: float) -> tuple[float, float, bool]:
    """Return the ratio of the two probabilities, a token's term, and if it has a gradient."""
    ratio = trainer / engine
    clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
    plain, limited = ratio * advantage, clipped * advantage
    return ratio, min(plain, limited), plain <= limited


def clip_table() -> str:
    """Table: terms of tokens that the engine sampled with a probability of 0.5."""
    rows = []
    for trainer, advantage in [(0.5, 1), (0.55, 1), (0.65, 1), (0.65, -1), (0.35, 1), (0.35, -1)]:
        ratio, term, moves = clipped_term(0.5, trainer, advantage)
        moved = ("more likely" if advantage > 0 else "less likely") if moves else "not moved"
        rows.append((f"{trainer:.2f}", f"{ratio:.2f}", f"{advantage:+d}", f"{term:+.2f}", moved))
    return table(("in the trainer", "ratio", "advantage", "term", "the token becomes"), rows)


# ---------------------------------------------------------------- two probabilities

LOGITS = np.array([2.0, 1.0, 0.0, -1.0])


def probabilities(temperature: float = 1.0, top_p: float = 1.0) -> np.ndarray:
    """The distribution of four tokens after temperature and top-p, as the sampler has it."""
    exps = np.exp(LOGITS / temperature)
    found = exps / exps.sum()  # LOGITS are sorted
    kept = np.where(np.cumsum(found) - found < top_p, found, 0.0)
    return kept / kept.sum()


def distribution_table(temperature: float, top_p: float) -> str:
    """Table: a token's probability before and after temperature and top-p."""
    raw, warm = probabilities(), probabilities(temperature)
    kept = probabilities(temperature, top_p)
    rows = []
    for token, (a, b, c) in enumerate(zip(raw, warm, kept, strict=True)):
        last = f"{b / c:.2f}" if c else "never sampled"
        rows.append((token, *(f"{p:.3f}" for p in (a, b, c)), f"{b / a:.2f}", last))
    head = ("token", "raw", "temperature", "and top-p", "temperature / raw")
    return table((*head, "temperature / sampled from"), rows)


# Mean and largest |trainer - engine| of the log-probabilities of 1,030 sampled tokens.
MISMATCHES = [
    ("engine in bfloat16, trainer in float32", 2.8e-2, 2.8e-1),
    ("both in bfloat16", 4.1e-2, 3.1e-1),
    ("transformers in bfloat16 against itself in float32", 3.6e-2, 2.7e-1),
]


def mismatch_table() -> str:
    """Table: differences on the damaged tiny-qwen3, and the largest ratio that they make."""
    first_steps = [run["steps"][0] for run in recorded()["runs"]]
    mean = sum(step["mean"] for step in first_steps) / len(first_steps)
    largest = max(step["largest"] for step in first_steps)
    rows = []
    for name, average, most in [("engine and trainer in float32", mean, largest), *MISMATCHES]:
        rows.append((name, f"{average:.1e}", f"{most:.1e}", f"{math.exp(most):.6g}"))
    return table(("what computes", "mean difference", "largest", "as a ratio"), rows)


# ---------------------------------------------------------------- orders of additions


def one_by_one(values: np.ndarray) -> np.floating[Any]:
    """Add from the first value on; each sum is rounded to the type of the values."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def in_pairs(values: np.ndarray) -> np.floating[Any]:
    """Add neighbours, then neighbouring sums; the number of values is a power of two."""
    while len(values) > 1:
        values = values[::2] + values[1::2]
    return values[0]


def in_lanes(values: np.ndarray, num_lanes: int) -> np.floating[Any]:
    """Add every fourth value, say, in a lane of its own, as a vector register does."""
    return one_by_one(np.array([one_by_one(values[i::num_lanes]) for i in range(num_lanes)]))


def in_parts(values: np.ndarray, num_parts: int) -> np.floating[Any]:
    """Add each contiguous part, then their sums, as kernels do that split a long row."""
    return one_by_one(np.array([one_by_one(part) for part in np.split(values, num_parts)]))


ORDERS = {
    "one by one": one_by_one,
    "from the end": lambda values: one_by_one(values[::-1]),
    "two halves": lambda values: in_parts(values, 2),
    "four lanes": lambda values: in_lanes(values, 4),
    "in pairs": in_pairs,
}


def products() -> np.ndarray:
    """The 1,024 products of a row and a column, in float32, of about the size of a model's."""
    i = np.arange(1024)
    row = ((i * 7919) % 1009 - 504).astype(np.float32) / np.float32(512)
    column = ((i * 104729) % 997 - 498).astype(np.float32) / np.float32(7)
    return row * column


def order_table() -> str:
    """Table: the same numbers, added in five orders."""
    few = np.array([2048] + [1] * 7)
    rows = []
    for name, add in ORDERS.items():
        half, single = (float(add(few.astype(kind))) for kind in (np.float16, np.float32))
        rows.append((name, f"{half:.0f}", f"{single:.0f}", f"{float(add(products())):.9g}"))
    head = ("order", "2048 and seven 1s, float16", "float32", "1,024 products, float32")
    return table(head, rows)


# ---------------------------------------------------------------- other weights


def tokens_in(num_bytes: float) -> int:
    """Tokens of KV cache in this many bytes."""
    return int(num_bytes // KV_BYTES)


def pool_tokens(num_models: int, gigabytes: float = 72) -> int:
    """Tokens of KV cache beside one model or two, in 90 % of 80 GB."""
    return tokens_in(gigabytes * 1e9 - num_models * 2 * PARAMETERS)


# ---------------------------------------------------------------- the recorded runs


def recorded() -> dict[str, Any]:
    """Return the recorded runs of `python -m training.grpo`."""
    return json.loads(Path(__file__).with_name("runs.json").read_text(encoding="utf-8"))


def learning_table(numbers: list[int]) -> str:
    """Table: the share of right answers in some of the steps, and how far both sides differ."""
    runs = recorded()["runs"]
    rows = []
    for number in numbers:
        steps = [run["steps"][number] for run in runs]
        mean = sum(step["mean"] for step in steps) / len(steps)
        largest = max(step["largest"] for step in steps)
        rewards = (f"{step['reward']:.2f}" for step in steps)
        rows.append((number, *rewards, f"{mean:.1e}", f"{largest:.1e}"))
    seeds = (f"right, seed {run['seed']}" for run in runs)
    return table(("step", *seeds, "mean difference", "largest"), rows)


def stale_table() -> str:
    """Table: the mean difference in the first steps of three runs, two of which have a bug."""
    found = recorded()["stale"]
    rows = [
        (number, *(f"{mean:.1e}" for mean in means))
        for number, means in enumerate(zip(*found.values(), strict=True))
    ]
    head = ("step", "as it is", "each second update left out", "old blocks are found")
    return table(head, rows)


def learning_facts() -> str:
    """Return the machine and the date of the recorded runs, and how long one took."""
    found = recorded()
    seconds = max(run["seconds"] for run in found["runs"])
    return f"{found['machine']}, {found['date']}; {seconds} seconds for a run"
