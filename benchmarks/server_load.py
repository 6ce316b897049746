"""Put a server under load, and check that nothing is lost and nothing grows.

python benchmarks/server_load.py                            256 streams for two minutes
python benchmarks/server_load.py --requests 24000           so many requests, 64 at a time, short
python benchmarks/server_load.py --streams 32 --seconds 10

It starts `nanoserve serve` on the bundled model in float32, with greedy sampling, so each complete
output must equal the one of `LLM.generate`. A third of the streams is dropped at a random point,
and every sixteenth is not read for some seconds. Memory, files and threads of both processes are
read from /proc meanwhile, and the engine's state from `/metrics` at the end. The exit status is 1
if anything is lost or left.
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path

NUM_PROMPTS = 64
OPTIONS = {"dtype": "float32", "max_num_seqs": 256, "num_kv_blocks": 16_000}


def expected_texts(args: Namespace) -> list[tuple[list[int], str]]:
    """Return prompts and the engine's outputs for them, computed in a separate process."""
    program = (
        "import json, sys; from nanoserve import LLM, SamplingParams\n"
        "prompts, max_tokens, options = json.load(sys.stdin)\n"
        "params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)\n"
        "outputs = LLM('tiny-qwen3', **options).generate(prompts, params, use_tqdm=False)\n"
        "print(json.dumps([output.outputs[0].text for output in outputs]))"
    )
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(2048) for _ in range(rng.randint(4, 64))] for _ in range(NUM_PROMPTS)]
    spec = json.dumps([prompts, args.max_tokens, OPTIONS])
    child = subprocess.run(
        [sys.executable, "-c", program], input=spec, capture_output=True, text=True
    )
    if child.returncode:
        sys.exit(child.stderr)
    return list(zip(prompts, json.loads(child.stdout.splitlines()[-1]), strict=True))


class Load:
    """Clients that send requests repeatedly, and their results."""

    def __init__(self, args: Namespace, port: int, expected: list[tuple[list[int], str]]) -> None:
        self.args, self.port, self.expected = args, port, expected
        self.counts: Counter[str] = Counter()
        self.num_begun = 0
        self.is_over = False

    async def client(self, number: int) -> None:
        rng = random.Random(f"{self.args.seed} {number}")
        while not self.is_over and self.num_begun < (self.args.requests or 10**9):
            self.num_begun += 1
            prompt, text = rng.choice(self.expected)
            # In the load of many requests all are read to their end.
            drops = not self.args.requests and rng.random() < 1 / 3
            pause = 0 if self.args.requests or rng.random() > 1 / 16 else rng.uniform(1, 8)
            try:
                self.counts[await self.ask(prompt, text, drops and rng.random(), pause)] += 1
            except OSError as error:
                self.counts[f"FAILED: {error!r}"] += 1

    async def ask(self, prompt: list[int], text: str, drop_at: float, pause: float) -> str:
        """One stream; `drop_at` is the part of the text after which it is dropped."""
        body = {"prompt": prompt, "max_tokens": self.args.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
        writer.write(head + content)
        try:
            await asyncio.sleep(pause)
            received, events = "", 0
            async for line in reader:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    self.counts["chunks"] += events
                    return "whole" if received == text else f"WRONG: {received!r} is not {text!r}"
                events += 1
                received += json.loads(line[6:])["choices"][0]["text"]
                if drop_at and len(received) >= drop_at * len(text):
                    return "dropped"
            return "LOST: it ended too early"
        finally:
            writer.close()


def footprint(pids: list[int]) -> str:
    """Return memory, open files and threads of each process."""
    found = []
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        rss = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024
        threads = re.search(r"Threads:\s+(\d+)", status)[1]
        found.append(f"{rss} MiB, {len(os.listdir(f'/proc/{pid}/fd'))} files, {threads} threads")
    return "; ".join(found)


def left(port: int) -> dict[str, float]:
    """Return the state that the engine still has of any request."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    return {name: float(re.search(rf"vllm:{name}{{.*}} (\S+)", text)[1]) for name in names}


async def watch(load: Load, pids: list[int], began: float) -> None:
    while True:
        seconds = time.perf_counter() - began
        done = {what: n for what, n in load.counts.items() if what != "chunks"}
        print(f"{seconds:5.0f} s: {done}; {footprint(pids)}", flush=True)
        await asyncio.sleep(load.args.interval)


async def run(load: Load, pids: list[int]) -> None:
    began = time.perf_counter()
    watching = asyncio.create_task(watch(load, pids, began))
    clients = [asyncio.create_task(load.client(i)) for i in range(load.args.streams)]
    if not load.args.requests:
        await asyncio.sleep(load.args.seconds)
        load.is_over = True
    await asyncio.gather(*clients)
    watching.cancel()
    seconds, whole = time.perf_counter() - began, load.counts["whole"]
    rate = whole * load.args.max_tokens / seconds
    print(f"{seconds:.1f} s, {whole / seconds:.1f} whole answers/s, {rate:.0f} tokens/s in them")


def parse_args() -> Namespace:
    parser = ArgumentParser(description="Is anything lost, does anything grow?")
    add = parser.add_argument
    add("--streams", type=int, help="at a time (256; with --requests 64)")
    add("--seconds", type=float, default=120, help="%(default)s")
    add("--requests", type=int, help="so many instead, all of them read to their end")
    add("--max-tokens", type=int, help="of each (128; with --requests 8)")
    add("--interval", type=float, default=10, help="seconds between two lines (%(default)s)")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    args.streams = args.streams or (64 if args.requests else 256)
    args.max_tokens = args.max_tokens or (8 if args.requests else 128)
    return args


def main() -> int:
    args = parse_args()
    expected = expected_texts(args)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-m", "nanoserve", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stderr.readline, "")
            port = next(
                int(found[1]) for line in lines if (found := re.search(r":(\d+)  \(", line))
            )
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            load = Load(args, port, expected)
            asyncio.run(run(load, [server.pid, *map(int, children)]))
            end = time.monotonic() + 10
            while any(left(port).values()) and time.monotonic() < end:
                time.sleep(0.1)
            print(
                f"left in the engine: {left(port)}; {footprint([server.pid, *map(int, children)])}"
            )
            bad = {what: n for what, n in load.counts.items() if what.split(":")[0].isupper()}
            print(f"{dict(load.counts)}")
            return 1 if bad or any(left(port).values()) else 0
        finally:
            server.terminate()


if __name__ == "__main__":
    sys.exit(main())
