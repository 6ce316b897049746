"""Numbers of chapter 21: queueing formulas, the server's own output reader, a recorded stream."""

import asyncio
import json
from math import factorial
from pathlib import Path

from tables import table

from nanoserve.engine.request import Request
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.serve.response_stream import OutputReader

_STREAM = Path(__file__).with_name("stream.txt")
# Names of the server's metrics, without their prefix, and the question that each answers.
_QUESTIONS = {
    "num_requests_waiting": ("gauge", "is there a queue now?"),
    "num_requests_running": ("gauge", "how many requests share a step?"),
    "kv_cache_usage_perc": ("gauge", "is the pool full?"),
    "num_preemptions": ("counter", "are too many requests admitted for the pool?"),
    "prefix_cache_hits": (
        "counter",
        "divided by `prefix_cache_queries`: which part of prompts is cached?",
    ),
    "request_queue_time_seconds": ("histogram", "how long until the first step?"),
    "request_prefill_time_seconds": ("histogram", "how long from there to the first token?"),
    "request_decode_time_seconds": ("histogram", "how long from there to the last token?"),
    "time_to_first_token_seconds": ("histogram", "how long does a user wait for the first token?"),
    "inter_token_latency_seconds": ("histogram", "how smoothly do tokens arrive?"),
}


def in_system(rate: float, seconds: float) -> float:
    """Little's law: requests in the system, if `rate` arrive per second and stay for `seconds`."""
    return rate * seconds


def capacity(slots: int, seconds: float) -> float:
    """Requests per second that so many slots can serve, each in so many seconds."""
    return slots / seconds


def must_wait(slots: int, load: float) -> float:
    """Erlang's C: the probability that all slots are taken when a request arrives.

    Requests arrive independently, at `load` times the capacity, and their service times are
    exponentially distributed.
    """
    offered = slots * load
    full = offered**slots / factorial(slots) / (1 - load)
    return full / (full + sum(offered**n / factorial(n) for n in range(slots)))


def mean_wait(slots: int, seconds: float, load: float) -> float:
    """Mean seconds that a request waits for its slot."""
    return must_wait(slots, load) * seconds / (slots * (1 - load))


def waiting_table(slots: int, seconds: float, loads: list[float]) -> str:
    """Waiting times by load."""
    rows = []
    for load in loads:
        rate, wait = load * capacity(slots, seconds), mean_wait(slots, seconds, load)
        stay = wait + seconds
        cells = (f"{load:.0%}", f"{rate:.2f}", f"{wait:.2f} s", f"{in_system(rate, wait):.1f}")
        rows.append((*cells, f"{stay:.1f} s", f"{in_system(rate, stay):.1f}"))
    header = ("load", "requests/s", "mean wait", "waiting", "mean total time", "in the system")
    return table(header, rows)


def backlog(slots: int, seconds: float, load: float, after: float) -> float:
    """Approximate number of waiting requests after so many seconds of a load above 1."""
    return (load - 1) * capacity(slots, seconds) * after


def longest_wait(queue: int, slots: int, seconds: float) -> float:
    """Approximate waiting time of the last in a full queue, which advances when a request ends."""
    return queue / capacity(slots, seconds)


def rejected_share(load: float) -> float:
    """Share of requests that a full queue rejects in the long run."""
    return max(0.0, 1 - 1 / load)


def tokens_per_second(streams: int, step_ms: float) -> float:
    """Events to be created, sent and received if each stream gets a token per step."""
    return streams / step_ms * 1000


def merging_table(steps: list[int]) -> str:
    """Outputs waiting for a slow client: in a plain queue, and in the server's output reader."""
    rows = []
    for num_steps in steps:
        outputs = asyncio.run(_read_after(num_steps))
        (output,) = outputs
        tokens = len(output.outputs[0].token_ids)
        rows.append((f"{num_steps:,}", f"{num_steps:,}", len(outputs), f"{tokens:,}"))
    header = ("steps not read", "outputs in a plain queue", "outputs here", "tokens in that output")
    return table(header, rows)


def stream() -> str:
    """The response to one question, event by event."""
    return f"```text\n{_STREAM.read_text(encoding='utf-8').strip()}\n```"


def num_events() -> int:
    """Number of events of the recorded stream."""
    return len(_events())


def event_bytes() -> int:
    """Bytes of the recorded stream per token: the size of the median event."""
    sizes = sorted(len(event.encode()) for event in _events())
    return sizes[len(sizes) // 2]


def text_bytes() -> float:
    """Bytes of text per token in the recorded stream."""
    chunks = [json.loads(event.removeprefix("data: ")) for event in _events()[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [text.encode() for choice in choices if (text := choice["delta"].get("content"))]
    return sum(map(len, texts)) / len(texts)


def times_table(arrival: float, scheduled: float, first: float, last: float, tokens: int) -> str:
    """A request's intervals, as the engine's metrics compute them from its times."""
    times = RequestMetrics(arrival, scheduled, first, last, last)
    times.num_output_tokens, times.num_intervals = tokens, tokens - 1
    times.interval_seconds = last - first
    rows = [
        ("queue", f"{times.queue_time:.2f} s"),
        ("prefill", f"{first - scheduled:.2f} s"),
        ("decode", f"{last - first:.2f} s"),
        ("time to first token", f"{times.time_to_first_token:.2f} s"),
        ("between two tokens, mean", f"{1000 * times.inter_token_time:.0f} ms"),
        ("total", f"{times.total_time:.2f} s"),
    ]
    return table(("", "seconds"), rows)


def metrics_table() -> str:
    """Names of metrics without their prefix, and the questions that they answer."""
    rows = [(f"`{name}`", kind, question) for name, (kind, question) in _QUESTIONS.items()]
    return table(("metric", "kind", "question"), rows)


def vllm_processes(tensor: int, data: int) -> str:
    """Processes of `vllm serve -tp tensor -dp data`, according to its documentation."""
    counts = {"API servers": data, "engine cores": data, "GPU workers": data * tensor}
    counts["coordinator"] = int(data > 1)
    parts = [
        f"{count} {name if count > 1 else name.removesuffix('s')}"
        for name, count in counts.items()
        if count
    ]
    return f"{' + '.join(parts)} = {sum(counts.values())}"


class _Owner:
    """Stands for the engine thread, which is not used here."""

    is_running = True

    def abort(self, request_id: str) -> None: ...


async def _read_after(num_steps: int) -> list[RequestOutput]:
    """The outputs of a reader that starts to read after so many steps with a token each."""
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    sequences = [Sequence("one", [1], params, 4096)]
    request = Request("one", None, [1], params, sequences)
    reader = OutputReader(_Owner(), [request], None, stream_interval=1)
    for step in range(num_steps):
        completion = CompletionOutput(0, "a", [step])
        is_last, times = step == num_steps - 1, RequestMetrics()
        reader.take(RequestOutput("one", None, [1], [completion], is_last, times))
    return await reader.read()


def _events() -> list[str]:
    return _STREAM.read_text(encoding="utf-8").split("\n\n")[:-1]
