"""Measure how many chunks a second the client of `nanoserve bench --url` can receive.

    python benchmarks/client_limit.py [--streams 64] [--chunks 200]

The server is another process that has prepared all bytes and sends each stream a chunk in turn, at
a given total rate. The cost of a chunk is the client's processor time; where the client falls
behind, several chunks arrive in one read, and each costs less. Chunks have the length of an
engine's.
"""

import json
import multiprocessing
import socket
import statistics
import time
from argparse import ArgumentParser
from asyncio import run
from multiprocessing.connection import Connection

from nanoserve.cli.bench.serve.connection import Server
from nanoserve.cli.bench.serve.figures import figures
from nanoserve.cli.bench.serve.load import Exchange, closed_loop

RATES = (1_000, 5_000, 10_000, 20_000, 40_000, None)  # chunks a second; None: as fast as it can
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunk() -> bytes:
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    value = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk"}
    value |= {"created": 1_790_000_000, "model": "some-model-of-eight-billion", "choices": [choice]}
    return _framed(b"data: %b\n\n" % json.dumps(value).encode())


def serve(ports: Connection, num_streams: int, num_chunks: int, rates: tuple) -> None:
    """For each rate, wait for the requests of all streams, then send each a chunk in turn."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_streams)
    ports.send(listener.getsockname()[1])
    chunk, end = _chunk(), _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    for rate in rates:
        streams = [listener.accept()[0] for _ in range(num_streams)]
        for stream in streams:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.recv(2**16)
            stream.sendall(_HEAD)
        due = time.perf_counter()
        for _ in range(num_chunks):
            for stream in streams:
                due += 1 / rate if rate else 0.0
                while time.perf_counter() < due:
                    time.sleep(0)
                stream.sendall(chunk)
        for stream in streams:
            stream.sendall(end)
            stream.close()


async def measure(port: int, num_streams: int) -> tuple[list[Exchange], float]:
    server = Server(f"http://127.0.0.1:{port}", None, 600.0)
    requests = [server.request("chat/completions", b"{}")] * num_streams
    before = time.process_time()
    exchanges = await closed_loop(server, requests, num_streams)
    spent = time.process_time() - before
    server.close()
    return exchanges, spent


def main() -> None:
    parser = ArgumentParser(description="What the client of `nanoserve bench --url` can take.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=200, help="number of chunks of each stream")
    args = parser.parse_args()
    total = args.streams * args.chunks
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, args.streams, args.chunks, RATES))
    process.start()
    port = ours.recv()
    print(f"{args.streams} streams of {args.chunks} chunks, {len(_chunk())} bytes each\n")
    print("| chunks/s sent | received | core | us a chunk | chunks a read | ITL p50, p99 ms |")
    print("|---|---|---|---|---|---|")
    for rate in RATES:
        exchanges, spent = run(measure(port, args.streams))
        reads = statistics.mean(len(exchange.response.pieces) for exchange in exchanges)
        found = figures(exchanges, [args.chunks] * args.streams, 1.0, 1.0, spent)
        if found["failed"]:
            raise RuntimeError(str(found["errors"]))
        waits = ", ".join(f"{found['latencies'][f'itl_p{p}']:.2f}" for p in (50, 99))
        cells = [f"{rate:,}" if rate else "all", f"{total / found['seconds']:,.0f}"]
        cells += [f"{found['client']['core']:.0%}", f"{1e6 * spent / total:.1f}"]
        print(f"| {' | '.join([*cells, f'{args.chunks / reads:.2f}', waits])} |", flush=True)
    process.join()


if __name__ == "__main__":
    main()
