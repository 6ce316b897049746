"""The metrics that a server shows at /metrics, as vLLM's objects, for `LLM.get_metrics`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine

_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


@dataclass
class Metric:
    """A metric. Its name begins with "vllm:", as in dashboards for vLLM."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A metric that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """A metric with a counter for each index, such as accepted draft tokens by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A metric with the current value of a quantity."""

    value: float


@dataclass
class Histogram(Metric):
    """A metric with the number of values up to each upper bound.

    buckets: cumulative counts by upper bound, as a string; the last bound is "+Inf".
    """

    count: int
    sum: float
    buckets: dict[str, int]


def start_counting(engine: "GuardedEngine") -> None:
    """Start to count metrics of the engine.

    Raises `ValueError` if prometheus-client, or a package that it needs, is not installed.
    """
    try:
        from nanoserve.features.metrics import start_metrics
    except ModuleNotFoundError as error:
        raise ValueError(
            f"disable_log_stats=False needs {error.name}: pip install 'nanoserve[serve]'"
        ) from error
    start_metrics(engine.config.model, "vllm:", engine)


def snapshot(engine: "GuardedEngine") -> list[Metric]:
    """Return the current values of all metrics; raise `ValueError` if none are counted."""
    try:
        from nanoserve.features.metrics import metrics_of
    except ModuleNotFoundError:  # nothing can have been counted without it
        counted = []
    else:
        counted = metrics_of(engine)
    if not counted:
        raise ValueError(
            "no metrics are counted; pass LLM(..., disable_log_stats=False). llm.stats has totals "
            "in any case"
        )
    return [metric for family in counted[0].collect() for metric in _read(family)]


def _read(family: Any) -> Iterator[Metric]:
    """Yield the metrics of a family of prometheus-client, one for each set of labels."""
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
