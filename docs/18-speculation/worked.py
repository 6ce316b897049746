"""Numbers of chapter 18: cost of verification, two ways to verify, gain of a draft token.

Rejection sampling: Leviathan et al. 2022 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
The same noise: Daliri, Musco, Suresh 2024 (arXiv 2408.07978). `target` is always the model's
distribution of a token and `draft` the proposer's.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tables import table


class Machine(NamedTuple):
    """A model in 16 bits on a GPU, from NVIDIA's data sheet; only weights are counted."""

    parameters: float
    bandwidth: float  # bytes per second
    matmul_rate: float  # operations per second, dense, 16 bits


LLAMA_8B_ON_H100 = Machine(8.03e9, 3.35e12, 989e12)


def step_ms(num_tokens: int) -> float:
    """Time of Llama 3.1 8B on an H100, for reading all weights once or for 2 operations per weight
    and token, whichever is longer."""
    reading = 2 * LLAMA_8B_ON_H100.parameters / LLAMA_8B_ON_H100.bandwidth
    computing = 2 * LLAMA_8B_ON_H100.parameters * num_tokens / LLAMA_8B_ON_H100.matmul_rate
    return 1000 * max(reading, computing)


def free_tokens() -> int:
    """Largest number of tokens in a step for which computing takes no longer than reading."""
    return math.floor(LLAMA_8B_ON_H100.matmul_rate / LLAMA_8B_ON_H100.bandwidth)


def check_table(sequences: Sequence[int], drafts: int) -> str:
    """Time of a step without draft tokens, and with so many for each sequence."""
    rows = []
    for count in sequences:
        plain, checked = step_ms(count), step_ms(count * (1 + drafts))
        cells = (count * (1 + drafts), f"{plain:.1f} ms", f"{checked:.1f} ms")
        rows.append((count, *cells, f"{checked / plain:.2f}"))
    header = ("sequences", "tokens with drafts", "step without drafts", "step with drafts", "ratio")
    return table(header, rows)


def acceptance(target: Sequence[float], draft: Sequence[float]) -> float:
    """How often rejection sampling accepts a draft token: the overlap of the distributions."""
    return math.fsum(min(p, q) for p, q in zip(target, draft, strict=True))


def residual(target: Sequence[float], draft: Sequence[float]) -> list[float]:
    """The positive part of target minus draft, normalised: the distribution after a rejection."""
    rest = [max(0.0, p - q) for p, q in zip(target, draft, strict=True)]
    return [r / math.fsum(rest) for r in rest]


def rejection_table(target: Sequence[float], draft: Sequence[float]) -> str:
    """One token of rejection sampling, with all its cases."""
    rejected = 1 - acceptance(target, draft)
    rows = []
    for token, (p, q, r) in enumerate(
        zip(target, draft, residual(target, draft), strict=True), start=ord("a")
    ):
        kept, drawn = min(p, q), rejected * r
        cells = (p, q, min(1.0, p / q), kept, r, drawn, kept + drawn)
        rows.append((chr(token), *(f"{cell:.3g}" for cell in cells)))
    header = (
        *("token", "target p", "draft q", "accepted with"),
        *("accepted", "residual", "sampled", "sum"),
    )
    return table(header, rows)


def one_token(
    target: Sequence[float], draft: Sequence[float], from_residual: bool = True
) -> list[float]:
    """The exact distribution of the resulting token.

    A draft token x is proposed with q(x) and accepted with min(1, p(x) / q(x)): together
    min(p(x), q(x)). Otherwise a token is sampled: from the residual, or, as is often said, from the
    target.
    """
    rejected = 1 - acceptance(target, draft)
    rest = residual(target, draft) if from_residual and rejected > 0 else target
    pairs = zip(target, draft, rest, strict=True)
    return [min(p, q) + rejected * r for p, q, r in pairs]


def reused_noise(target: Sequence[float], draft: Sequence[float], num_draws: int) -> list[float]:
    """Shares of tokens in so many samples of a rule that mixes the two ways, at a fixed seed.

    A draft token is sampled by an exponential race and accepted with min(1, p / q); otherwise the
    residual is sampled with **the same** noise.
    """
    rng = np.random.default_rng(0)
    p, q = np.array(target), np.array(draft)
    rest = np.array(residual(target, draft))
    noise = rng.exponential(size=(num_draws, len(p)))
    drafted = (noise / q).argmin(axis=1)
    with np.errstate(divide="ignore"):
        drawn = (noise / rest).argmin(axis=1)
    kept = rng.random(num_draws) < p[drafted] / q[drafted]
    counts = np.bincount(np.where(kept, drafted, drawn), minlength=len(p))
    return (counts / num_draws).tolist()


def same_noise(target: Sequence[float], draft: Sequence[float]) -> float:
    """How often two races with the same exponential noise have the same winner (exact).

    Token i wins both if every other noise E_j exceeds E_i times the larger of p_j / p_i and
    q_j / q_i. Integrated over E_i that is one over the sum of these factors, i's own 1 included.
    """
    pairs = list(zip(target, draft, strict=True))
    return math.fsum(
        1 / math.fsum(max(other_p / p, other_q / q) for other_p, other_q in pairs)
        for p, q in pairs
        if p > 0 and q > 0
    )


def other_noise(target: Sequence[float], draft: Sequence[float]) -> float:
    """How often two independent samples agree."""
    return math.fsum(p * q for p, q in zip(target, draft, strict=True))


def distance(target: Sequence[float], draft: Sequence[float]) -> float:
    """Total variation distance: half of the sum of the absolute differences."""
    return 1 - acceptance(target, draft)


def promised(target: Sequence[float], draft: Sequence[float]) -> float:
    """Lower bound of how often samples with the same noise agree (Daliri, Musco, Suresh 2024)."""
    tv = distance(target, draft)
    return (1 - tv) / (1 + tv)


EXAMPLES = {
    "0.5, 0.5 and 0.8, 0.2": ([0.5, 0.5], [0.8, 0.2]),
    "0.5, 0.3, 0.2 and 0.2, 0.2, 0.6": ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]),
    "eight tokens, a similar draft": (
        [0.6, 0.2, 0.1, 0.05, 0.02, 0.01, 0.01, 0.01],
        [0.55, 0.25, 0.08, 0.06, 0.02, 0.02, 0.01, 0.01],
    ),
    "the same, a flat draft": ([0.6, 0.2, 0.1, 0.05, 0.02, 0.01, 0.01, 0.01], [1 / 8] * 8),
}


def acceptance_table() -> str:
    """How often a draft token is accepted, for each pair of `EXAMPLES`, by each way to verify."""
    functions = (distance, acceptance, same_noise, promised, other_noise)
    rows = [
        (name, *(f"{function(target, draft):.3f}" for function in functions))
        for name, (target, draft) in EXAMPLES.items()
    ]
    header = ("target and draft", "distance", "rejection", "same noise", "at least", "other noise")
    return table(header, rows)


def accepted(rate: float, drafts: int) -> float:
    """Accepted draft tokens of a step, if each is accepted with `rate` when those before it are."""
    return tokens_per_step(rate, drafts) - 1


def tokens_per_step(rate: float, drafts: int) -> float:
    """`accepted`, and the token after them or in the place of the first rejected one."""
    if rate == 1:
        return drafts + 1
    return (1 - rate ** (drafts + 1)) / (1 - rate)


def speedup(rate: float, drafts: int, draft_cost: float, check_cost: float = 1.0) -> float:
    """Speed relative to plain decoding. Costs are in plain steps: a draft token, verification."""
    return tokens_per_step(rate, drafts) / (check_cost + drafts * draft_cost)


def best_number(rate: float, draft_cost: float, most: int = 32) -> int:
    """Number of draft tokens with the largest speed-up; 0 if none pays."""
    return max(range(most + 1), key=lambda drafts: speedup(rate, drafts, draft_cost))


def drafts_table(rate: float, draft_cost: float, drafts: Sequence[int]) -> str:
    rows = [
        (
            k,
            f"{accepted(rate, k):.2f}",
            f"{tokens_per_step(rate, k):.2f}",
            f"{speedup(rate, k, draft_cost):.2f}",
        )
        for k in drafts
    ]
    return table(("draft tokens", "accepted", "tokens per step", "times as fast"), rows)


def batch_table(rate: float, drafts: int, sequences: Sequence[int]) -> str:
    """Gain of draft tokens that cost nothing to propose on that H100, by number of sequences."""
    rows = []
    for count in sequences:
        check = step_ms(count * (1 + drafts)) / step_ms(count)
        rows.append((count, f"{check:.2f}", f"{speedup(rate, drafts, 0.0, check):.2f}"))
    return table(("sequences", "verification, in plain steps", "times as fast"), rows)


def chosen_drafts(runs: Sequence[int], sequences: Sequence[int], most: int) -> str:
    """What the engine's own `Goodput` chooses if steps take `step_ms` and `run` draft tokens are
    accepted for each one that is rejected."""
    names = [f"{run} of {run + 1} accepted" for run in runs]
    rows = [(count, *(_chosen(run, count, most) for run in runs)) for count in sequences]
    return table(("sequences", *names), rows)


def _chosen(run: int, count: int, most: int) -> str:
    from nanoserve.features.speculative.goodput import Goodput

    goodput = Goodput(most)
    for drafts in [0] * 4 + [k for k in range(1, most + 1) for _ in range(5)] + [0] * 20:
        num_accepted = round(count * accepted(run / (run + 1), drafts))
        seconds = step_ms(count * (1 + drafts)) / 1000
        goodput.record_step(count, count * drafts, num_accepted, seconds)
    record = goodput.new_record()
    for _ in range(60):
        goodput.record_accepted(record, run + 1, run)
    return f"{sum(goodput.choose(count, [(record, most)] * count)) / count:g}"


def rewind_table(drafts: Sequence[int], came: Sequence[int], known: int) -> str:
    """One step of the engine's scheduler: `drafts` after `known` tokens; the step yields `came`."""
    from nanoserve.config import EngineConfig
    from nanoserve.engine.draft_room import add_draft_tokens
    from nanoserve.engine.extension import Extension
    from nanoserve.engine.plan import Plan
    from nanoserve.engine.scheduler import Scheduler
    from nanoserve.engine.sequence import Sequence as Seq
    from nanoserve.sampling_params import SamplingParams

    class FixedDrafts(Extension):
        def extend_plan(self, plan: Plan) -> None:
            if plan.only_decodes:
                add_draft_tokens(scheduler, plan, 0, list(drafts))

    config = EngineConfig("none").for_device("cpu")
    scheduler = Scheduler(config, num_kv_blocks=8, max_model_len=128, extensions=[FixedDrafts()])
    seq = Seq("one", [1] * (known - 1), SamplingParams(max_tokens=None), 128)
    scheduler.add(seq)
    rows: list[tuple[object, ...]] = []

    def note(when: str) -> None:
        rows.append((when, len(seq.token_ids), seq.num_pending, seq.num_computed_tokens))

    plan = scheduler.schedule()
    scheduler.commit(plan)
    scheduler.update(plan, [[came[0]]])
    note("before the step")
    plan = scheduler.schedule()
    note(f"planned: {plan.rows[0].n} tokens from {plan.rows[0].start} on")
    scheduler.commit(plan)
    note("launched")
    scheduler.update(plan, [list(came)])
    note(f"its {len(came)} tokens are appended")
    return table(("moment", "known tokens", "pending", "`num_computed_tokens`"), rows)


def looked_up(words: str, most: int) -> str:
    """What the engine's `NgramProposer` proposes after a text of words."""
    from nanoserve.features.speculative.ngram import NgramProposer

    return _proposed(NgramProposer(3, 4), [], words, most)


def voted(finished: Sequence[str], words: str, most: int) -> str:
    """What the engine's `SuffixProposer` proposes if these requests have finished before."""
    from nanoserve.features.speculative.config import SpeculativeConfig
    from nanoserve.features.speculative.suffix import SuffixProposer

    config = SpeculativeConfig("suffix", suffix_decoding_min_token_prob=0.4)
    return _proposed(SuffixProposer(config), finished, words, most)


def _proposed(proposer: object, finished: Sequence[str], words: str, most: int) -> str:
    from nanoserve.engine.sequence import Sequence as Seq
    from nanoserve.sampling_params import SamplingParams

    known: dict[str, int] = {}

    def ids(text: str) -> list[int]:
        return [known.setdefault(word, len(known)) for word in text.split()]

    for text in finished:
        seq = Seq("before", [], SamplingParams(), 1000)
        seq.token_ids += ids(text)
        proposer.forget(seq)
    seq = Seq("now", ids(words), SamplingParams(), 1000)
    ((drafts),) = proposer.propose([(seq, most)])
    names = {token_id: word for word, token_id in known.items()}
    return " ".join(names[token_id] for token_id in drafts)


def share(part: float, whole: float) -> float:
    """Per cent of a measured number, such as accepted draft tokens of all."""
    return 100 * part / whole
