"""The host tier keeps evicted KV blocks in the host's memory, where later prompts find them.

    evicted block --to_host--> place --to_device--> block of a sequence that was just admitted

All copies of a step are launched before its model, on the same stream, so nothing has to wait: a
block's K and V were written by an earlier step, and are read by this step or a later one.
"""

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.executor import ForwardInputs
from nanoserve.engine.extension import Extension
from nanoserve.engine.listeners import BlockListener
from nanoserve.engine.plan import Plan
from nanoserve.engine.prefix_cache import Prefix
from nanoserve.engine.sequence import Sequence
from nanoserve.features.kv_transfer.host_places import HostPlaces, TierStats


class HostTier(Extension, BlockListener):
    """Copies evicted blocks to places, and back for the sequences that hit them.

    A prefix cache loses the tail of a chain before its head, so the tail is also the first to be
    evicted here.
    """

    def __init__(self, block_manager: BlockManager, places: HostPlaces) -> None:
        self._manager, self._cache = block_manager, block_manager.prefix_cache
        self._groups = range(len(block_manager.windows))
        self.places = places
        self._chain: list[Prefix] = []  # of the sequence that may be admitted next
        block_manager.listeners.append(self)

    @property
    def stats(self) -> TierStats:
        return self.places.stats

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        """Keep a block that has been evicted, unless another block has the same content."""
        if is_last:
            self.places.copy_out(block, block_hash, group)

    def on_cleared(self) -> None:
        self.places.clear()
        self._chain = []

    def may_admit(self, seq: Sequence, plan: Plan) -> bool:
        """Keep what the sequence will find here: its new blocks evict others, which come here."""
        self._chain = []
        if self.places and not seq.needs_prompt_outputs:
            most = (len(seq.token_ids) - 1) // self._manager.block_size
            self._chain = self._cache.chain(seq, most)
        self.places.want((prefix, group) for prefix in self._chain for group in self._groups)
        return True

    def on_admit(self, seq: Sequence) -> int:
        """Fill the blocks after the pool's hit from the host."""
        size = self._manager.block_size
        # One token at least is computed, in blocks that the sequence has already.
        chain = self._chain[: (seq.num_allocated_tokens - 1) // size]
        first = end = seq.num_computed_tokens // size
        while end < len(chain) and all((chain[end], g) in self.places for g in self._groups):
            end += 1
        # The tail first: it is used less recently than the head.
        for index in reversed(range(first, end)):
            for group, table in enumerate(seq.block_tables):
                self.places.copy_in((chain[index], group), table[index])
        self.places.want(())
        if seq.index == 0 and seq.metrics.num_preemptions == 0:
            self.stats.queries += seq.num_prompt_tokens - seq.num_computed_tokens
            self.stats.hits += (end - first) * size
        return (end - first) * size

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        return within_blocks(seq, num_tokens, plan)

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        """Hand over the copies to the step."""
        inputs.kv_transfers = self.places.take_transfers()


def within_blocks(seq: Sequence, num_tokens: int, plan: Plan) -> int:
    """Return how many of `num_tokens` a sequence that was just admitted has blocks for.

    A group with a window has got blocks for the first tokens after the pool's hit only. After an
    extension has filled these, more of them may be missing, and nothing may be preempted while
    sequences are admitted. For other sequences returns `num_tokens`.
    """
    if plan.admitted and plan.admitted[-1] is seq:
        return min(num_tokens, seq.num_allocated_tokens - seq.num_computed_tokens)
    return num_tokens
