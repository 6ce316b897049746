"""CUDA graphs for steps whose sampling runs in a graph, too (`capture_sampling=True`).

A second graph is replayed after the graph of the model: LM head, sampler, and the store of the
tokens as inputs of the next step. A decode step then takes three copies and two replays, instead of
sixteen launches and a replay.

It covers steps in which each row samples from unmodified logits: greedy or at random, but without
filter, penalty, grammar or log-probabilities. All other steps are sampled kernel by kernel after
the same first graph, so they do not pay for sampling that is not used.
"""

from typing import TYPE_CHECKING, cast

import torch

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.worker.cpu_device import Computation, StepOutput
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.cuda_graphs import SizedGraphs
from nanoserve.worker.graph_programs import RowsProgram

if TYPE_CHECKING:
    from nanoserve.sampling.fused_sampler import FusedSampler


class SamplingProgram:
    """The steps of another program that can be sampled in a graph after it.

    keeps: True if tokens are kept as inputs of the next step (async scheduling).
    """

    def __init__(
        self,
        cuda: Cuda,
        buffers: CudaBuffers,
        computation: Computation,
        rows: RowsProgram,
        keeps: bool,
    ) -> None:
        self.choices = SizedGraphs(rows.graphs.sizes)  # token ids, int64 [size * query_len]
        self._cuda, self._buffers, self._computation = cuda, buffers, computation
        self._sampler = cast("FusedSampler", computation.sampler)  # the GPU's
        self._rows, self._keeps = rows, keeps
        self._padding_slot = len(computation.last_token) - 1

    def covers(self, batch: Batch, header: BatchHeader) -> bool:
        if not self._rows.covers(batch, header):
            return False
        # Some hidden states may be for a head, or a row may be a chunk that ends inside its prompt.
        if not 0 < header.num_outputs == header.num_sampled:
            return False
        if self._rows.query_len == 1 and header.num_sampled < header.num_rows:
            return False
        return self._sampler.can_capture(batch.row_slots[: header.num_rows])

    def capture(self, *, shows_progress: bool) -> None:
        self.choices.capture(self._cuda, self.launch, shows_progress=False)

    def launch(self, num_rows: int) -> torch.Tensor:
        """Launch what a graph captures: sampling after the model's graph of `num_rows` rows."""
        tensors, computation, length = (
            self._buffers.tensors,
            self._computation,
            self._rows.query_len,
        )
        hidden = self._rows.graphs.outputs[num_rows]
        positions, slots = tensors.positions[: num_rows * length], tensors.row_slots[:num_rows]
        if length > 1:  # otherwise each row has one token, and output i is row i
            places = tensors.output_rows[: num_rows * length]
            hidden, positions, slots = hidden[places], positions[places], slots[places // length]
        logits = computation.model.compute_logits(hidden)
        token_ids = self._sampler.choose(logits, slots, positions + 1)
        if self._keeps:
            computation.keep(token_ids, tensors.output_slots[: len(token_ids)])
        return token_ids

    def replay(self, batch: Batch, header: BatchHeader) -> StepOutput:
        size, sampled = self._rows.graphs.size_for(header.num_rows), header.num_sampled
        # Padding rows are sampled too. Their tokens are kept in a slot that no sequence has.
        others = slice(sampled, size * self._rows.query_len)
        batch.output_rows[others] = 0
        batch.output_slots[others] = self._padding_slot
        self._sampler.update_settings()
        output = self._rows.replay(batch, header)
        return output._replace(token_ids=self.choices.replay(size)[:sampled])
