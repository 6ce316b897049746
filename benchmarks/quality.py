"""Measure the effect of quantization on a model: exact answers, and divergence.

    python benchmarks/quality.py [--every 10] [--positions 2000] [--scheme int8]
    python benchmarks/quality.py --model smollm2 [--llama-cpp PYTHON]      see `quality_real.py`

The first command is for the bundled model. Exact answers: the shares of `training.evaluate`,
greedy. Divergence: over the tokens of conversations with their correct answers, KL(p || q) in nats
of the next token's distribution, with p of the model in float32. A model of random weights would
hide errors; this one has learned its text, but has no rows with a few values a thousand times as
large as the others, as real models have.
"""

import argparse
import tempfile
from importlib.util import find_spec
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import quality_real
from divergence import divergence
from prompt_logits import prompt_logits

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from training.corpus import evaluation_sets
from training.evaluate import evaluate

_WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    **{
        f"int4, groups of {size}": {
            "dtype": "float32",
            "quantization": "int4",
            "quantization_group_size": size,
        }
        for size in (32, 64, 128)
    },
}
_CACHES: dict[str, dict[str, Any]] = {
    "": {},
    ", KV int8": {"kv_cache_dtype": "int8"},
    ", KV fp8": {"kv_cache_dtype": "fp8"},
}
# Files of llama.cpp. K types have blocks of 256 values, and this model's rows have 192.
_GGUF = ("Q8_0", "Q4_0")
SCHEMES = {
    f"{name}{cache}": weights | _CACHES[cache]
    for cache, (name, weights) in product(_CACHES, _WEIGHTS.items())
}
SCHEMES |= {"float16": {"dtype": "float16"}}
SCHEMES |= {f"GGUF {kind}": {"dtype": "float32", "gguf": kind} for kind in _GGUF}
KINDS = ("glossary", "addition", "all other questions")


def texts(llm: LLM, num_positions: int) -> list[list[int]]:
    """Return conversations with answers as token ids, with at least this many tokens."""
    in_turns = chain.from_iterable(zip_longest(*evaluation_sets().values()))
    found: list[list[int]] = []
    for probe in filter(None, in_turns):
        conversation = [*probe.messages, {"role": "assistant", "content": probe.expected}]
        text = llm.engine.tokenizer.apply_chat_template(conversation, add_generation_prompt=False)
        found.append(llm.engine.tokenizer.encode(text, add_special_tokens=False))
        if sum(len(prompt) - 1 for prompt in found) >= num_positions:
            break
    return found


def load(options: dict[str, Any], scratch: Path) -> LLM:
    options = dict(options)
    kind = options.pop("gguf", None)
    if kind is None:
        return LLM("tiny-qwen3", **options)
    from nanoserve.cli.bench.engines.gguf_file import write_gguf

    file = scratch / f"{kind}.gguf"
    write_gguf(bundled_checkpoint("tiny-qwen3"), file, kind)
    return LLM(file, tokenizer="tiny-qwen3", **options)


def answers_of(llm: LLM, every: int) -> str:
    def generate(conversations: list[Any], max_tokens: int) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = llm.chat(conversations, params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    counts = dict.fromkeys(KINDS, (0, 0))
    for name, share in evaluate(generate, every).items():
        kind = next((kind for kind in KINDS if name.startswith(kind)), KINDS[-1])
        correct, total = counts[kind]
        counts[kind] = correct + share.correct, total + share.total
    return " | ".join(f"{correct} / {total}" for correct, total in counts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of a model in fewer bits.")
    parser.add_argument("--model", default="tiny-qwen3", help="smollm2, a GGUF file or a folder")
    parser.add_argument("--positions", type=int, default=2000, help="positions of the divergence")
    parser.add_argument("--scheme", action="append", help="schemes to measure (default: all)")
    bundled = parser.add_argument_group("with the bundled model")
    bundled.add_argument("--every", type=int, default=1, help="ask only each N-th question")
    real = parser.add_argument_group("with another one")
    real.add_argument("--llama-cpp", metavar="PYTHON", help="interpreter that has llama-cpp-python")
    real.add_argument(
        "--kind", action="append", help="kinds of GGUF files that it writes (default: all)"
    )
    real.add_argument(
        "--set", action="append", type=_setting, metavar="NAME=VALUE", help="an option of each LLM"
    )
    args = parser.parse_args()
    schemes = SCHEMES if args.model == "tiny-qwen3" else quality_real.SCHEMES
    for name in args.scheme or ():
        if name not in schemes:
            parser.error(f"--scheme {name!r} is not one of {', '.join(map(repr, schemes))}")
    if args.model == "tiny-qwen3":
        measure(args)
    else:
        quality_real.measure(args)


def _setting(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def measure(args: argparse.Namespace) -> None:
    """Print the table of the bundled model."""
    reference: np.ndarray | None = None
    print(f"| scheme | {' | '.join(KINDS)} | KL mean | KL p99 | same first choice |")
    print("|---" * (len(KINDS) + 4) + "|")
    for name in dict.fromkeys(["float32", *(args.scheme or SCHEMES)]):
        if "gguf" in SCHEMES[name] and find_spec("gguf") is None:
            print(f"| {name} | not measured: the package gguf is not installed |")
            continue
        with tempfile.TemporaryDirectory() as scratch, load(SCHEMES[name], Path(scratch)) as llm:
            prompts = texts(llm, args.positions)
            logits = prompt_logits(llm, prompts)[: args.positions]
            next_ids = [token_id for prompt in prompts for token_id in prompt[1:]]
            reference = logits if reference is None else reference
            found = divergence(reference, logits, next_ids[: args.positions])
            cells = f"{found.kl_mean:.2e} | {found.kl_p99:.2e} | {found.same_choice:.2%}"
            print(f"| {name} | {answers_of(llm, args.every)} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
