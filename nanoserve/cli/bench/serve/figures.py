"""Compute the results of one run, including failures and the client's own load."""

from collections import Counter
from typing import Any

import numpy as np

from nanoserve.cli.bench.latency import latencies
from nanoserve.cli.bench.serve.load import Exchange
from nanoserve.cli.bench.serve.stream import Answer, read_answer


def figures(
    exchanges: list[Exchange],
    output_lens: list[int],
    slo_ttft: float,
    slo_itl: float,
    client_seconds: float,
) -> dict[str, Any]:
    """Return the results of one run.

    client_seconds: processor time of this process during the run. The run lasts from the time at
    which its first request was due until all requests have been answered or have failed. Latencies
    are measured for answered requests. Failed requests count only in "failed" and "goodput_share".
    """
    start = min(exchange.due for exchange in exchanges)
    seconds = max(exchange.ended for exchange in exchanges) - start
    answers, errors = _read(exchanges)
    tokens = {
        i: answer.output_tokens or len(answer.times)  # a count of 0 cannot be right
        for i, answer in answers.items()
    }
    late = [1000 * (exchange.sent - exchange.due) for exchange in exchanges]
    run: dict[str, Any] = {"seconds": seconds, "ok": len(answers), "failed": sum(errors.values())}
    run["errors"] = dict(errors.most_common())
    run["input_tokens"] = sum(answer.input_tokens or 0 for answer in answers.values())
    run["output_tokens"] = sum(tokens.values())
    run["cached_tokens"] = sum(answer.cached_tokens or 0 for answer in answers.values())
    run["with_usage"] = sum(answer.output_tokens is not None for answer in answers.values())
    run["chunks"] = sum(len(answer.times) for answer in answers.values())
    run["full_length"] = sum(tokens[i] == output_lens[i] for i in answers)
    run["client"] = {"late_ms_p99": float(np.percentile(late, 99)), "late_ms_max": max(late)}
    run["client"]["core"] = client_seconds / seconds
    run["requests"] = [_record(exchanges[i], answers.get(i), start) for i in range(len(exchanges))]
    if answers:
        due = [exchanges[i].due - start for i in answers]
        times = [[time - start for time in answer.times] for answer in answers.values()]
        counts = [tokens[i] for i in answers]
        run["latencies"] = latencies(due, times, slo_ttft, slo_itl, counts, seconds)
        run["goodput_share"] = run["latencies"]["goodput"] * seconds / len(exchanges)
    return run


def _read(exchanges: list[Exchange]) -> tuple[dict[int, Answer], Counter[str]]:
    answers: dict[int, Answer] = {}
    errors: Counter[str] = Counter()
    for index, exchange in enumerate(exchanges):
        try:
            if exchange.response is None:
                raise ValueError(exchange.error)
            answers[index] = read_answer(exchange.response)
        except ValueError as error:
            exchange.error = str(error)
            errors[exchange.error] += 1
        exchange.response = None  # responses of many tokens take much memory
    return answers, errors


def _record(exchange: Exchange, answer: Answer | None, start: float) -> dict[str, Any]:
    """Return the record of a request for the JSON file, with times in seconds after the start."""
    times = {"due": exchange.due, "sent": exchange.sent, "ended": exchange.ended}
    record: dict[str, Any] = {name: time - start for name, time in times.items()}
    if answer is None:
        return record | {"error": exchange.error}
    record |= {"input_tokens": answer.input_tokens, "output_tokens": answer.output_tokens}
    return record | {"chunk_times": [round(time - start, 6) for time in answer.times]}
