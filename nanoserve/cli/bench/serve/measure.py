"""Measure an OpenAI-compatible server as its clients see it.

nanoserve bench --url http://127.0.0.1:8000                           all requests at once
nanoserve bench --url http://127.0.0.1:8000/v1 --request-rate 1,2,4   requests at random times
nanoserve bench --url http://127.0.0.1:8000 --concurrency 1,8,32      clients that wait

The client records bytes with times, and parses them after the run. It uses asyncio and no HTTP
library, because time that a client spends on a chunk is taken from a server on the same machine.
The report has the share of a core that the client used, and how late it sent its requests.
"""

import asyncio
import gc
import json
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanoserve.cli.bench.latency import poisson_arrivals
from nanoserve.cli.bench.serve.connection import Server
from nanoserve.cli.bench.serve.figures import figures
from nanoserve.cli.bench.serve.load import closed_loop, open_loop
from nanoserve.cli.bench.serve.options import parse_args
from nanoserve.cli.bench.serve.prompts import WORDS, WordLength, shifted, text, word_length
from nanoserve.cli.bench.serve.requests import Requests, first_model
from nanoserve.cli.bench.serve.stream import read_answer
from nanoserve.cli.bench.serve.tables import Point, as_json, line, print_report
from nanoserve.cli.bench.workloads import draw_workload

_FEW, _MANY = 8, 72  # words of the two warm-up prompts


class Measurement:
    """The server under test, with the prompts and settings of all runs."""

    def __init__(self, args: Namespace, server: Server, model: str) -> None:
        self.args, self.server, self.model = args, server, model
        self.requests = Requests(server, args.endpoint, model, args.temperature, args.ignore_eos)
        self.vocab_size = args.token_ids or len(WORDS)
        lengths = (args.num_seqs, args.input_len, args.output_len, self.vocab_size)
        drawn = draw_workload(*lengths, args.shared_len, args.turns, args.seed)
        self.prompts, self.output_lens = drawn
        self.length, self.num_runs = WordLength(), 0

    async def warm_up(self) -> None:
        """Send two requests that find out which fields the server accepts, and tokens per word.

        Raises `ValueError` with the server's message if it rejects them.
        """
        counted = []
        for num_words in (_FEW, _MANY):
            ids = [(-1 - i) % self.vocab_size for i in range(num_words)]  # test the last id, too
            prompt = self._prompt(ids, WordLength())
            answer = read_answer(await self.requests.first(prompt, 8))
            counted.append((num_words, answer.input_tokens))
        if not self.args.token_ids:
            self.length = word_length(*counted)

    async def run(self, rate: float | None, concurrency: int | None) -> dict[str, Any]:
        """Do one run at one load, with prompts that no cache has from a previous run."""
        self.num_runs += 1
        pairs = zip(self.prompts, self.output_lens, strict=True)
        made = [self.requests.make(self._prompt(ids, self.length), n) for ids, n in pairs]
        gc.collect()
        gc.disable()  # a collection would delay time stamps
        try:
            before = time.process_time()
            if rate is not None:
                arrivals = poisson_arrivals(rate, len(made), self.args.seed)
                exchanges = await open_loop(self.server, made, arrivals)
            else:
                exchanges = await closed_loop(self.server, made, concurrency or 1)
            spent = time.process_time() - before
        finally:
            gc.enable()
        objectives = (self.args.slo_ttft, self.args.slo_itl)
        return figures(exchanges, self.output_lens, *objectives, spent)

    def _prompt(self, token_ids: list[int], length: WordLength) -> str | list[int]:
        if self.args.token_ids:
            return shifted(token_ids, self.vocab_size, self.num_runs)
        return text(token_ids, length, self.num_runs)


async def measure(args: Namespace) -> list[Point]:
    """Measure all loads in turns, `--repeat` times."""
    server = Server(args.url, args.api_key, args.timeout)
    try:
        measurement = Measurement(args, server, args.model or await first_model(server))
        await measurement.warm_up()
        print("\n".join(_headline(measurement)), flush=True)
        points = [Point(rate, None) for rate in args.request_rate]
        points += [Point(None, concurrency) for concurrency in args.concurrency]
        for number in range(1, args.repeat + 1):
            for point in points:
                point.runs.append(await measurement.run(point.request_rate, point.concurrency))
                print(f"run {number}, {point.title()}: {line(point.runs[-1])}", flush=True)
    finally:
        server.close()
    print_report(points, args)
    if args.json:
        Path(args.json).write_text(json.dumps(as_json(points, args, measurement.model), indent=1))
    if args.plot:
        from nanoserve.cli.bench.serve.plot import plot_points

        plot_points(points, args.plot)
    return points


def _headline(measurement: Measurement) -> Iterator[str]:
    """Yield lines about the measurement, and about fields that the server rejected."""
    args, requests = measurement.args, measurement.requests
    where = f"{requests.server.url}/{requests.path}"
    yield f"{where}, model {measurement.model}, temperature {args.temperature:g}"
    num_in, num_out = sum(map(len, measurement.prompts)), sum(measurement.output_lens)
    yield f"{args.num_seqs} requests per run, for {num_in} tokens in and {num_out} out"
    if not args.token_ids:
        length = measurement.length
        yield f"prompts are words of {length.per_word:.2f} tokens, with {length.around:.0f} around"
    for name in requests.refused:
        without = {
            "ignore_eos": "outputs may end early",
            "stream_options": "chunks are counted instead of tokens",
        }
        yield f"the server rejects {name}: {without[name]}"


def main(arguments: list[str]) -> int:
    """Run the benchmark. Returns 0 if at least one request was answered in every run, else 1."""
    points = asyncio.run(measure(parse_args(arguments)))
    return 0 if all(run["ok"] for point in points for run in point.runs) else 1
