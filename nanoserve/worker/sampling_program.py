"""`capture_sampling=True`: a step whose tokens are chosen in a CUDA graph too.

Behind the graph of the model a second one is replayed: LM head, sampler, and the tokens put where
the next step finds them. A decode step is then three copies and two replays, where it was sixteen
launches and a replay.

Only for steps in which every row takes a token of its logits as they are: greedy or at random, but
without filter, penalty, grammar or log probability. All others go the usual way, behind the same
first graph; so none pays for a choice that is not used.
"""

import torch

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.worker.cpu_device import Computation, StepOutput
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.cuda_graphs import SizedGraphs
from nanoserve.worker.graph_programs import RowsProgram


class SamplingProgram:
    """The steps of another program that can be sampled in a graph behind it.

    keeps: whether tokens are kept for a step ahead.
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
        self._rows, self._keeps = rows, keeps
        self._nobodys_slot = len(computation.last_token) - 1

    def covers(self, batch: Batch, header: BatchHeader) -> bool:
        if not self._rows.covers(batch, header):
            return False
        # A head may want some of the hidden states, or a row be a token in the middle of a prompt.
        if not 0 < header.num_outputs == header.num_sampled:
            return False
        if self._rows.query_len == 1 and header.num_sampled < header.num_rows:
            return False
        return self._computation.sampler.can_capture(batch.row_slots[: header.num_rows])

    def capture(self, *, shows_progress: bool) -> None:
        self.choices.capture(self._cuda, self.launch, shows_progress=False)

    def launch(self, num_rows: int) -> torch.Tensor:
        """Launch what a graph records: the choice behind the graph of so many rows."""
        tensors, computation, length = (
            self._buffers.tensors,
            self._computation,
            self._rows.query_len,
        )
        hidden = self._rows.graphs.outputs[num_rows]
        positions, slots = tensors.positions[: num_rows * length], tensors.row_slots[:num_rows]
        if length > 1:  # or else each row has one token, and its output is the row's
            places = tensors.output_rows[: num_rows * length]
            hidden, positions, slots = hidden[places], positions[places], slots[places // length]
        logits = computation.model.compute_logits(hidden)
        token_ids = computation.sampler.choose(logits, slots, positions + 1)
        if self._keeps:
            computation.keep(token_ids, tensors.output_slots[: len(token_ids)])
        return token_ids

    def replay(self, batch: Batch, header: BatchHeader) -> StepOutput:
        size, sampled = self._rows.graphs.size_for(header.num_rows), header.num_sampled
        # What fills the graph up is chosen too. It is kept where no sequence is.
        others = slice(sampled, size * self._rows.query_len)
        batch.output_rows[others] = 0
        batch.output_slots[others] = self._nobodys_slot
        self._computation.sampler.update_settings()
        output = self._rows.replay(batch, header)
        return output._replace(token_ids=self.choices.replay(size)[:sampled])
