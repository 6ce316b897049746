"""Answer `LLM.get_metrics` with what /metrics of a server shows, as objects of vLLM's shape."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine

_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


@dataclass
class Metric:
    """Something counted; its name begins with "vllm:", as dashboards know it."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters in a row: accepted draft tokens, by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """As it is now."""

    value: float


@dataclass
class Histogram(Metric):
    """By upper bound, as a text ("+Inf" is the last), how many values were not above it."""

    count: int
    sum: float
    buckets: dict[str, int]


def start_counting(engine: "GuardedEngine") -> None:
    """Count from here on. Raises `ValueError` if the package that knows metrics is missing."""
    try:
        from nanoserve.features.metrics import start_metrics
    except ModuleNotFoundError as error:
        raise ValueError(
            f"disable_log_stats=False needs {error.name}: pip install 'nanoserve[serve]'"
        ) from error
    start_metrics(engine.config.model, "vllm:", engine)


def snapshot(engine: "GuardedEngine") -> list[Metric]:
    """Return all metrics as they are now."""
    try:
        from nanoserve.features.metrics import metrics_of
    except ModuleNotFoundError:  # then nothing can have been counted
        counted = []
    else:
        counted = metrics_of(engine)
    if not counted:
        raise ValueError(
            "nothing was counted: give LLM(..., disable_log_stats=False); llm.stats has totals "
            "anyway"
        )
    return [metric for family in counted[0].collect() for metric in _read(family)]


def _read(family: Any) -> Iterator[Metric]:
    """Yield the metrics of a family of prometheus-client's: one for each set of labels."""
    name = family.name
    if family.type == "histogram":
        yield _histogram(name, family.samples)
    elif name.endswith(_PER_POSITION):
        samples = sorted(family.samples, key=lambda sample: int(sample.labels["position"]))
        if samples:
            labels = {key: v for key, v in samples[0].labels.items() if key != "position"}
            yield Vector(name, labels, [int(sample.value) for sample in samples])
    else:
        for sample in family.samples:
            if family.type == "counter":
                yield Counter(name, dict(sample.labels), int(sample.value))
            else:
                yield Gauge(name, dict(sample.labels), float(sample.value))


def _histogram(name: str, samples: list[Any]) -> Histogram:
    buckets: dict[str, int] = {}
    found = Histogram(name, {}, 0, 0.0, buckets)
    for sample in samples:
        if sample.name.endswith("_bucket"):
            buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            found.count, found.labels = int(sample.value), dict(sample.labels)
        elif sample.name.endswith("_sum"):
            found.sum = float(sample.value)
    return found
