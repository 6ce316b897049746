"""A solution of `exercise.py`."""

Spans = list[list[tuple[float, float]]]


def run_pipeline(durations: list[list[float]], num_groups: int) -> Spans:
    spans: Spans = []
    for i, of_step in enumerate(durations):
        ready = spans[i - num_groups][-1][1] if i >= num_groups else 0.0
        row: list[tuple[float, float]] = []
        for s, duration in enumerate(of_step):
            begin = max(ready, spans[i - 1][s][1] if i else 0.0)
            ready = begin + duration
            row.append((begin, ready))
        spans.append(row)
    return spans


def bubble(spans: Spans) -> float:
    busy = sum(end - begin for row in spans for begin, end in row)
    return 1 - busy / (len(spans[0]) * spans[-1][-1][1])


def share_layers(sizes: list[int], head: int, num_stages: int) -> list[range]:
    """The smallest bound that filling stages from the front can keep; sums are the candidates."""
    candidates = {sum(sizes[a:b]) for a in range(len(sizes)) for b in range(a + 1, len(sizes) + 1)}
    candidates |= {head + sum(sizes[a:]) for a in range(len(sizes))}
    for bound in sorted(candidates):
        starts = _starts_under(bound, sizes, head, num_stages)
        if starts is not None:
            break
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def _starts_under(bound: int, sizes: list[int], head: int, num_stages: int) -> list[int] | None:
    """The first layer of each stage, if none is larger than `bound`."""
    starts, first = [], 0
    for stage in range(num_stages - 1):
        starts.append(first)
        last_possible = len(sizes) - (num_stages - 1 - stage)  # one for each later stage
        total = 0
        while first < last_possible and total + sizes[first] <= bound:
            total += sizes[first]
            first += 1
        if total == 0:
            return None
    return [*starts, first] if sum(sizes[first:]) + head <= bound else None
