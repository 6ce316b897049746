"""Worked examples for benchmarking: percentiles, queues, medians, ratios, roofline, agreement."""

import math
import statistics


def percentile(values: list[float], p: float) -> float:
    """Linear between the two nearest sorted values, as in numpy and `nanoserve bench`.

    The position is (n - 1) p / 100, counted from 0.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def mean(values: list[float]) -> float:
    return statistics.fmean(values)


# Ten times to first token in milliseconds, of which one request met a long prompt.
TTFTS = [20.0, 21.0, 22.0, 22.0, 23.0, 24.0, 25.0, 26.0, 30.0, 400.0]


def percentile_table(values: list[float]) -> str:
    """Mean, median and tail of one sample."""
    lines = ["| mean | p50 | p90 | p99 | largest |", "|---|---|---|---|---|"]
    cells = [mean(values), *(percentile(values, p) for p in (50, 90, 99)), max(values)]
    return "\n".join([*lines, f"| {' | '.join(f'{cell:.1f}' for cell in cells)} |"])


def samples_beyond(count: int, p: float) -> float:
    """How many of `count` values lie beyond the p-th percentile; its estimate depends on them."""
    return count * (1 - p / 100)


def in_system(rate: float, seconds: float) -> float:
    """Little's law (Little 1961): requests in the system = arrivals a second x seconds in it."""
    return rate * seconds


def rate_through(num_seqs: int, seconds: float) -> float:
    """Little's law rearranged: the rate through `num_seqs` slots, each taken for `seconds`."""
    return num_seqs / seconds


def requests_per_second(num_seqs: int, output_len: int, step_seconds: float) -> float:
    """Finished requests, if each decodes `output_len` tokens in as many steps; prefill left out."""
    return rate_through(num_seqs, output_len * step_seconds)


def poisson_at_least(mean_count: float, count: int) -> float:
    """Probability of `count` or more arrivals where `mean_count` are expected."""
    below = (math.exp(-mean_count) * mean_count**k / math.factorial(k) for k in range(count))
    return 1 - sum(below)


def gap_shorter_than(rate: float, seconds: float) -> float:
    """Probability that the next arrival comes within `seconds`: gaps are exponential."""
    return 1 - math.exp(-rate * seconds)


def waits(due: list[float], durations: list[float]) -> list[float]:
    """Seconds from when each request was due until its answer; requests are served one by one."""
    free, found = 0.0, []
    for arrival, duration in zip(due, durations, strict=True):
        free = max(free, arrival) + duration
        found.append(free - arrival)
    return found


def stall(count: int, every: float, usual: float, at: int, long: float) -> list[list[float]]:
    """[due times, durations] of requests due at a fixed pace, of which one takes long."""
    durations = [usual] * count
    durations[at] = long
    return [[every * i for i in range(count)], durations]


def omission_table(count: int, every: float, usual: float, at: int, long: float) -> str:
    """The same requests, timed from when they were sent, and from when they were due."""
    due, durations = stall(count, every, usual, at, long)
    lines = ["| counted from | p50 ms | p90 ms | p99 ms | slower than 100 ms |"]
    lines.append("|---|---|---|---|---|")
    timed = {"when it was sent": durations, "when it was due": waits(due, durations)}
    for name, values in timed.items():
        cells = " | ".join(f"{1000 * percentile(values, p):.0f}" for p in (50, 90, 99))
        lines.append(f"| {name} | {cells} | {sum(value > 0.1 for value in values)} |")
    return "\n".join(lines)


def goodput(requests: list[list[float]], seconds: float, slo_ttft: float, slo_itl: float) -> float:
    """Requests a second that met both objectives; each is [TTFT, mean time between tokens]."""
    met = sum(ttft <= slo_ttft and itl <= slo_itl for ttft, itl in requests)
    return met / seconds


def median_inside(runs: int) -> float:
    """Probability that the true median lies between the smallest and the largest of `runs`.

    It does not if all of them fall on the same side, which has probability 2 (1/2)^n for any
    distribution.
    """
    return 1 - 2 * 0.5**runs


def median_table(most: int) -> str:
    lines = ["| runs | true median between smallest and largest |", "|---|---|"]
    lines += [f"| {n} | {median_inside(n):.1%} |" for n in range(2, most + 1)]
    return "\n".join(lines)


def drift(order: str, times: dict[str, float], slowing: float) -> list[float]:
    """Seconds of runs in this order if each run takes `slowing` times as long as the last."""
    return [times[name] * slowing**i for i, name in enumerate(order)]


def median_of_ratios(order: str, times: dict[str, float], slowing: float) -> float:
    """B over A pair by pair: the first run of A with the first of B, and so on."""
    seconds = drift(order, times, slowing)
    of = {name: [s for s, n in zip(seconds, order, strict=True) if n == name] for name in "AB"}
    return statistics.median(b / a for a, b in zip(of["A"], of["B"], strict=True))


def drift_table(slowing: float, ratio: float) -> str:
    times = {"A": 1.0, "B": ratio}
    lines = ["| order of runs | median of the pairs' ratios |", "|---|---|"]
    for order in ("AAABBB", "ABABAB"):
        lines.append(f"| {order} | {median_of_ratios(order, times, slowing):.2f} |")
    return "\n".join(lines)


def time_saved(ratio: float) -> float:
    """The share of the time that is saved by an engine `ratio` times as fast."""
    return 1 - 1 / ratio


def speedup_of_part(share: float, factor: float) -> float:
    """Amdahl 1967: the whole, if a part that took `share` of the time becomes `factor` faster."""
    return 1 / (1 - share + share / factor)


def arithmetic_mean(ratios: list[float]) -> float:
    return statistics.fmean(ratios)


def geometric_mean(ratios: list[float]) -> float:
    """The mean of ratios whose inverse is the mean of the inverses."""
    return statistics.geometric_mean(ratios)


# Qwen3-0.6B in bfloat16: all weights that a step reads, and K and V of one token.
WEIGHT_BYTES = 2 * (596_049_920 - 65_536)
KV_BYTES = 114_688


def decode_bytes(sequences: int, context: int) -> int:
    """Bytes that a decode step of Qwen3-0.6B reads: the weights once, and each sequence's KV."""
    return WEIGHT_BYTES + sequences * context * KV_BYTES


def limit_ms(sequences: int, context: int, bandwidth: float) -> float:
    """The minimum time of that step in milliseconds, at `bandwidth` bytes a second."""
    return 1000 * decode_bytes(sequences, context) / bandwidth


def limit_table(context: int, bandwidth: float) -> str:
    """The limit set by memory bandwidth, over batch size."""
    lines = ["| sequences | GB read | ms | tokens/s | relative to one sequence |"]
    lines.append("|---|---|---|---|---|")
    alone = 1000 / limit_ms(1, context, bandwidth)
    for n in (1, 8, 32, 128, 512):
        ms = limit_ms(n, context, bandwidth)
        rate = 1000 * n / ms
        gb = decode_bytes(n, context) / 1e9
        lines.append(f"| {n} | {gb:.2f} | {ms:.2f} | {rate:,.0f} | {rate / alone:.1f}x |")
    return "\n".join(lines)


def expected_prefix(flip: float, tokens: int) -> float:
    """Expected tokens before the first difference, if each differs with probability `flip`."""
    return sum((1 - flip) ** k for k in range(1, tokens + 1))


LAYER, HEAD = (
    15_728_640,
    151_936 * 1_024,
)  # weights of Qwen3-0.6B: of a layer's products, of its head


def weight_bytes(layers: int, item: int) -> int:
    """Bytes read by a decode step of `layers` layers of Qwen3-0.6B, with `item` bytes a weight."""
    return (layers * LAYER + HEAD) * item


def ridge_rows(rate: float, bandwidth: float, item: int) -> float:
    """Rows from which a product is compute-bound: 2 operations for each weight and row."""
    return rate / bandwidth * item / 2


# Milliseconds of a decode step of 32 sequences of Qwen3-0.6B, bfloat16, two cores of a Xeon: see
# docs/benchmarks.md. The contexts had 128 tokens at the start of the measurement, 140 half-way.
PARTS = {
    "products of the 28 layers": (56, 28 * LAYER * 2),
    "decode attention": (34, 32 * 140 * KV_BYTES),
    "LM head": (15, HEAD * 2),
    "norms, gates, rotation": (7, 0),
    "sampling, Python between the parts": (7, 0),
}


def parts_table(bandwidth: float) -> str:
    """Measured time of each part, and the minimum that `bandwidth` allows."""
    lines = ["| part | measured ms | limit ms | of the limit |", "|---|---|---|---|"]
    for part, (ms, num_bytes) in PARTS.items():
        least = 1000 * num_bytes / bandwidth
        share = f"{least / ms:.0%}" if num_bytes else ""
        lines.append(f"| {part} | {ms} | {f'{least:.0f}' if num_bytes else '-'} | {share} |")
    least = parts_limit_ms(bandwidth)
    lines.append(f"| together | {parts_ms()} | {least:.0f} | {least / parts_ms():.0%} |")
    return "\n".join(lines)


def parts_ms() -> int:
    return sum(ms for ms, _ in PARTS.values())


def parts_limit_ms(bandwidth: float) -> float:
    return 1000 * sum(num_bytes for _, num_bytes in PARTS.values()) / bandwidth
