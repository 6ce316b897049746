"""Proposers for tests: perfect, wrong, random, too long, past the end."""

import random
from dataclasses import replace
from typing import Any

from nanoserve import LLM
from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.extension import Speculation
from nanoserve.features.speculative.proposer import TextProposer


def speculation_of(llm: LLM) -> Speculation:
    """Return the extension of an engine that adds its proposer's draft tokens."""
    (speculation,) = (e for e in llm.engine.extensions if isinstance(e, Speculation))
    return speculation


class Oracle(TextProposer):
    """Drafts what each sequence gets in an engine without draft tokens."""

    def __init__(self, reference: LLM) -> None:
        self._reference = reference
        self._answers: dict[Sequence, list[int]] = {}

    def draft(self, seq: Sequence, most: int) -> list[int]:
        if seq not in self._answers:
            params = replace(seq.params, seed=seq.seed)
            (output,) = self._reference.generate(seq.prompt_token_ids, params, use_tqdm=False)
            self._answers[seq] = output.outputs[seq.index].token_ids
        return self._answers[seq][seq.num_output_tokens :][:most]

    def forget(self, seq: Sequence) -> None:
        self._answers.pop(seq, None)


class Wrong(TextProposer):
    """Never the same token twice, and hardly ever the one that is sampled."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def draft(self, seq: Sequence, most: int) -> list[int]:
        last = seq.token_ids[-1]
        return [(last + 1 + i) % self._vocab_size for i in range(most)]


class Mixed(TextProposer):
    """Each time as another one would, and sometimes longer than allowed."""

    def __init__(self, rng: random.Random, vocab_size: int, proposers: list[Any]) -> None:
        self._rng, self._vocab_size, self._proposers = rng, vocab_size, proposers

    def draft(self, seq: Sequence, most: int) -> list[int]:
        rng = self._rng
        kind = rng.random()
        if kind < 0.15:
            return [rng.randrange(self._vocab_size) for _ in range(most + rng.randint(0, 5))]
        if kind < 0.25:  # a stop token, and on from there
            stops = sorted(seq.stop_token_ids) or [0]
            return [rng.choice(stops) for _ in range(most)]
        if kind < 0.35:
            return []
        drafts = rng.choice(self._proposers).draft(seq, most)
        if drafts and kind < 0.7:  # as they are up to some point
            drafts[rng.randrange(len(drafts))] = rng.randrange(self._vocab_size)
        return drafts

    def forget(self, seq: Sequence) -> None:
        for proposer in self._proposers:
            proposer.forget(seq)
