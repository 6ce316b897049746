"""How many draft tokens are accepted, and what is generated, on distributions that are known.

The model's logits are nought and `logit_bias` says what is likely, so each token is drawn from the
same p. The proposer draws from a q of its own, with the noise of the position or with another one.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from proposers import speculation_of
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.engine.batch import Batch
from nanoserve.engine.draft_tokens import accepted_of_drafts
from nanoserve.engine.executor import StepResult
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.proposer import TextProposer
from nanoserve.sampling.gumbel_noise import Noise, row_keys

VOCAB_SIZE = 64
TOKENS = 8  # that have any probability
MAX_TOKENS = 100  # of a request
# The value that chi-square of 7 degrees of freedom exceeds once in a million times. It holds where
# each token is expected some ten times or more: from 1,000 draws on.
CHI_SQUARE_7 = 40.5

SHARP = [0.6, 0.2, 0.1, 0.05, 0.02, 0.01, 0.01, 0.01]
FLAT = [1 / 8] * 8
TURNED = SHARP[::-1]
NEAR = [0.55, 0.25, 0.08, 0.06, 0.02, 0.02, 0.01, 0.01]


class Drawn(TextProposer):
    """Draws draft tokens from q, with the noise that the target has, or that of a further seed."""

    def __init__(self, q: list[float], further: int = 0) -> None:
        self._logits = torch.full((1, VOCAB_SIZE), -torch.inf)
        self._logits[0, :TOKENS] = torch.tensor(q).log()
        self._noise, self._further = Noise(VOCAB_SIZE, torch.device("cpu")), further
        self._drawn: dict[int, list[int]] = {}

    def draft(self, seq: Sequence, most: int) -> list[int]:
        if seq.seed not in self._drawn:
            self._drawn[seq.seed] = self._draw(seq.seed, 2 * MAX_TOKENS)
        return self._drawn[seq.seed][len(seq.token_ids) :][:most]

    def _draw(self, seed: int, num_positions: int) -> list[int]:
        """Draw one for each position: the noise of a position does not depend on the others."""
        seeds = np.full(num_positions, seed + self._further, dtype=np.uint64)
        logits = self._logits.repeat(num_positions, 1)
        positions, completions = np.arange(num_positions), np.zeros(num_positions, dtype=np.uint32)
        self._noise.subtract_log_exponential(logits, row_keys(seeds, positions, completions))
        return logits.argmax(dim=1).tolist()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("nought")
    make_qwen3(path, vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    config = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(path, skip_tokenizer_init=True, speculative_config=config) as llm:
        model = llm.engine.executor.model
        model.compute_logits = lambda hidden: torch.zeros(len(hidden), VOCAB_SIZE)
        yield llm


@pytest.fixture(scope="module")
def num_drawn(by_size: Callable[..., int]) -> int:
    return by_size(1_000, 8_000, 40_000)


def draw(
    llm: LLM, p: list[float], proposer: Any, num_drawn: int
) -> tuple[Counter[int], float, int]:
    """Return what was generated, the share of draft tokens that were accepted, and how many were
    verified."""
    speculation_of(llm).proposer = proposer
    verified: Counter[bool] = Counter()

    def observe(plan: Plan, batch: Batch, result: StepResult, times: Any) -> None:
        for num_accepted, num_drafts in accepted_of_drafts(plan, result.token_ids):
            verified[True] += num_accepted
            verified[False] += num_accepted < num_drafts  # what follows is not verified

    bias = {token_id: float(np.log(value)) for token_id, value in enumerate(p)}
    params = [
        SamplingParams(
            temperature=1,
            seed=seed,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logit_bias=bias,
            allowed_token_ids=list(bias),
        )
        for seed in range(num_drawn // MAX_TOKENS)
    ]
    prompts = [[seed % VOCAB_SIZE] for seed in range(len(params))]
    llm.engine.observers.append(observe)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.observers.remove(observe)
    drawn = Counter(token_id for output in outputs for token_id in output.outputs[0].token_ids)
    return drawn, verified[True] / verified.total(), verified.total()


def total_variation(p: list[float], q: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


@pytest.mark.parametrize(
    ("p", "q"),
    [(SHARP, SHARP), (SHARP, NEAR), (SHARP, FLAT), (FLAT, SHARP), (SHARP, TURNED)],
    ids=["itself", "near", "flat", "sharp", "turned"],
)
def test_what_is_drawn_follows_the_target_and_drafts_are_accepted_as_often_as_they_can(
    llm: LLM, p: list[float], q: list[float], num_drawn: int
) -> None:
    drawn, coupled, num_verified = draw(llm, p, Drawn(q), num_drawn)
    _, apart, num_verified_apart = draw(llm, p, Drawn(q, further=12345), num_drawn)
    tv, independent = total_variation(p, q), float(np.dot(p, q))
    print(
        f"TV {tv:.3f}: the optimum is {1 - tv:.3f}, same noise {coupled:.3f} (at least "
        f"{(1 - tv) / (1 + tv):.3f}), other noise {apart:.3f} (expected {independent:.3f})"
    )
    total = drawn.total()
    chi_square = sum((drawn[i] - total * p[i]) ** 2 / (total * p[i]) for i in range(TOKENS))
    assert chi_square < CHI_SQUARE_7, drawn
    # Four standard deviations of the least certain share, 1/2.
    spread = 4 * (0.25 / min(num_verified, num_verified_apart)) ** 0.5
    assert (1 - tv) / (1 + tv) - spread < coupled < 1 - tv + spread
    assert abs(apart - independent) < spread
    assert coupled >= apart - spread


def test_a_chi_square_sees_the_bias_of_a_rule_that_reuses_noise() -> None:
    """A draft token that is kept because it is likely enough, and was not drawn, shifts p."""
    rng, num_drawn = np.random.default_rng(0), 8_000
    p, q = np.array(SHARP), np.array(FLAT)
    noise = rng.exponential(size=(num_drawn, TOKENS))
    drafted, sampled = (noise / q).argmin(axis=1), (noise / p).argmin(axis=1)
    is_kept = rng.random(num_drawn) < p[drafted] / q[drafted]
    drawn = np.bincount(np.where(is_kept, drafted, sampled), minlength=TOKENS)
    assert ((drawn - num_drawn * p) ** 2 / (num_drawn * p)).sum() > 10 * CHI_SQUARE_7
