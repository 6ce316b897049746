"""A prefix-aware router, which prefers the replica that has cached the prefix of a request.

It chooses another replica if the load of that replica is too high.

Replicas do not share a KV cache, so the choice of a replica determines how much of a prompt is
computed again. Two simple rules fail in opposite ways: choosing the least loaded replica ignores
the caches, and choosing the longest match overloads the replica with a popular prefix while others
are idle. This router combines both in a score of a request and a replica:

    score = matched tokens / prompt tokens * favour - beta * load / (prompt tokens + typical work)

The highest score wins; among equal scores the lowest load, and then a random choice. Without cache
hits this is the least loaded replica for any beta.

Load is the work that waits now, in tokens. It rises by a whole prompt with each request, so it is
divided by the length of this prompt plus the recent average work of a few requests; otherwise it
would separate conversations from their caches whenever another request runs next to them. It is
also small while the fleet keeps up, so it does not spread a popular prefix by itself. For that
there is a second, slow signal: each replica's share of the work of the last requests, a hundred per
replica. The *favour* is 1 up to the mean share, and falls linearly to 0 at 1 + 1 / gamma times the
mean. A replica that alone has cached a popular prefix therefore loses requests to others, which
then cache the prefix as well.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field

from nanoserve.engine.prefix_cache import PrefixCache
from nanoserve.engine.prompt_embeds import PromptEmbeds
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams
from nanoserve.serve.replicas.load import WorkShares
from nanoserve.utils.checks import check_int, check_number, require

DEFAULT_BETA = 1.0
DEFAULT_GAMMA = 5.0
_FEW = 6  # number of average requests whose work is the "typical work"
_NO_PARAMS = SamplingParams()


@dataclass
class Known:
    """The blocks that a replica is expected to have cached."""

    bit: int  # represents the replica in sets of replicas, which are integers
    num_kv_blocks: int
    # Blocks of the prompts sent there, least recently used first; if exact, the reported blocks.
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    is_exact: bool = False


class PrefixRouter:
    """A router that tracks the cached blocks of each replica by their chain hashes.

    The engines of all replicas must have the same `prefix_cache_seed` and `block_size` as the
    router, so that their hashes are equal. There are two ways of tracking. *Approximate*: `sent`
    records the blocks of each prompt sent to a replica, and drops the least recently used blocks
    beyond the size of its block pool. *Exact*: `update` applies the cache and evict events of the
    replica, see `nanoserve.serve.replicas.block_events`; after its first call, `sent` has no
    effect.

    Not thread-safe.
    """

    def __init__(
        self,
        block_size: int,
        prefix_cache_seed: int,
        beta: float = DEFAULT_BETA,
        rng: random.Random | None = None,
        gamma: float = DEFAULT_GAMMA,
    ) -> None:
        self.block_size = check_int("block_size", block_size, 1)
        self.beta, self.gamma = check_number("beta", beta, 0), check_number("gamma", gamma, 0)
        seed = check_int("prefix_cache_seed", prefix_cache_seed, 0)
        self._rng = random.Random() if rng is None else rng
        self._hasher = PrefixCache(1, block_size, seed=seed)
        self._known: dict[str, Known] = {}
        self._shares = WorkShares()
        # For each hash, the sum of the bits of the replicas that have the block: matching a chain
        # then takes one `&` per block, for all replicas together.
        self._holders: dict[bytes, int] = {}

    def hashes(
        self,
        token_ids: list[int],
        cache_key: tuple[str, ...] = (),
        prompt_embeds: PromptEmbeds | None = None,
    ) -> list[bytes]:
        """Return the hashes of the full blocks of a prompt, equal to the hashes of the engines.

        The last token is omitted, because a hit never includes it. `cache_key` and
        `prompt_embeds` are those of the sequence, see `InputProcessor`.
        """
        num_blocks = max(len(token_ids) - 1, 0) // self.block_size
        seq = Sequence(
            "",
            token_ids,
            _NO_PARAMS,
            len(token_ids),
            cache_key=cache_key,
            prompt_embeds=prompt_embeds,
        )
        self._hasher.hash_blocks(seq, num_blocks)
        return seq.block_hashes

    @property
    def replicas(self) -> list[str]:
        return list(self._known)

    def add_replica(self, replica: str, num_kv_blocks: int) -> None:
        """Add a replica with an empty cache; `num_kv_blocks` is the size of its block pool."""
        require(replica not in self._known, f"{replica=} was already added; remove it first")
        num_kv_blocks = check_int("num_kv_blocks", num_kv_blocks, 1)
        taken = sum(known.bit for known in self._known.values())
        self._known[replica] = Known(~taken & (taken + 1), num_kv_blocks)  # the lowest free bit
        self._shares.add(replica)

    def remove_replica(self, replica: str) -> None:
        self._forget_all(self._known_of(replica))
        self._shares.remove(replica)
        del self._known[replica]

    def matches(self, hashes: AbstractSequence[bytes], replicas: Iterable[str]) -> dict[str, int]:
        """Return the number of prompt tokens that each of `replicas` is expected to have cached.

        The chain is read once for all replicas together.
        """
        bits = {self._known_of(replica).bit: replica for replica in replicas}
        matched, left = dict.fromkeys(bits.values(), 0), sum(bits)
        for index, block_hash in enumerate(hashes):
            still = left & self._holders.get(block_hash, 0)
            if still != left:
                self._note(matched, bits, left & ~still, index)
                left = still
                if not left:
                    return matched
        self._note(matched, bits, left, len(hashes))
        return matched

    def choose(
        self, hashes: AbstractSequence[bytes], num_prompt_tokens: int, loads: Mapping[str, float]
    ) -> str:
        """Return the replica for a prompt, which is one of the keys of `loads`.

        loads: the work that waits at each replica, in tokens: prompt tokens that are not computed
        yet, and the expected further output of its running sequences.
        """
        require(bool(loads), "loads is empty: it must have at least one replica")
        num_prompt_tokens = check_int("num_prompt_tokens", num_prompt_tokens, 1)
        matched = self.matches(hashes, loads)
        scale = num_prompt_tokens + _FEW * self._shares.work_of_a_request
        excess = self._shares.excess(loads)
        best: list[str] = []
        best_rank = (-float("inf"), 0.0)
        for replica, load in loads.items():
            if not load >= 0:
                raise ValueError(f"load={load!r} of {replica=} must be a number of tokens >= 0")
            favour = min(1.0, max(0.0, 1 - self.gamma * excess[replica]))
            score = matched[replica] / num_prompt_tokens * favour - self.beta * load / scale
            rank = (score, -load)
            if rank > best_rank:
                best, best_rank = [replica], rank
            elif rank == best_rank:
                best.append(replica)
        chosen = best[0] if len(best) == 1 else self._rng.choice(best)
        self._shares.note(chosen, num_prompt_tokens - matched[chosen])
        return chosen

    def sent(self, replica: str, hashes: AbstractSequence[bytes]) -> None:
        """Record that a prompt was sent to `replica`, which will cache its blocks."""
        known = self._known_of(replica)
        if known.is_exact:
            return
        # Last block first, the order in which engines free them: chains are dropped from their end.
        for block_hash in reversed(hashes):
            self._add(known, block_hash)
            known.blocks.move_to_end(block_hash)
        while len(known.blocks) > known.num_kv_blocks:
            self._discard(known, next(iter(known.blocks)))

    def update(self, replica: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Apply the blocks that `replica` has cached and evicted since the last call.

        No block may be in both.
        """
        known = self._known_of(replica)
        if not known.is_exact:
            self._forget_all(known)
            known.is_exact = True
        for block_hash in removed:
            self._discard(known, block_hash)
        for block_hash in stored:
            self._add(known, block_hash)

    def _known_of(self, replica: str) -> Known:
        known = self._known.get(replica)
        if known is None:
            raise ValueError(f"{replica=} is not one of {self.replicas}; call add_replica first")
        return known

    def _add(self, known: Known, block_hash: bytes) -> None:
        if block_hash not in known.blocks:
            known.blocks[block_hash] = None
            self._holders[block_hash] = self._holders.get(block_hash, 0) | known.bit

    def _discard(self, known: Known, block_hash: bytes) -> None:
        if block_hash in known.blocks:
            del known.blocks[block_hash]
            self._holders[block_hash] &= ~known.bit
            if not self._holders[block_hash]:
                del self._holders[block_hash]

    def _forget_all(self, known: Known) -> None:
        for block_hash in list(known.blocks):
            self._discard(known, block_hash)

    def _note(self, matched: dict[str, int], bits: dict[int, str], gone: int, depth: int) -> None:
        """Record that the replicas in the set `gone` match the first `depth` blocks of a chain."""
        while gone:
            bit = gone & -gone
            matched[bits[bit]] = depth * self.block_size
            gone ^= bit
