"""CUDA graphs of steps that guess: `speculative_config={..., "enforce_eager": False}`.

Such a step has rows of different lengths, a graph knows one. So every row is brought to the length
of the longest there can be, `num_speculative_tokens` + 1, by tokens in front of its own:

    row       [ a7 a8 ]            a7 is known, a8 a guess; the context has 9 tokens
    filled    [ 0 0 0 a7 a8 ]      at positions 4 ... 8

What is put there sees the context as far as its position, which is there, and nobody reads what
becomes of it; its K and V go to the dummy block. So no kernel has to know. A row whose context is
not that long cannot be filled, and its step is launched kernel by kernel.
"""

from functools import partial

import numpy as np
import torch

from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.cuda_graphs import DecodeGraphs, append_dummy_rows
from nanoserve.worker.host_device import Forward
from nanoserve.worker.model_runner import ModelRunner


def fill_rows(batch: Batch, header: BatchHeader, length: int, block_size: int) -> BatchHeader:
    """Bring every row to `length` tokens; returns the header that says so.

    `batch.header` keeps counting the tokens that are wanted.
    """
    rows, tokens = header.num_rows, header.num_tokens
    counts = np.diff(batch.cu_seqlens_q[: rows + 1])
    # A token moves on by what its own row and those before it lack.
    moved = np.arange(tokens) + np.repeat(np.cumsum(length - counts), counts)
    all_tokens = rows * length
    first = batch.context_lens[:rows] - length
    positions = (first[:, None] + np.arange(length, dtype=np.int32)).ravel()
    for values, others in (
        (batch.input_ids, np.zeros(all_tokens, dtype=np.int32)),
        (batch.slot_mapping, positions % block_size),
    ):
        others[moved] = values[:tokens]
        values[:all_tokens] = others
    batch.positions[:all_tokens] = positions
    batch.cu_seqlens_q[: rows + 1] = np.arange(rows + 1) * length
    batch.output_rows[: header.num_outputs] = moved[batch.output_rows[: header.num_outputs]]
    return header._replace(num_tokens=all_tokens, num_decode_rows=0, max_query_len=length)


class GuessGraphs(DecodeGraphs):
    """The graphs of steps without guesses, and those of steps with them."""

    def __init__(self, sizes: list[int], query_len: int, max_num_tokens: int) -> None:
        super().__init__(sizes)
        most = max_num_tokens // query_len
        self.of_guesses = DecodeGraphs(sorted({min(size, most) for size in sizes}), query_len)


class GuessingDevice(CudaDevice):
    graphs: GuessGraphs

    def __init__(self, config: EngineConfig, cuda: Cuda, is_capturable: bool) -> None:
        query_len = config.speculative_config.num_speculative_tokens + 1
        self.graphs_class = partial(
            GuessGraphs, query_len=query_len, max_num_tokens=config.max_num_batched_tokens
        )
        super().__init__(config, cuda, is_capturable)

    def run(
        self, batch: Batch, header: BatchHeader, last_token: torch.Tensor, forward: Forward
    ) -> tuple[BatchTensors, torch.Tensor]:
        graphs = self.graphs.of_guesses
        if not self._can_fill(batch, header):
            return super().run(batch, header, last_token, forward)
        length, block_size = graphs.query_len, self.config.block_size
        header = fill_rows(batch, header, length, block_size)
        size = graphs.size_for(header.num_rows)
        missing = np.full(size - header.num_rows, length, dtype=np.int32)
        filled = append_dummy_rows(batch, header, missing, block_size)
        self._copy_in(batch, filled)
        if header.num_pending:
            self._fill_in_pending(header.num_rows, last_token)
        return self.tensors, graphs.replay(size)

    def _can_fill(self, batch: Batch, header: BatchHeader) -> bool:
        graphs, rows = self.graphs.of_guesses, header.num_rows
        return (
            1 < header.max_query_len <= graphs.query_len
            and rows <= graphs.sizes[-1]
            and bool((batch.context_lens[:rows] >= graphs.query_len).all())
        )

    def _fill_in_pending(self, num_rows: int, last_token: torch.Tensor) -> None:
        """As `BatchTensors.fill_in_pending`; such a token is now the last one of its row."""
        tensors = self.tensors
        places = tensors.cu_seqlens_q[1 : num_rows + 1] - 1
        found, known = tensors.input_ids[places], last_token[tensors.row_slots[:num_rows]]
        tensors.input_ids[places] = torch.where(found < 0, known, found)

    def _capture(self, runner: ModelRunner, graphs: GuessGraphs, shows_progress: bool) -> None:
        super()._capture(runner, graphs, shows_progress)
        of_guesses = graphs.of_guesses
        lengths = np.full(of_guesses.sizes[-1], of_guesses.query_len, dtype=np.int32)
        with torch.inference_mode():
            self._copy_in_dummies(runner, lengths)
            of_guesses.capture(
                self.cuda, partial(self._guess, runner), shows_progress=shows_progress
            )

    def _guess(self, runner: ModelRunner, num_rows: int) -> torch.Tensor:
        """What a graph records: `num_rows` of so many tokens, of contexts up to the longest."""
        length = self.graphs.of_guesses.query_len
        header = BatchHeader(
            num_tokens=num_rows * length,
            num_rows=num_rows,
            max_query_len=length,
            max_context_len=runner.max_model_len,
        )
        return runner.run_model(self.tensors, header, self._tables[:num_rows])
