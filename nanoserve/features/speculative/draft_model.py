"""Propose draft tokens with a smaller model (Leviathan et al. 2023; Chen et al. 2023).

The draft model samples with the noise of the token's position, as the target will. So both choose
the same token where their distributions p and q are close: with probability at least
(1 - TV) / (1 + TV), where TV is half of the sum of |p - q| (Daliri, Musco, Suresh 2024).

The proposer is a second runner on rank 0's device, with a separate KV cache but **the target's
block tables**: the K and V of a token lie at the same place in both caches. So it needs no block
pool, and nothing is allocated, freed or preempted twice. Tokens that it has not computed yet (a
prompt, or tokens that were generated without its drafts) are computed with its next proposal.
Blocks of the prefix cache are shared as in the target, as far as the draft model has filled them.

As in async scheduling, a draft token becomes the next input of the draft model on the device, so
the drafts of one proposal are computed without waiting for the host.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.engine.executor import (
    Executor,
    ForwardInputs,
    SampleInputs,
    SecondModelMemory,
    SlotUpdate,
)
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.proposer import PreparedProposer, count_accepted
from nanoserve.models.layers.context import ParallelContext
from nanoserve.models.registry import supported_architectures
from nanoserve.sampling_params import SamplingParams
from nanoserve.utils.checks import require
from nanoserve.utils.parameter_table import names_of
from nanoserve.worker.build_executor import make_context, make_runner
from nanoserve.worker.load_model import second_model_memory

if TYPE_CHECKING:
    from nanoserve.worker.model_runner import ModelRunner


def prepare_draft_model(config: EngineConfig, target: ModelConfig) -> PreparedProposer:
    """Return the proposer of method "draft_model".

    Raises `ValueError` if the draft model cannot be read, or has another vocabulary size.
    """
    options, kernels = config.speculative_config, KernelConfig.of(config.kernel_config)
    own = replace(
        config,
        model=options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        quantization_group_size=None,
        quantization_activations=None,
        kv_cache_dtype="auto",
        kernel_config=replace(kernels, fused_quantization=False),  # its activations may be floats
        speculative_config=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        distributed_executor_backend=None,
        async_scheduling=True,  # a draft token is an input before it has been copied to the host
        trace=None,
        capture_sampling=False,
        capture_mixed_steps=False,
        disable_hybrid_kv_cache_manager=True,  # it uses the blocks of the target's first group
        enable_return_routed_experts=False,
        enable_lora=False,  # the draft model has no adapters
        max_loras=1,
        max_lora_rank=16,
        max_cpu_loras=None,
    )
    checkpoint = Checkpoint.open(options.model, own, options.revision)
    draft = checkpoint.model_config(own, supported_architectures())
    require(
        draft.vocab_size == target.vocab_size,
        f"the draft model {options.model} has a vocabulary of {draft.vocab_size} tokens, but the "
        f"model has {target.vocab_size}; use a draft model with the same vocabulary",
    )
    require(
        not draft.recurrent_layers,
        f"the draft model {options.model} has recurrent states, which cannot be set back when "
        f"draft tokens are rejected; use a draft model without them, or method 'ngram'",
    )
    if own.load_format != "dummy":
        checkpoint.fetch_weights()
    model = DraftModel(own, draft, checkpoint.folder)
    return PreparedProposer(model.make_proposer, model.memory)


@dataclass(frozen=True)
class DraftModel:
    """A draft model that has been checked, but not loaded."""

    config: EngineConfig
    model_config: ModelConfig
    path: Path

    def make_proposer(self, executor: Executor, scheduler: Scheduler) -> "DraftModelProposer":
        """Load the model and return its proposer. The target's block pool exists by now."""
        longest = min(executor.max_model_len, self.model_config.max_position_embeddings)
        sized = replace(
            self.config,
            num_kv_blocks=executor.num_kv_blocks,
            kv_cache_memory_bytes=None,
            max_model_len=longest,
        )
        runner = make_runner(sized, self.model_config, self.path, ParallelContext())
        return DraftModelProposer(runner, scheduler)

    def memory(self) -> SecondModelMemory:
        """Return the bytes of the draft model's weights, and of a block of its KV cache."""
        context, _ = make_context(self.config, self.model_config, ParallelContext())
        return second_model_memory(self.config, self.model_config, context)


class DraftModelProposer:
    """A proposer that runs a draft model."""

    is_model, needs_hidden = True, False

    def __init__(self, runner: "ModelRunner", scheduler: Scheduler) -> None:
        self._runner, self._pool = runner, scheduler.block_manager
        self._block_tables = scheduler.block_tables
        self._budget = runner.layout.max_num_tokens
        # By sequence: how many of its tokens have K and V in the draft model's cache, and the draft
        # tokens after them whose K and V are there too.
        self._computed: dict[Sequence, tuple[int, list[int]]] = {}
        self._in_slot: dict[int, Sequence] = {}
        # By block that the draft model has filled: the number of its entry in the prefix cache. If
        # the block is evicted and cached again, it has another number.
        self._filled: dict[int, int] = {}

    def begin(self, seq: Sequence) -> None:
        num_blocks = 0
        while num_blocks < seq.num_cached_blocks and self._has(seq.block_table[num_blocks]):
            num_blocks += 1
        self._computed[seq] = (num_blocks * self._pool.block_size, [])

    def learn(self, seq: Sequence, hidden: Any, row: int) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        self._computed.pop(seq, None)

    def close(self) -> None:
        self._runner.close()

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        longest = self._runner.max_model_len
        counts = {seq: min(most, longest - len(seq.token_ids)) for seq, most in wanted}
        counts = {seq: count for seq, count in counts.items() if count > 0}
        drafts: dict[Sequence, list[int]] = {seq: [] for seq in counts}
        # One pass computes the missing tokens and drafts the first one; each further draft token
        # takes another pass.
        handles = [self._run(self._catch_up(list(counts)))] if counts else []
        for number in range(1, max(counts.values(), default=0)):
            rows = [
                Row(seq, len(seq.token_ids) + number - 1, 1, 1, 1)
                for seq, count in counts.items()
                if count > number
            ]
            handles.append(self._run(rows))
        for rows, handle in handles:
            result = self._runner.collect(handle)
            for row, new_ids in zip(rows, result.token_ids, strict=True):
                drafts[row.seq] += new_ids
        for seq, own in drafts.items():
            # The last draft token was not an input, so it has no K and V.
            self._computed[seq] = (len(seq.token_ids), own[:-1])
            self._note_filled(seq)
        return [drafts.get(seq, []) for seq, _ in wanted]

    def _catch_up(self, sequences: list[Sequence]) -> list[Row]:
        """Compute missing tokens until the rest fits one pass; return the rows of that pass."""
        starts = {seq: self._num_valid(seq) for seq in sequences}
        while sum(len(seq.token_ids) - start for seq, start in starts.items()) > self._budget:
            rows, left = [], self._budget
            for seq, start in starts.items():
                n = min(left, len(seq.token_ids) - 1 - start)
                if n:
                    rows.append(Row(seq, start, n, 0, 0))
                    starts[seq] += n
                    left -= n
            self._run(rows)
        return [Row(seq, start, len(seq.token_ids) - start, 1, 1) for seq, start in starts.items()]

    def _num_valid(self, seq: Sequence) -> int:
        """Return how many tokens of `seq` have valid K and V in the draft model's cache.

        These are the tokens known at the last proposal, and accepted draft tokens. The last token
        never counts, because computing it gives the logits of the first draft token.
        """
        num_known, drafts = self._computed.get(seq, (0, []))
        num_accepted = count_accepted(drafts, seq.token_ids[num_known:])
        return min(num_known + num_accepted, len(seq.token_ids) - 1)

    def _run(self, rows: list[Row]) -> tuple[list[Row], Any]:
        plan = Plan(budget=0, rows=list(rows))
        plan.put_single_tokens_first()
        batch = self._runner.next_batch()
        batch.pack(plan, self._block_tables, self._pool.block_size)
        handle = self._runner.forward(batch, ForwardInputs(self._changes(plan)))
        self._runner.sample(handle, SampleInputs())
        return plan.sampled, handle

    def _changes(self, plan: Plan) -> list[SlotUpdate]:
        changes = []
        for row in plan.rows:
            seq = row.seq
            if self._in_slot.get(seq.slot) is not seq:
                self._in_slot[seq.slot] = seq
                change = SlotUpdate.of(seq)
                changes.append(replace(change, params=_simplified(seq.params)))
        return changes

    def _has(self, block: int) -> bool:
        number = self._pool.prefix_cache.number_of(block)
        return number != 0 and self._filled.get(block) == number

    def _note_filled(self, seq: Sequence) -> None:
        """Record the cached blocks of `seq` that the draft model has filled, from the last back."""
        computed = self._num_valid(seq) // self._pool.block_size
        for block in reversed(seq.block_table[: min(computed, seq.num_cached_blocks)]):
            if self._has(block):
                break
            self._filled[block] = self._pool.prefix_cache.number_of(block)


def _simplified(params: SamplingParams) -> SamplingParams:
    """Return parameters with only the temperature and filters.

    Penalties and whatever else depends on earlier tokens are applied by the target only.
    """
    kept = names_of("temperature", "filter")
    return SamplingParams(**{name: getattr(params, name) for name in kept})
