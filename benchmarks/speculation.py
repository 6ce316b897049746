"""Measure speculative decoding against no draft tokens, by sequences and kinds of text.

    python benchmarks/speculation.py                            tiny-qwen3's shape, as Markdown
    python benchmarks/speculation.py --shape qwen3-0.6b-8l --streams 1,4 --rounds 3

The model computes everything as usual, but its output is scripted: the sampled tokens are replaced
by those of a text, in every engine alike. So any shape can be measured, without weights, on texts
of known kinds:

    copy     the prompt is a page of this repository's documentation, and the output repeats it with
             one word in fifty changed
    chat     the output continues the documentation, which repeats itself as prose and lists do
    random   nothing is repeated except by chance

`--texts answers` is not scripted: the bundled model answers questions that it was not trained on,
four for each sequence, at temperature 0.7, and all of it is timed, for a draft model or a head:

    python benchmarks/speculation.py --texts answers --method hidden_head --model tiny-qwen3
    python benchmarks/speculation.py --texts answers --method draft_model --model tiny-qwen3-draft

`--llama-cpp PYTHON` measures llama.cpp's lookup on the same texts and shape instead, with 2 draft
tokens (as its documentation advises on a CPU) and with `--draft-tokens`; see `lookup_llama_cpp.py`.

An engine with draft tokens and one without take turns, in one process, every twenty tokens of a
sequence, because a machine's speed drifts. Each round has another text. The steps in which all
sequences decode are timed: from the one after which all have their first token to the one in which
the first of them ends. In the first round the engine measures its steps; it is left out. A cell is
the median of the rounds' ratios. (Answers take turns as a whole.)
"""

import json
import random
import statistics
import subprocess
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.cli.bench.compare import run_child
from nanoserve.cli.bench.hardware import choose_device, describe
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.features.speculative.config import METHODS
from nanoserve.text.tokenizer import Tokenizer
from training.acceptance import held_out_questions

TEXTS = ("copy", "chat", "random")
_TURN = 20  # tokens of each sequence
_ROOT = Path(__file__).parents[1]


class Script:
    """Replace the tokens that an engine samples by those of texts."""

    def __init__(self, llm: LLM) -> None:
        self._engine, self._texts = llm.engine, {}
        runner = getattr(llm.engine.executor, "runner", llm.engine.executor)
        self._sample, runner.sampler.sample = runner.sampler.sample, self._replace

    def add(self, request_id: str, prompt: list[int], answer: list[int]) -> None:
        self._texts[request_id] = prompt + answer

    def clear(self) -> None:
        self._texts.clear()

    def _replace(self, logits: Any, slots: Any, positions: Any, *inputs: Any) -> Any:
        sampled = self._sample(logits, slots, positions, *inputs)
        if not self._texts:
            return sampled
        texts = {seq.slot: self._texts[seq.request_id] for seq in self._engine.scheduler.running}
        pairs = zip(slots.tolist(), positions.tolist(), strict=True)
        # Behind a rejected draft token, positions may lie beyond the text.
        token_ids = [texts[slot][min(position, len(texts[slot]) - 1)] for slot, position in pairs]
        return sampled._replace(token_ids=torch.tensor(token_ids, device=logits.device))


def documentation() -> list[int]:
    """Return the texts as tokens of the bundled model."""
    tokenizer = Tokenizer(bundled_checkpoint("tiny-qwen3"))
    files = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("index.md"))]
    return [i for file in files for i in tokenizer.encode(file.read_text(encoding="utf-8"))]


def script(text: str, words: list[int], args: Namespace, rng: random.Random) -> Any:
    """Return (prompt, output) of one request."""
    start, length = rng.randrange(len(words) - 2 * args.prompt), args.tokens
    prompt = words[start : start + args.prompt]
    if text == "random":
        return [rng.randrange(5, 2000) for _ in prompt], [
            rng.randrange(5, 2000) for _ in range(length)
        ]
    if text == "chat":
        return prompt, words[start + args.prompt : start + args.prompt + length]
    answer = [t if rng.random() > 0.02 else rng.randrange(5, 2000) for t in prompt]
    return prompt, (answer * (1 + length // len(answer)))[:length]


class Decoding:
    """The steps of one engine in which all sequences decode, some at a time."""

    def __init__(self, llm: LLM, scripts: list[Any], played: Script, **settings: Any) -> None:
        self._engine, self._played = llm.engine, played
        settings = {"temperature": 0, "ignore_eos": True} | settings
        for number, (prompt, answer) in enumerate(scripts):
            played.add(str(number), prompt, answer)
            params = SamplingParams(max_tokens=len(answer), **settings)
            self._engine.add_request(str(number), prompt, params)
        requests = self._engine.output_processor.requests.values()
        self._sequences = [request.sequences[0] for request in requests]
        while not all(seq.num_output_tokens for seq in self._sequences):
            self._engine.step()
        self._num_before, self._seconds = self._num_tokens(), 0.0

    def advance(self, num_tokens: int) -> bool:
        """Decode this many tokens a sequence, on average; return True if all still decode."""
        wanted = self._num_tokens() + num_tokens * len(self._sequences)
        began, is_going = self._engine.clock(), True
        while is_going and self._num_tokens() < wanted:
            self._engine.step()
            is_going = not any(seq.finished for seq in self._sequences)
        self._seconds += self._engine.clock() - began
        return is_going

    def end(self) -> float:
        """Return tokens per second."""
        num_tokens = self._num_tokens() - self._num_before
        for number in range(len(self._sequences)):
            self._engine.abort_request(str(number))
        self._played.clear()
        return num_tokens / self._seconds

    def _num_tokens(self) -> int:
        return sum(seq.num_output_tokens for seq in self._sequences)


def decode_rates(engines: list[Any], scripts: list[Any], order: tuple[int, int]) -> list[float]:
    """Return the tokens per second of each engine while all sequences decode."""
    runs = [Decoding(llm, scripts, played) for llm, played in engines]
    going = list(order)
    while going:
        going = [which for which in going if runs[which].advance(_TURN)]
    return [run.end() for run in runs]


def answer_rate(llm: LLM, questions: list[Any], seed: int) -> float:
    """Return the tokens per second of answers, prompts included."""
    clock = llm.engine.clock
    params = [
        SamplingParams(temperature=0.7, seed=seed + number, max_tokens=100)
        for number in range(len(questions))
    ]
    began = clock()
    outputs = llm.chat(questions, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (clock() - began)


def cell(args: Namespace, engines: list[Any], text: str, num_streams: int) -> str:
    """Return one row of the table."""
    rng, words = random.Random(f"{text} {num_streams}"), args.words
    ratios: list[float] = []
    rates: list[list[float]] = [[], []]
    before = engines[1][0].stats
    for number in range(args.rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        if text == "answers":
            questions, rate = rng.sample(args.questions, 4 * num_streams), [0.0, 0.0]
            for which in order:
                rate[which] = answer_rate(engines[which][0], questions, 1000 * number)
        else:
            scripts = [script(text, words, args, rng) for _ in range(num_streams)]
            rate = decode_rates(engines, scripts, order)
        if number:
            ratios.append(rate[1] / rate[0])
            rates[0].append(rate[0])
            rates[1].append(rate[1])
    after = engines[1][0].stats
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    off, on = (statistics.median(values) for values in rates)
    low, ratio, high = min(ratios), statistics.median(ratios), max(ratios)
    return (
        f"| {text} | {num_streams} | {off:.0f} | {on:.0f} | **{ratio:.2f}** | {low:.2f} - "
        f"{high:.2f} | {accepted} of {drafted} |"
    )


def run_llama_cpp(args: Namespace, streams: list[int], folder: str) -> None:
    """Print the table of `lookup_llama_cpp.py` for the same texts."""
    cells = []
    for num_streams in streams:
        for text in args.texts.split(","):
            rng = random.Random(f"{text} {num_streams}")
            rounds = [
                [script(text, args.words, args, rng) for _ in range(num_streams)]
                for _ in range(args.rounds + 1)
            ]
            cells.append({"text": text, "rounds": rounds})
    spec: dict[str, Any] = {"scratch": folder, "model": folder, "device": "cpu", "options": {}}
    spec |= {"threads": torch.get_num_threads(), "temperature": 0, "dtype": "bfloat16"}
    spec |= {"tokenizer": str(bundled_checkpoint("tiny-qwen3")), "max_num_batched_tokens": None}
    if args.shape == "tiny-qwen3":
        spec["model"] = spec["tokenizer"]
    else:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        run_child("weights", spec)
    file = Path(folder) / "lookup.json"
    drafts = sorted({2, args.draft_tokens})
    file.write_text(json.dumps(spec | {"cells": cells, "drafts": drafts}))
    child = Path(__file__).with_name("lookup_llama_cpp.py")
    print("| text | sequences | drafts | off, tokens/s | on | on / off | rounds | accepted |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    subprocess.run([args.llama_cpp, str(child), str(file)], check=True)


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", default="tiny-qwen3", choices=["tiny-qwen3", *SHAPES])
    parser.add_argument("--method", default="ngram", choices=METHODS.names())
    parser.add_argument("--model", help="of a draft model, or of a head")
    parser.add_argument("--draft-tokens", type=int, default=8, help="num_speculative_tokens")
    parser.add_argument("--streams", default="1,4,16,64")
    parser.add_argument("--texts", default=",".join(TEXTS))
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--tokens", type=int, default=200, help="of output")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--eager", action="store_true", help="no graphs of drafts, on a GPU")
    parser.add_argument("--llama-cpp", help="the Python that has llama-cpp-python, to measure it")
    args = parser.parse_args()
    if args.llama_cpp and ("answers" in args.texts or args.method != "ngram" or args.model):
        parser.error("--llama-cpp has scripted texts, and no method but its own")
    if args.llama_cpp and (args.eager or args.device == "cuda"):
        parser.error("--llama-cpp is measured on a CPU")
    args.words = documentation()
    streams = [int(number) for number in args.streams.split(",")]
    config = {"method": args.method, "num_speculative_tokens": args.draft_tokens}
    config |= {"model": args.model} if args.model else {}
    config |= {"enforce_eager": True} if args.eager else {}
    device = choose_device(args.device)
    args.questions = held_out_questions(80) if "answers" in args.texts else []
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"max_model_len": args.prompt + args.tokens + 8}
        model = "tiny-qwen3"
        if args.shape != model:
            model = folder
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
            options |= {"load_format": "dummy", "tokenizer": "tiny-qwen3"}
        options |= {"enable_prefix_caching": False, "device": device}
        print(f"{describe(device)}, torch {torch.__version__}\n")
        if args.llama_cpp:
            print(f"{args.shape}, llama.cpp's lookup, {args.rounds} rounds\n")
            run_llama_cpp(args, streams, folder)
            return
        print(f"{args.shape}, {config}, {args.rounds} rounds\n")
        print("| text | sequences | off, tokens/s | on | on / off | rounds | accepted |")
        print("|---|---|---|---|---|---|---|")
        for num_streams in streams:
            options["max_num_seqs"] = num_streams
            with (
                LLM(model, **options) as off,
                LLM(model, speculative_config=config, **options) as on,
            ):
                engines = [(llm, Script(llm)) for llm in (off, on)]
                for text in args.texts.split(","):
                    print(cell(args, engines, text, num_streams), flush=True)


if __name__ == "__main__":
    main()
