"""`capture_sampling=True`: a decode step whose tokens are chosen in a CUDA graph too.

Behind the graph of the model a second one is replayed: LM head, sampler, and the tokens put where
the next step finds them. A step is then three copies and two replays, where it was sixteen launches
and a replay.

Only for steps in which every row takes a token of its logits as they are: greedy or at random, but
without filter, penalty or log probability. All others go the usual way, behind the same first
graph; so none pays for a choice that is not used.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from nanoserve.checks import require
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.engine.executor import ForwardInputs, SampleInputs
from nanoserve.sampling.sampler import Sampled
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.cuda_graphs import DecodeGraphs
from nanoserve.worker.host_device import Forward
from nanoserve.worker.model_runner import Handle, ModelRunner

_NO_ROWS = np.zeros(0, dtype=np.int64)


class StepGraphs(DecodeGraphs):
    """The graphs of decode steps, and for each the one that chooses its tokens."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.choices = DecodeGraphs(sizes)  # they return token ids, int64 [size]


class CapturingDevice(CudaDevice):
    """Its graphs also fill in pending tokens, and others choose: see `CapturingRunner`."""

    graphs_class = StepGraphs
    graphs: StepGraphs

    def run(
        self, batch: Batch, header: BatchHeader, last_token: torch.Tensor, forward: Forward
    ) -> tuple[BatchTensors, torch.Tensor]:
        if self.graphs.covers(header):  # they fill in themselves what is pending
            header = header._replace(num_pending=0)
        return super().run(batch, header, last_token, forward)

    def _decode(self, runner: ModelRunner, num_rows: int, max_context_len: int) -> torch.Tensor:
        if self.config.async_scheduling:
            self.tensors.fill_in_pending(BatchHeader(num_decode_rows=num_rows), runner.last_token)
        return super()._decode(runner, num_rows, max_context_len)

    def _capture(self, runner: ModelRunner, graphs: StepGraphs, shows_progress: bool) -> None:
        super()._capture(runner, graphs, shows_progress)
        choose = partial(self._choose, runner, graphs.outputs)
        with torch.inference_mode():
            graphs.choices.capture(self.cuda, choose, shows_progress=False)

    def _choose(
        self, runner: ModelRunner, hidden: dict[int, torch.Tensor], num_rows: int
    ) -> torch.Tensor:
        """What a graph of choices records, behind the model's of so many rows."""
        logits = runner.model.compute_logits(hidden[num_rows])
        # Each row has one token, so its position is the row's.
        positions, slots = self.tensors.positions[:num_rows], self.tensors.row_slots[:num_rows]
        token_ids = runner.sampler.choose(logits, slots, positions + 1)
        if self.config.async_scheduling:
            runner.keep(token_ids, self.tensors.output_slots[:num_rows])
        return token_ids


class CapturingRunner(ModelRunner):
    """Leaves the choice to a graph in the steps that such a graph covers."""

    device: CapturingDevice

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Handle:
        self.fill_slots(inputs.slot_updates)
        header = batch.header
        if not self._can_replay(batch, header):
            return super().forward(batch, replace(inputs, slot_updates=[]))
        return self._replay(batch, header)

    def _can_replay(self, batch: Batch, header: BatchHeader) -> bool:
        if not self.device.graphs.covers(header):
            return False
        # A row may be a token in the middle of a prompt, or a head may want it.
        if not header.num_rows == header.num_outputs == header.num_sampled:
            return False
        return self.sampler.can_capture(batch.row_slots[: header.num_rows])

    @torch.inference_mode()
    def _replay(self, batch: Batch, header: BatchHeader) -> Handle:
        graphs = self.device.graphs
        size = graphs.size_for(header.num_rows)
        # Rows that fill up the graph choose too: what they do is kept where no sequence is.
        batch.output_slots[header.num_rows : size] = self.config.max_num_seqs
        with self.device.guard():
            self.sampler.update_settings()
            tensors, _ = self.device.run(batch, header, self.last_token, self.run_model)
            token_ids = graphs.choices.replay(size)[: header.num_rows]
        return Handle(batch, header, tensors, sampled=Sampled(token_ids, None, _NO_ROWS, [], {}))

    @torch.inference_mode()
    def sample(self, handle: Handle, inputs: SampleInputs) -> None:
        if handle.sampled is None:
            super().sample(handle, inputs)
            return
        require(
            not inputs.token_masks,
            f"capture_sampling=True has chosen the tokens of this step before the token masks of "
            f"slots {sorted(inputs.token_masks)} were there: only requests with "
            f"structured_outputs can have one",
        )
        with self.device.guard():
            handle.fetched = self.device.fetch(handle.sampled.token_ids)
