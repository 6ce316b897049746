"""How much of what it learned does the bundled model say, word for word?

    python -m training.evaluate [--model DIR] [--every N]

An answer counts only if the whole string equals the expected one, so one wrong token anywhere in
it is a miss. That makes the model an oracle for the engine: shares far below those of the model
card mean that the engine computes something else than the model.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from training.corpus import Message, Probe, Terms, evaluation_sets

Generate = Callable[[list[list[Message]], int], list[str]]

# The longest answer of the corpus has 64 tokens; a longer text is wrong anyway.
MAX_ANSWER_TOKENS = 80


@dataclass
class Share:
    """Correct answers of one set, with the misses for inspection."""

    total: int = 0
    misses: list[tuple[Probe, str]] = field(default_factory=list)

    @property
    def correct(self) -> int:
        return self.total - len(self.misses)


def evaluate(generate: Generate, every: int = 1, terms: Terms | None = None) -> dict[str, Share]:
    """Ask every evaluation item once and compare whole strings.

    Args:
        generate: takes conversations and the largest number of new tokens; returns one greedy
            answer per conversation, in order, without special tokens.
        every: ask only each ``every``-th item of a set, for a quick look.
        terms: those that the model was trained on; without it the bundled model's.

    Returns:
        The share of each evaluation set by its name, in the order of ``evaluation_sets``.
    """
    sets = evaluation_sets(terms=terms)
    probes = [(name, probe) for name, group in sets.items() for probe in group[::every]]
    # All sets are asked in one shuffled call: a batch then mixes lengths, languages and turns.
    random.Random(0).shuffle(probes)
    answers = generate([probe.messages for _, probe in probes], MAX_ANSWER_TOKENS)
    shares = {name: Share() for name in sets}
    for (name, probe), answer in zip(probes, answers, strict=True):
        shares[name].total += 1
        if answer != probe.expected:
            shares[name].misses.append((probe, answer))
    return shares


def as_table(shares: dict[str, Share]) -> str:
    """The shares as a Markdown table."""
    lines = ["| questions | exact answers | share |", "|---|---|---|"]
    for name, share in shares.items():
        percent = 100 * share.correct / share.total
        lines.append(f"| {name} | {share.correct} / {share.total} | {percent:.1f} % |")
    return "\n".join(lines)


def misses_as_text(shares: dict[str, Share], limit: int) -> str:
    """Up to ``limit`` misses of each set: the question and what came instead."""
    return "\n".join(
        f"{name}: {probe.messages[-1]['content']!r} -> {answer!r}"
        for name, share in shares.items()
        for probe, answer in share.misses[:limit]
    )


def nanoserve_generate(model: str) -> Generate:
    """Greedy answers from nanoserve itself, in float32 so that no near-tie is rounded away."""
    from nanoserve import LLM, SamplingParams

    def generate(conversations: list[list[Message]], max_tokens: int) -> list[str]:
        with LLM(model, dtype="float32") as llm:
            params = SamplingParams(temperature=0, max_tokens=max_tokens)
            return [output.outputs[0].text for output in llm.chat(conversations, params)]

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact-answer shares of the bundled model.")
    parser.add_argument("--model", type=Path, default=bundled_checkpoint("tiny-qwen3"))
    parser.add_argument("--show", type=int, default=3, help="misses to print of each set")
    parser.add_argument("--every", type=int, default=1, help="ask only each N-th question")
    args = parser.parse_args()
    if args.every < 1:
        parser.error(f"--every must be at least 1, got {args.every}")
    if args.model is None:
        parser.error("this installation has no tiny-qwen3 folder; name one with --model")
    shares = evaluate(nanoserve_generate(str(args.model)), args.every)
    print(as_table(shares))
    print(misses_as_text(shares, args.show))


if __name__ == "__main__":
    main()
