"""Evaluation of the bundled model: the share of answers that are exactly as learned.

    python -m training.evaluate [--model DIR] [--every N]

An answer counts only if the complete output equals the expected string, so one wrong token
anywhere in it is a miss. That makes the model an oracle for the engine: shares far below those of
the model card mean that the engine does not compute the model correctly.
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
    """Result of one evaluation set: the number of questions, and the misses for inspection."""

    total: int = 0
    misses: list[tuple[Probe, str]] = field(default_factory=list)

    @property
    def correct(self) -> int:
        """Number of correct answers."""
        return self.total - len(self.misses)


def evaluate(generate: Generate, every: int = 1, terms: Terms | None = None) -> dict[str, Share]:
    """Generate an answer to each evaluation item, and compare complete outputs.

    Args:
        generate: takes conversations and the largest number of new tokens; returns one greedy
            answer per conversation, in order, without special tokens.
        every: use only each ``every``-th item of a set, for a quick evaluation.
        terms: those that the model was trained on; by default the bundled model's.

    Returns:
        The share of each evaluation set by its name, in the order of ``evaluation_sets``.
    """
    sets = evaluation_sets(terms=terms)
    probes = [(name, probe) for name, group in sets.items() for probe in group[::every]]
    # One shuffled call for all sets, so that batches mix lengths, languages and turns.
    random.Random(0).shuffle(probes)
    answers = generate([probe.messages for _, probe in probes], MAX_ANSWER_TOKENS)
    shares = {name: Share() for name in sets}
    for (name, probe), answer in zip(probes, answers, strict=True):
        shares[name].total += 1
        if answer != probe.expected:
            shares[name].misses.append((probe, answer))
    return shares


def as_table(shares: dict[str, Share]) -> str:
    """Return the shares as a Markdown table."""
    lines = ["| questions | exact answers | share |", "|---|---|---|"]
    for name, share in shares.items():
        percent = 100 * share.correct / share.total
        lines.append(f"| {name} | {share.correct} / {share.total} | {percent:.1f} % |")
    return "\n".join(lines)


def misses_as_text(shares: dict[str, Share], limit: int) -> str:
    """Return up to ``limit`` misses of each set as text: the question and the wrong answer."""
    return "\n".join(
        f"{name}: {probe.messages[-1]['content']!r} -> {answer!r}"
        for name, share in shares.items()
        for probe, answer in share.misses[:limit]
    )


def nanoserve_generate(model: str) -> Generate:
    """Return a function that generates greedy answers with nanoserve.

    It computes in float32, so that rounding does not change the order of nearly equal logits.
    """
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
    parser.add_argument("--every", type=int, default=1, help="use only each N-th question")
    args = parser.parse_args()
    if args.every < 1:
        parser.error(f"--every must be at least 1, got {args.every}")
    if args.model is None:
        parser.error("this installation has no tiny-qwen3 checkpoint; name a folder with --model")
    shares = evaluate(nanoserve_generate(str(args.model)), args.every)
    print(as_table(shares))
    print(misses_as_text(shares, args.show))


if __name__ == "__main__":
    main()
