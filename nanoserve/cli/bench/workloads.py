"""Workloads of benchmarks, i.e. numbers of requests, their lengths and common prefixes."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from importlib.util import find_spec
from random import Random
from typing import Any

Tokens = list[list[int]]
WORKLOADS: dict[str, dict[str, Any]] = {
    "random": {"num_seqs": 64, "input_len": "16-256", "output_len": "16-128"},
    "nano-vllm": {"num_seqs": 256, "input_len": "100-1024", "output_len": "100-1024"}
    | {"shape": "qwen3-0.6b", "temperature": 0.6},
    "shared-prefix": {"num_seqs": 64, "input_len": "32-32", "output_len": "32-32"}
    | {"shared_len": 512},
    "long-prompt": {"num_seqs": 16, "input_len": "1024-1536", "output_len": "16-32"},
    "chat": {"num_seqs": 64, "input_len": "16-64", "output_len": "16-128"}
    | {"shared_len": 64, "turns": 4},
    "single": {"num_seqs": 1, "input_len": "128-128", "output_len": "256-256"},
}


def draw_workload(
    num_seqs: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    vocab_size: int,
    shared_len: int = 0,
    turns: int = 1,
    seed: int = 0,
) -> tuple[Tokens, list[int]]:
    """Draw all prompts, then all output lengths, from one generator, with seed 0 as in nano-vllm.

    Ids are reduced to the vocabulary only after they are drawn, so lengths are the same for all
    models. All prompts begin with the same `shared_len` tokens. With `turns`, a prompt repeats the
    prompt of its conversation's previous turn, then random tokens as the answer, before its own.
    """
    rng = Random(seed)

    def draw(num_tokens: int) -> list[int]:
        return [rng.randint(0, 10_000) % vocab_size for _ in range(num_tokens)]

    messages = [draw(rng.randint(*input_len)) for _ in range(num_seqs)]
    output_lens = [rng.randint(*output_len) for _ in range(num_seqs)]
    prompts: list[list[int]] = []
    shared, num_conversations = draw(shared_len), max(1, num_seqs // turns)
    for message in messages:
        before = len(prompts) - num_conversations
        history = shared if before < 0 else prompts[before] + draw(output_lens[before])
        prompts.append(history + message)
    return prompts, output_lens


def length_range(text: str) -> tuple[int, int]:
    """Read "100-200", or one number, as (lowest, highest)."""
    low, _, high = text.partition("-")
    if not (low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= int(high or low)):
        raise ArgumentTypeError(f"{text!r} must be a number of tokens, or LO-HI, of at least 1")
    return int(low), int(high or low)


def count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def counts(text: str) -> list[int]:
    return [count(number) for number in text.split(",")]


def positive(text: str) -> float:
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


def rates(text: str) -> list[float]:
    return [positive(number) for number in text.split(",")]


def milliseconds(text: str) -> float:
    return positive(text) / 1000


def add_workload(parser: ArgumentParser) -> None:
    """Add the flags of workload and report that benchmarks of engines and of servers share."""
    add = parser.add_argument
    workload = "Workload, which sets the defaults of the flags below. Default: %(default)s."
    add("--workload", choices=WORKLOADS, default="random", help=workload)
    add("--num-seqs", type=count, metavar="N", help="Number of prompts. Default: %(default)s.")
    lengths = "Range of prompt lengths in tokens. Default: %(default)s."
    add("--input-len", type=length_range, metavar="LO-HI", help=lengths)
    lengths = "Range of output lengths in tokens. Default: %(default)s."
    add("--output-len", type=length_range, metavar="LO-HI", help=lengths)
    shared = "Number of tokens that all prompts begin with. Default: %(default)s."
    add("--shared-len", type=int, default=0, metavar="N", help=shared)
    turns = "Turns of a conversation, each of which repeats those before. Default: %(default)s."
    add("--turns", type=count, default=1, metavar="N", help=turns)
    temperature = "Sampling temperature; 0 is greedy. Default: %(default)s."
    add("--temperature", type=float, default=0.0, help=temperature)
    ttft = "Limit of the time to first token for goodput, in milliseconds. Default: %(default)s."
    add("--slo-ttft", type=milliseconds, default="1000", metavar="MS", help=ttft)
    itl = "Limit of the inter-token latency for goodput, in milliseconds. Default: %(default)s."
    add("--slo-itl", type=milliseconds, default="100", metavar="MS", help=itl)
    add("--repeat", type=count, default=1, help="Number of runs of each. Default: %(default)s.")
    add("--json", metavar="FILE", help="File for all measurements, in JSON. Default: none.")
    plot = "File for a plot; needs matplotlib (nanoserve[bench]). Default: none."
    add("--plot", metavar="FILE.png", help=plot)


def parse_with_workload(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Parse `arguments`, with the defaults of the workload that they name."""
    # The workload is parsed first, so that --help shows its defaults.
    chosen = ArgumentParser(add_help=False, allow_abbrev=False)
    chosen.add_argument("--workload", default="random")
    workload = chosen.parse_known_args(arguments)[0].workload
    parser.set_defaults(**WORKLOADS.get(workload, {}))
    args = parser.parse_args(arguments)
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'nanoserve[bench]'")
    return args
