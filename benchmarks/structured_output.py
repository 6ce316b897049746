"""Measure the cost of grammars and the gain of jump-forward tokens.

    python benchmarks/structured_output.py                # the shape of tiny-qwen3, as Markdown
    python benchmarks/structured_output.py --shape qwen3-0.6b-8l --rounds 3

The model computes everything as usual, but its output is scripted, as in `speculation.py`: JSON
documents that a schema allows, with a space after each comma and colon. So the model need not be
able to follow the schema. Except for tiny-qwen3, the tokenizer is trained on the standard library's
sources, with as many tokens as the shape has, or `--vocabulary`.

Three engines take turns, in one process: one without a grammar (free), one with a grammar and token
by token (constrained), and one that computes jump-forward tokens together. The steps in which all
sequences decode are timed. The time spent in grammars is measured separately: advancing them,
checking the next token, filling masks. `--texts random` is the other extreme: the model's preferred
token is never allowed, so that each token needs a mask.
"""

import json
import random
import statistics
import sysconfig
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculation import Decoding, Script
from tokenizers import Tokenizer as TokenizerBackend
from tokenizers import decoders, models, pre_tokenizers, trainers

from nanoserve import LLM, StructuredOutputsParams
from nanoserve.cli.bench.hardware import choose_device, describe
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.features.structured.constrained_sequence import ConstrainedSequence, GrammarMask

_TURN = 20  # tokens of each sequence
_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "email": {"type": "string"},
            "address": {
                "type": "object",
                "properties": {
                    "street": {"type": "string"},
                    "city": {"type": "string"},
                    "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                },
                "required": ["street", "city", "postal_code"],
                "additionalProperties": False,
            },
            "tags": {"type": "array", "items": {"type": "string"}},
            "is_active": {"type": "boolean"},
        },
        "required": ["name", "age", "email", "address", "tags", "is_active"],
        "additionalProperties": False,
    },
}
_WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "harbor", "linden"]


def make_tokenizer(folder: Path, size: int) -> None:
    """Train byte-level BPE on the standard library, so that nothing has to be downloaded."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    random.Random(0).shuffle(files)
    tokenizer = TokenizerBackend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def document(rng: random.Random) -> dict[str, Any]:
    first, second = rng.choice(_WORDS), rng.choice(_WORDS)
    return {
        "name": f"{first.title()} {second.title()}",
        "age": rng.randint(18, 90),
        "email": f"{first}.{second}@example.com",
        "address": {
            "street": f"{rng.randint(1, 99)} {rng.choice(_WORDS).title()} Street",
            "city": rng.choice(_WORDS).title(),
            "postal_code": f"{rng.randrange(10**5):05}",
        },
        "tags": rng.sample(_WORDS, rng.randint(0, 3)),
        "is_active": rng.random() < 0.5,
    }


class Clock:
    """Count the seconds spent in grammars."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds, self._clock, self._depth = 0.0, clock, 0
        for owner, names in (
            (ConstrainedSequence, ("is_terminated", "forced")),
            (GrammarMask, ("first_illegal", "fill")),
        ):
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = self._clock()
            try:
                return function(*args)
            finally:
                self.seconds += self._clock() - began

        return timed


def scripts_of(args: Namespace, llm: LLM, num_streams: int, rng: random.Random) -> list[Any]:
    """Return (prompt, output) of each; an output never reaches its end."""
    encode, scripts = llm.engine.tokenizer.encode, []
    for _ in range(num_streams):
        text = json.dumps([document(rng) for _ in range(args.tokens // 20)])
        answer = encode(text, False)[: args.tokens]
        scripts.append(([rng.randrange(5, 1000) for _ in range(args.prompt)], answer))
    return scripts


def cell(args: Namespace, engines: list[Any], num_streams: int, clock: Clock) -> str:
    rng = random.Random(num_streams)
    guide = StructuredOutputsParams(json=_SCHEMA)
    rates: list[list[float]] = [[], [], []]
    spent, steps = [0.0, 0.0, 0.0], [0, 0, 0]
    for number in range(args.rounds + 1):
        scripts = scripts_of(args, engines[0][0], num_streams, rng)
        runs = []
        for which, (llm, played) in enumerate(engines):
            own = {"structured_outputs": guide} if which else {}
            runs.append(Decoding(llm, scripts, played, **own))
            if args.texts == "random":
                played.clear()
        going = [0, 1, 2] if number % 2 else [2, 1, 0]
        while going:
            for which in list(going):
                llm = engines[which][0]
                before, num_steps = clock.seconds, llm.stats.num_steps
                if not runs[which].advance(_TURN):
                    going = []
                if number:
                    spent[which] += clock.seconds - before
                    steps[which] += llm.stats.num_steps - num_steps
        rate = [run.end() for run in runs]
        if number:
            for values, value in zip(rates, rate, strict=True):
                values.append(value)
    free, constrained, jump = (statistics.median(values) for values in rates)
    micros = 1e6 * spent[1] / max(1, steps[1])
    step = 1e6 * num_streams / constrained
    ratios = [b / a for a, b in zip(rates[0], rates[2], strict=True)]
    costs = [b / a for a, b in zip(rates[0], rates[1], strict=True)]
    return (
        f"| {num_streams} | {free:.0f} | {constrained:.0f} | {statistics.median(costs):.3f} | "
        f"{micros:.0f} | {100 * micros / step:.2f} % | {jump:.0f} | "
        f"**{statistics.median(ratios):.2f}** | {min(ratios):.2f} - {max(ratios):.2f} |"
    )


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", default="tiny-qwen3", choices=["tiny-qwen3", *SHAPES])
    parser.add_argument("--streams", default="1,4,16,64")
    parser.add_argument("--texts", default="json", choices=("json", "random"))
    parser.add_argument("--vocabulary", type=int, help="number of tokens (default: the shape's)")
    parser.add_argument("--prompt", type=int, default=100, help="tokens")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    args = parser.parse_args()
    device = choose_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"max_model_len": args.prompt + args.tokens + 8}
        options |= {"enable_prefix_caching": False, "device": device}
        model = "tiny-qwen3"
        if args.shape != model:
            model = folder
            size = args.vocabulary or SHAPES[args.shape]["vocab_size"]
            shape = SHAPES[args.shape] | {"vocab_size": size}
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            make_tokenizer(Path(folder), size)
            options["load_format"] = "dummy"
        print(f"{describe(device)}\n\n{args.shape}, {args.texts}, {args.rounds} rounds\n")
        print("| sequences | free, tokens/s | constrained | constrained / free |", end="")
        print(
            " us a step in grammars | of a step | jump-forward, tokens/s | jump / free | rounds |"
        )
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        with (
            LLM(model, **options) as free,
            LLM(model, structured_outputs_config={"jump_forward": False}, **options) as constrained,
            LLM(model, structured_outputs_config={"jump_forward": True}, **options) as jump,
        ):
            engines = [(llm, Script(llm)) for llm in (free, constrained, jump)]
            clock = Clock(free.engine.clock)
            for num_streams in map(int, args.streams.split(",")):
                print(cell(args, engines, num_streams, clock), flush=True)


if __name__ == "__main__":
    main()
