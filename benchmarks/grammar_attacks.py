"""Send hostile grammars, and measure their effect on other requests.

    python benchmarks/grammar_attacks.py          as Markdown

Some streams run without a pause while one grammar after another is requested. The table shows when
each was rejected, or its result, and the time between two tokens of the other streams meanwhile,
beside that without an attack.
"""

import asyncio
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from nanoserve import AsyncLLM, SamplingParams, StructuredOutputsParams
from nanoserve.cli.bench.hardware import describe

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from hostile_grammars import hostile_grammars


class Neighbours:
    """Streams that run all the time, and the times between their tokens."""

    def __init__(self, llm: AsyncLLM, count: int) -> None:
        self._tasks = [asyncio.create_task(self._stream(llm, number)) for number in range(count)]
        self._gaps: list[float] = []

    async def _stream(self, llm: AsyncLLM, number: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        while True:
            before = None
            async for _ in llm.generate([5 + number, 6, 7], params):
                now = time.perf_counter()
                if before is not None:
                    self._gaps.append(now - before)
                before = now

    def gaps(self) -> str:
        """Return median, 99th percentile and maximum since the last call, in milliseconds."""
        gaps, self._gaps = sorted(self._gaps), []
        if not gaps:
            return "none came"
        values = statistics.median(gaps), gaps[int(0.99 * (len(gaps) - 1))], gaps[-1]
        return " / ".join(f"{1000 * value:.1f}" for value in values)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def attack(llm: AsyncLLM, guide: dict) -> str:
    began, num_tokens = time.perf_counter(), 0
    try:
        # Lists and texts are checked where a server reads a body: on the event loop.
        params = SamplingParams(
            temperature=1.0, max_tokens=100, structured_outputs=StructuredOutputsParams(**guide)
        )
        async for output in llm.generate([5], params):
            num_tokens = len(output.outputs[0].token_ids)
        outcome = f"{num_tokens} tokens"
    except ValueError as error:
        outcome = f"{'failed' if num_tokens else 'rejected'}: {str(error)[:70]}".replace("|", "/")
    return f"{1000 * (time.perf_counter() - began):.0f} | {outcome}"


async def run(args: Namespace) -> None:
    async with AsyncLLM(args.model, engine_process=args.engine_process) as llm:
        neighbours = Neighbours(llm, args.streams)
        await asyncio.sleep(2)
        neighbours.gaps()
        await asyncio.sleep(args.seconds)
        print("| attack | ms | outcome | between two tokens: median / p99 / longest, ms |")
        print("|---|---|---|---|")
        print(f"| none | | | {neighbours.gaps()} |", flush=True)
        for name, guide in hostile_grammars().items():
            outcome = await attack(llm, guide)
            await asyncio.sleep(0.2)
            print(f"| {name} | {outcome} | {neighbours.gaps()} |", flush=True)
        await neighbours.stop()


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument(
        "--engine-process",
        action="store_true",
        help="run the engine in its own process, like a server by default",
    )
    args = parser.parse_args()
    print(f"{describe('cpu')}, {args.model}, {args.streams} streams beside\n")
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
