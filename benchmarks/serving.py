"""Measure a server: its share of the engine's offline throughput, and its chunks a second.

python benchmarks/serving.py                          the bundled model
python benchmarks/serving.py --shape qwen3-0.6b-8l    random weights
python benchmarks/serving.py --chunks                 with a simulated engine without cost

Offline and served runs alternate, in processes that are warmed up, on the same kind of prompts and
lengths. The clients are woken by the end of an output, or by 30 KB of it, and not by every chunk:
on a machine of two cores they would take a large part of one, independent of the server.

The simulated engine has a token for each stream every few milliseconds. Where the server cannot
keep up, several tokens are sent in one chunk, so the number of chunks stays at its limit.
"""

import asyncio
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from nanoserve import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.engine.request import Request
from nanoserve.outputs import CompletionOutput
from nanoserve.serve.engine_thread import EngineThread, News
from nanoserve.serve.token_stream import NewTokens

_VOCAB_SIZE = 2048  # the bundled tokenizer's, which texts are made with
_TEXT = "The KV cache keeps the keys and values of all earlier tokens, in every layer of the model."
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
_QUIET = 30_000  # bytes that wake a client


async def stream(port: int, prompt: list[int], max_tokens: int) -> int:
    """Ask for a completion and read all of it; the number of its chunks."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    content = json.dumps(body | {"ignore_eos": True, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _QUIET)
    head = _HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
    writer.write(head + content)
    answer = await reader.read(-1)
    writer.close()
    if b"data: [DONE]" not in answer:
        raise RuntimeError(f"not a whole answer: {answer[:2000]!r}")
    return answer.count(b"data: ") - 1


async def load(port: int, prompts: list[list[int]], lengths: list[int], streams: int) -> int:
    """All of them, `streams` at a time; the number of chunks."""
    slots = asyncio.Semaphore(streams)

    async def one(prompt: list[int], max_tokens: int) -> int:
        async with slots:
            return await stream(port, prompt, max_tokens)

    return sum(await asyncio.gather(*map(one, prompts, lengths)))


@contextmanager
def serving(command: list[str]) -> Iterator[int]:
    """Start a server by `command` and yield its port."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stderr.readline, "")
            yield next(int(found[1]) for line in lines if (found := re.search(r":(\d+)  \(", line)))
        finally:
            server.terminate()


def random_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(_VOCAB_SIZE) for _ in range(rng.randint(16, 64))]


def run_offline(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> int:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
    llm.generate(prompts, params, use_tqdm=False)
    return 0  # chunks


def run_served(streams: int, port: int, prompts: list[list[int]], lengths: list[int]) -> int:
    return asyncio.run(load(port, prompts, lengths, streams))


def compare(args: Namespace, model: str, options: dict[str, str | int]) -> None:
    """Run rounds of one run each; a warm-up before the first one is not counted."""
    options = options | {"max_num_seqs": args.max_num_seqs}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "nanoserve", "serve", model, "--port", "0", *flags]
    print(f"{args.requests} requests of about {args.max_tokens} tokens, {args.streams} at a time")
    print("\n| offline tok/s | served tok/s | chunks/s | served / offline |\n|---|---|---|---|")
    ratios = []
    with LLM(model, **options) as llm, serving(command) as port:
        for number in range(args.rounds + 1):
            rng = random.Random(number)
            least, most = args.max_tokens // 4, args.max_tokens * 7 // 4
            lengths = [rng.randint(least, most) for _ in range(args.requests)]
            runs = [partial(run_offline, llm), partial(run_served, args.streams, port)]
            seconds, chunks = {}, 0
            for index in (0, 1) if number % 2 else (1, 0):
                prompts = [random_prompt(rng) for _ in lengths]
                began = time.perf_counter()
                chunks += runs[index](prompts, lengths)
                seconds[index] = time.perf_counter() - began
            if number:
                ratios.append(seconds[0] / seconds[1])
                offline, served = (sum(lengths) / seconds[index] for index in (0, 1))
                cells = f"{offline:,.0f} | {served:,.0f} | {chunks / seconds[1]:,.0f}"
                print(f"| {cells} | {ratios[-1]:.3f} |", flush=True)
    ratios.sort()
    median = statistics.median(ratios)
    print(f"\nmedian {median:.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")


class CostlessEngine:
    """Replacement for `EngineThread` whose tokens are known and arrive on time."""

    def __init__(self, real: EngineThread, post, seconds: float) -> None:
        self.engine, self.is_running, self.error, self.backlog = real.engine, True, None, -1
        self.call, self.stop, self.join = real.call, real.stop, real.join
        self._post, self._seconds = post, seconds
        self._text = self.engine.tokenizer.encode(_TEXT)
        self._open: dict[str, tuple[Request, int]] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, request: Request, is_followed: bool) -> None:
        self._open[request.request_id] = request, 0

    def abort(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + self._seconds, time.perf_counter())
            time.sleep(max(0, due - time.perf_counter()))
            news = News([], [])
            for request_id, (request, number) in self._open.copy().items():
                token_id = self._text[number % len(self._text)]
                self._open[request_id] = request, number + 1
                news.tokens.append(NewTokens(request_id, 0, [token_id], None, None))
                if number + 1 == request.params.max_tokens:
                    del self._open[request_id]
                    news.outputs.append(self._last_output(request))
            if news.tokens:
                self._post(news)

    def _last_output(self, request: Request) -> RequestOutput:
        num_tokens = request.params.max_tokens
        token_ids = (self._text * (num_tokens // len(self._text) + 1))[:num_tokens]
        output = CompletionOutput(0, "", token_ids, "length")
        metrics = replace(request.sequences[0].metrics, num_output_tokens=num_tokens)
        prompt = request.prompt_token_ids
        return RequestOutput(request.request_id, request.prompt, prompt, [output], True, metrics)


def serve_costless(seconds: float, stream_interval: int) -> None:
    from nanoserve.serve.http.app import ApiServer
    from nanoserve.serve.http.run import bind, serve
    from nanoserve.serve.http.settings import ServerSettings

    llm = AsyncLLM("tiny-qwen3", stream_interval=stream_interval)
    llm.owner = CostlessEngine(llm.owner, llm._post, seconds)
    with bind("127.0.0.1", 0) as bound:
        serve(ApiServer(llm, ServerSettings(served_model_name=["costless"])), bound, 1, False)


def count_chunks(args: Namespace) -> None:
    print(f"{args.streams} streams of 400 tokens each\n")
    print("| ms a step | stream_interval | tokens/s made | sent | chunks/s | tokens a chunk |")
    print("|---|---|---|---|---|---|")
    prompts, lengths = [[1, 2, 3]] * args.streams, [400] * args.streams
    for milliseconds, interval in ((50, 1), (25, 1), (10, 1), (5, 1), (10, 4), (5, 16)):
        spec = json.dumps([milliseconds / 1e3, interval])
        with serving([sys.executable, __file__, "--costless", spec]) as port:
            rates = []
            for _ in range(args.rounds):
                began = time.perf_counter()
                num_chunks = run_served(args.streams, port, prompts, lengths)
                rates.append(num_chunks / (time.perf_counter() - began))
        rate, each = statistics.median(rates), sum(lengths) / num_chunks
        made = args.streams / milliseconds * 1e3
        cells = [f"{milliseconds}", f"{interval}", f"{made:,.0f}", f"{rate * each:,.0f}"]
        print(f"| {' | '.join([*cells, f'{rate:,.0f}', f'{each:.2f}'])} |", flush=True)


def parse_args() -> Namespace:
    parser = ArgumentParser(description="What a server costs.")
    add = parser.add_argument
    add("--shape", choices=SHAPES, help="random weights, instead of the bundled model")
    add("--requests", type=int, default=1024, help="of a round (%(default)s)")
    add("--streams", type=int, default=256, help="at a time (%(default)s)")
    add("--max-num-seqs", type=int, default=256, help="of the engine (%(default)s)")
    add("--max-tokens", type=int, default=64, help="on average; of 1/4 to 7/4 (%(default)s)")
    add("--rounds", type=int, default=7, help="%(default)s")
    add("--chunks", action="store_true", help="count chunks, with a simulated engine without cost")
    add("--costless", type=json.loads, metavar="[SECONDS, N]", help="be the server of --chunks")
    args = parser.parse_args()
    if args.chunks:
        for name in ("shape", "requests", "max_num_seqs", "max_tokens"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--chunks has no use for --{name.replace('_', '-')}")
    return args


def main() -> None:
    args = parse_args()
    if args.costless:
        serve_costless(*args.costless)
    elif args.chunks:
        count_chunks(args)
    elif args.shape:
        with tempfile.TemporaryDirectory() as folder:
            config = SHAPES[args.shape] | {"vocab_size": _VOCAB_SIZE}
            Path(folder, "config.json").write_text(json.dumps(config))
            compare(args, folder, {"load_format": "dummy", "tokenizer": "tiny-qwen3"})
    else:
        compare(args, "tiny-qwen3", {})


if __name__ == "__main__":
    main()
