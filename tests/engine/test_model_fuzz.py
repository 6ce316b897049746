"""Whole engines with a model, under everything at once: each request gets what it gets alone."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from model_fuzz import VOCAB_SIZE, Difference, ModelRun, reference_engine
from tiny_checkpoints import make_qwen3

from nanoserve import LLM
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.sequence import Sequence


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzzed")
    make_qwen3(path, vocab_size=VOCAB_SIZE)
    return path


@pytest.fixture(scope="module")
def reference(path: Path) -> Iterator[LLM]:
    with reference_engine(path) as llm:
        yield llm


def test_every_request_gets_what_it_gets_alone(
    path: Path, reference: LLM, by_size: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="nanoserve")  # requests are made to fail
    counts: Counter[str] = Counter()
    for seed in range(by_size(4, 25, 400)):
        try:
            run = ModelRun(seed, path, reference)
            run.run()
        except (Difference, RuntimeError) as error:
            pytest.fail(f"seed {seed}, {run.options}: {error!r}")
        counts += run.counts
    print(dict(counts))
    # The runs must be hard enough to mean something.
    wanted = ["requests", "aborts", "aborts inside a step", "preemptions", "hit tokens", "streams"]
    assert all(counts[name] for name in wanted), counts


def test_blocks_that_are_published_before_they_are_computed_are_seen(
    path: Path, reference: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: the rest of a prompt's chunks counts as computed with the first."""
    cache = BlockManager.cache

    def cache_all(self: BlockManager, seq: Sequence, num_tokens: int) -> list[int]:
        return cache(self, seq, len(seq.token_ids))

    monkeypatch.setattr(BlockManager, "cache", cache_all)
    with pytest.raises(Difference, match="alone"):
        for seed in range(7, 40):
            ModelRun(seed, path, reference).run()
