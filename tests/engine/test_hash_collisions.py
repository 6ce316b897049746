"""Blocks that share a hash: found by birthday search and by attack, and never mistaken."""

import random
from collections import Counter
from pathlib import Path

import pytest
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.engine import prefix_cache
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.prefix_cache import PrefixCache
from nanoserve.engine.sequence import Sequence

# As in test_block_manager.py, of a vocabulary that a test's model has: one hash behind any parent.
COLLIDING = (
    [0, 0, 0, 0, 5, 6, 7, 8, 33, 868, 2014, 1179, 1207, 1281, 840, 766],
    [0, 0, 0, 0, 5, 6, 7, 8, 498, 1144, 1549, 903, 1313, 334, 734, 1713],
)


def believe_every_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_is_at", lambda *args: True)


class BirthdaySearch:
    """Thousands of random blocks, behind each other and side by side, under hashes of 16 bits."""

    def __init__(self, block_size: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(block_size)
        self.manager = BlockManager(num_blocks, block_size, prefix_cache_seed=block_size)
        self.prefix_in: dict[int, tuple[int, ...]] = {}  # by block: what its K and V stand for
        self.of_hash: dict[bytes, set[tuple[int, ...]]] = {}
        self.counts: Counter[str] = Counter()
        original = prefix_cache.chain_hash
        monkeypatch.setattr(
            prefix_cache, "chain_hash", lambda parent, ids: original(parent, ids)[:2]
        )

    def run(self, num_prompts: int) -> None:
        size, prompts = self.manager.block_size, [[]]
        for _ in range(num_prompts):
            # Half of them go on behind an earlier prompt, or repeat it.
            prompt = list(self.rng.choice(prompts))[: size * self.rng.randint(0, 4)]
            prompt += [
                self.rng.randrange(150_000) for _ in range(size * self.rng.randint(0, 2) + 1)
            ]
            self._compute(prompt)
            prompts.append(prompt[:-1])

    def _compute(self, token_ids: list[int]) -> None:
        manager, size = self.manager, self.manager.block_size
        seq = Sequence("r", token_ids, SamplingParams(), max_model_len=100_000)
        hits = manager.lookup(seq)
        assert manager.allocate(seq, seq.num_tokens, hits)
        for index, block in enumerate(seq.block_table):
            prefix = tuple(token_ids[: (index + 1) * size])
            if index < len(hits):
                self.counts["hits"] += 1
                self.counts["wrong hits"] += self.prefix_in[block] != prefix
            else:
                self.prefix_in[block] = prefix
        manager.cache(seq, seq.num_tokens)
        for index, block_hash in enumerate(seq.block_hashes):
            same = self.of_hash.setdefault(block_hash, set())
            same.add(tuple(token_ids[: (index + 1) * size]))
            self.counts["collisions"] += len(same) > 1
        manager.free(seq)


@pytest.mark.small(block_size=[16])
@pytest.mark.parametrize("num_blocks", [200, 20_000], ids=["a small pool", "room for all"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_no_collision_is_a_hit(block_size: int, num_blocks: int, monkeypatch) -> None:
    search = BirthdaySearch(block_size, num_blocks, monkeypatch)
    search.run(3000)
    search.manager.check([])
    assert search.counts["collisions"] > 50 and search.counts["hits"] > 100
    assert search.counts["wrong hits"] == 0


def test_the_search_sees_a_hit_that_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    believe_every_hash(monkeypatch)
    search = BirthdaySearch(16, 20_000, monkeypatch)
    search.run(3000)
    assert search.counts["wrong hits"] > 50


# ---------------------------------------------------------------- the attack, with a model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("attacked")
    make_qwen3(path, vocab_size=2048)
    return path


def ask(path: Path, *middles: list[int], **options) -> list[tuple[list[int], int]]:
    """One prompt after the other: what comes, and how many tokens were cached."""
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(path, skip_tokenizer_init=True, num_kv_blocks=64, **options) as llm:
        outputs = [
            llm.generate([[*range(100, 148), *middle, 9, 10, 11]], params, use_tqdm=False)[0]
            for middle in middles
        ]
    return [(o.outputs[0].token_ids, o.metrics.num_cached_prompt_tokens) for o in outputs]


def test_a_prompt_behind_one_that_collides_gets_its_own_continuation(path: Path) -> None:
    one, other = COLLIDING
    (alone, _), (of_one, _) = ask(path, other, one, enable_prefix_caching=False)
    assert alone != of_one
    assert ask(path, one, other, one) == [(of_one, 0), (alone, 48), (of_one, 64)]


def test_without_the_proof_it_gets_a_continuation_of_the_other(path: Path, monkeypatch) -> None:
    one, other = COLLIDING
    ((of_one, _),) = ask(path, one, enable_prefix_caching=False)
    believe_every_hash(monkeypatch)
    assert ask(path, one, other)[1] == (of_one, 64)
