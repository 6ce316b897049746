"""Which of several engines gets a request: who has its prefix, unless too much waits there.

Replicas do not share a KV cache, so where a request goes decides how much of its prompt is computed
again. Two simple rules fail in opposite ways. The least loaded one forgets what is cached; the one
with the longest match makes the owner of a popular prefix slower and slower, while others idle.
Here both count, in one score for this request and each replica:

    score = matched tokens / prompt tokens * favour - beta * load / (prompt tokens + typical work)

The highest wins; of equal ones the least loaded, and of those any. With nothing shared that is the
least loaded one, whatever beta is.

Load is what waits now, in tokens. It jumps by a whole prompt with each request, so it is set
against this prompt and what a few requests leave to compute, lately and on average: else it tears
conversations apart whenever another one is at work beside them. And it is small where the fleet
keeps up, so it does not spread a popular prefix by itself. Therefore there is a second, slow
signal. Of what the last requests left to compute, a hundred for each replica, every replica has its
share. Its *favour* is 1 up to the mean share, and falls with what is beyond it, to 0 at
1 + 1 / gamma times the mean. So whoever has a popular prefix alone loses requests to others, who
from then on have it, too.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field

from nanoserve.engine.prefix_cache import PrefixCache
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams
from nanoserve.serve.replicas.load import WorkShares
from nanoserve.utils.checks import check_int, check_number, require

DEFAULT_BETA = 1.0
DEFAULT_GAMMA = 5.0
_FEW = 6  # requests, whose work is the typical work
_NO_PARAMS = SamplingParams()


@dataclass
class Known:
    """What a replica is thought to have."""

    bit: int  # that stands for it in the sets of replicas
    num_kv_blocks: int
    # Least recently used first: what was sent. Or, in any order, what the replica itself has told.
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    is_exact: bool = False


class PrefixRouter:
    """Knows by their chain hashes which blocks each replica has, and chooses.

    All replicas must have `prefix_cache_seed` and `block_size` as their engines' options: then the
    hashes here are those of the engines. There are two ways to know. *Approximate*: `sent` notes
    where each prompt went, in a list that forgets the least recently used beyond the replica's
    pool. *Exact*: `update` is told what the replica has published and evicted, see
    `nanoserve.serve.replicas.block_events`; from its first call on, `sent` has nothing to add.

    Not for several threads at once.
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
        # By hash, the sum of the bits of those that have the block: a walk down a chain is then one
        # `&` a block, for all replicas together.
        self._holders: dict[bytes, int] = {}

    def hashes(self, token_ids: list[int], cache_key: tuple[str, ...] = ()) -> list[bytes]:
        """Of the full blocks of a prompt, as the engines have them; a hit leaves its last token.

        `cache_key` is that of the sequence, see `InputProcessor`.
        """
        num_blocks = max(len(token_ids) - 1, 0) // self.block_size
        seq = Sequence("", token_ids, _NO_PARAMS, len(token_ids), cache_key=cache_key)
        self._hasher.hash_blocks(seq, num_blocks)
        return seq.block_hashes

    @property
    def replicas(self) -> list[str]:
        return list(self._known)

    def add_replica(self, replica: str, num_kv_blocks: int) -> None:
        """`num_kv_blocks` is the size of its pool. It has nothing yet."""
        require(replica not in self._known, f"{replica=} is known already: remove it first")
        num_kv_blocks = check_int("num_kv_blocks", num_kv_blocks, 1)
        taken = sum(known.bit for known in self._known.values())
        self._known[replica] = Known(~taken & (taken + 1), num_kv_blocks)  # the lowest free bit
        self._shares.add(replica)

    def remove_replica(self, replica: str) -> None:
        self._forget_all(self._known_of(replica))
        self._shares.remove(replica)
        del self._known[replica]

    def matches(self, hashes: AbstractSequence[bytes], replicas: Iterable[str]) -> dict[str, int]:
        """How many tokens of a prompt each of `replicas` is thought to have. One walk for all."""
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
        """One of the keys of `loads`, which says in tokens how much work waits at each replica.

        That is: tokens of prompts that are not computed yet, and what its running sequences will
        still generate, as far as that is known.
        """
        require(bool(loads), "there is no replica to choose from: add one, or wait for one")
        num_prompt_tokens = check_int("num_prompt_tokens", num_prompt_tokens, 1)
        matched = self.matches(hashes, loads)
        scale = num_prompt_tokens + _FEW * self._shares.work_of_a_request
        excess = self._shares.excess(loads)
        best: list[str] = []
        best_rank = (-float("inf"), 0.0)
        for replica, load in loads.items():
            if not load >= 0:
                raise ValueError(f"load={load!r} of {replica=} must be a number of tokens, >= 0")
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
        """A prompt has gone to `replica`, which will have its blocks for a while."""
        known = self._known_of(replica)
        if known.is_exact:
            return
        # Last first, as an engine frees them, so that a chain is forgotten from its tail.
        for block_hash in reversed(hashes):
            self._add(known, block_hash)
            known.blocks.move_to_end(block_hash)
        while len(known.blocks) > known.num_kv_blocks:
            self._discard(known, next(iter(known.blocks)))

    def update(self, replica: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """`replica` has published and evicted these blocks since the last time; none is in both."""
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
            raise ValueError(f"{replica=} is none of {self.replicas}: call add_replica first")
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
        """Those of `gone` have so many blocks of the chain."""
        while gone:
            bit = gone & -gone
            matched[bits[bit]] = depth * self.block_size
            gone ^= bit
