"""Numbers of chapter 21, against a count by hand, a simulated queue and the server itself."""

import heapq
import random
import re
from pathlib import Path

import pytest

import nanoserve

from . import worked

METRICS = Path(nanoserve.__file__).parent / "features" / "metrics.py"


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def simulated(
    slots: int, seconds: float, load: float, number: int = 200_000
) -> tuple[float, float]:
    """Mean wait and mean number in the system, for requests that arrive independently."""
    rng, now, waits, stays = random.Random(7), 0.0, 0.0, 0.0
    free_at = [0.0] * slots  # a heap
    for _ in range(number):
        now += rng.expovariate(load * slots / seconds)
        begin = max(now, heapq.heappop(free_at))
        end = begin + rng.expovariate(1 / seconds)
        heapq.heappush(free_at, end)
        waits, stays = waits + begin - now, stays + end - now
    return waits / number, stays / now


@pytest.mark.parametrize(("slots", "load"), [(1, 0.5), (1, 0.8), (8, 0.5), (8, 0.9)])
def test_waiting_times_agree_with_a_simulated_queue(slots: int, load: float) -> None:
    wait, in_system = simulated(slots, 4.0, load)
    assert worked.mean_wait(slots, 4.0, load) == pytest.approx(wait, rel=0.06)
    stay = worked.mean_wait(slots, 4.0, load) + 4.0
    rate = load * worked.capacity(slots, 4.0)
    assert worked.in_system(rate, stay) == pytest.approx(in_system, rel=0.06)  # Little's law


def test_one_slot_by_hand() -> None:
    """With one slot P(wait) is the load, and the mean wait load / (1 - load) service times."""
    assert worked.must_wait(1, 0.75) == pytest.approx(0.75)
    assert worked.mean_wait(1, 2.0, 0.75) == pytest.approx(6.0)
    # Two slots: C = 2 rho^2 / (1 + rho).
    assert worked.must_wait(2, 0.5) == pytest.approx(2 * 0.25 / 1.5)


def test_the_table_of_loads() -> None:
    (row,) = cells(worked.waiting_table(1, 2.0, [0.75]))
    assert row == ["75%", "0.38", "6.00 s", "2.2", "8.0 s", "3.0"]


def test_loads_above_the_capacity() -> None:
    assert worked.backlog(8, 4.0, 1.1, 600) == pytest.approx(0.1 * 2 * 600)
    assert worked.longest_wait(16, 8, 4.0) == 8.0
    assert worked.rejected_share(1.25) == pytest.approx(0.2)
    assert worked.rejected_share(0.5) == 0
    assert worked.tokens_per_second(256, 32) == 8000


def test_a_late_reader_has_one_output() -> None:
    rows = cells(worked.merging_table([1, 100, 2000]))
    assert [row[1:] for row in rows] == [
        ["1", "1", "1"],
        ["100", "1", "100"],
        ["2,000", "1", "2,000"],
    ]


def test_the_recorded_stream_is_what_the_server_sends() -> None:
    pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
    from . import wire

    assert wire.recorded() == wire.FILE.read_text(encoding="utf-8")


def test_bytes_of_a_stream() -> None:
    # The role, six tokens, the reason, the usage, and the end.
    assert worked.num_events() == 1 + 6 + 1 + 1 + 1 == worked.stream().count("data: ")
    # "The", " KV", " cache", " keeps", " the", " keys"
    assert worked.text_bytes() == (3 + 3 + 6 + 6 + 4 + 5) / 6
    event = 'data: {"id": "chatcmpl-1", "created": 0, "model": "tiny-qwen3", "object": '
    event += '"chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " keeps"}, '
    event += '"logprobs": null, "finish_reason": null}], "usage": null}'
    assert abs(worked.event_bytes() - len(event)) <= 3


def test_intervals_of_a_request() -> None:
    rows = dict(cells(worked.times_table(0.0, 1.2, 1.5, 4.5, tokens=101)))
    assert rows["queue"] == "1.20 s" and rows["prefill"] == "0.30 s" and rows["decode"] == "3.00 s"
    assert rows["time to first token"] == "1.50 s" and rows["total"] == "4.50 s"
    assert rows["between two tokens, mean"] == "30 ms"


def test_metrics_have_these_names() -> None:
    source = METRICS.read_text(encoding="utf-8")
    names = re.findall(r"^\| `(\w+)`", worked.metrics_table(), re.M)
    assert len(names) == len(worked._QUESTIONS) >= 10
    missing = [name for name in [*names, "prefix_cache_queries"] if f'"{name}"' not in source]
    assert not missing, missing


def test_processes_of_vllm() -> None:
    """The two examples of its documentation."""
    assert worked.vllm_processes(4, 1) == "1 API server + 1 engine core + 4 GPU workers = 6"
    expected = "4 API servers + 4 engine cores + 8 GPU workers + 1 coordinator = 17"
    assert worked.vllm_processes(2, 4) == expected
