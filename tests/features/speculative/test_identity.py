"""With any proposer's draft tokens each request gets what it gets alone and without them."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from model_fuzz import VOCAB_SIZE, Difference, ModelRun, reference_engine
from proposers import Mixed, Oracle, Wrong, speculation_of
from tiny_checkpoints import TINY_QWEN3, make_qwen3

from nanoserve import LLM
from nanoserve.features.speculative.config import SpeculativeConfig
from nanoserve.features.speculative.hidden_head import HiddenHead
from nanoserve.features.speculative.suffix import SuffixProposer

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafted")
    make_qwen3(path, vocab_size=VOCAB_SIZE)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("another")
    make_qwen3(path, vocab_size=VOCAB_SIZE, seed=1, num_hidden_layers=1)
    HiddenHead.untrained(TINY_QWEN3["hidden_size"], 32).save(path / "head.safetensors")
    return path


@pytest.fixture(scope="module")
def reference(path: Path) -> Iterator[LLM]:
    with reference_engine(path) as llm:
        yield llm


def drafting_run(seed: int, path: Path, other: Path, reference: LLM) -> ModelRun:
    """`other` is another model, whose draft tokens are rejected."""
    rng = random.Random(f"guesses of {seed}")
    draft = {"method": "draft_model", "model": str(rng.choice([path, other])), "dtype": "float32"}
    head = {"method": "hidden_head", "model": str(other / "head.safetensors")}
    options = rng.choice([NGRAM, SUFFIX, draft, head]) | {
        "num_speculative_tokens": rng.choice([1, 2, 4, 8, 20]),
        "adaptive": rng.random() < 0.2,
    }
    run = ModelRun(seed, path, reference, speculative_config=options)
    speculation = speculation_of(run.llm)
    oracle, wrong = Oracle(reference), Wrong(VOCAB_SIZE)
    others = [speculation.proposer, SuffixProposer(SpeculativeConfig(**SUFFIX)), oracle]
    mixed = Mixed(rng, VOCAB_SIZE, others)
    if not speculation.proposer.is_model:
        speculation.proposer = rng.choice(
            [speculation.proposer, oracle, wrong, mixed, mixed, mixed]
        )
    return run


def test_every_request_gets_what_it_gets_without_draft_tokens(
    path: Path,
    other: Path,
    reference: LLM,
    by_size: Callable[..., range],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, logger="nanoserve")  # requests are made to fail
    counts: Counter[str] = Counter()
    for seed in by_size(range(3, 8), range(50), range(300)):
        try:
            run = drafting_run(seed, path, other, reference)
            run.run()
        except (Difference, RuntimeError) as error:
            pytest.fail(f"seed {seed}, {run.options}: {error!r}")
        counts += run.counts
        stats = run.llm.stats
        counts["draft tokens"] += stats.num_draft_tokens
        counts["accepted ones"] += stats.num_accepted_tokens
    print(dict(counts))
    # The runs must be hard enough to mean something.
    wanted = ["requests", "aborts", "aborts inside a step", "preemptions", "hit tokens", "streams"]
    assert all(counts[name] for name in [*wanted, "draft tokens", "accepted ones"]), counts
