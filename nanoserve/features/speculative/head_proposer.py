"""Propose draft tokens with a head on the target's hidden states; see `hidden_head.py`.

The head has no KV cache. It needs the hidden state from which the last token of a sequence was
sampled, which the last step has left on the device. Draft tokens are chosen by the target's
sampler, and therefore with the parameters, penalties and noise that the target will use for them.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import SecondModelMemory
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.hidden_head import HiddenHead, read_head
from nanoserve.features.speculative.proposer import PreparedProposer
from nanoserve.models.quantization.linear_methods import choose_linear_method
from nanoserve.sampling.host_copies import to_device
from nanoserve.utils.checks import require

if TYPE_CHECKING:
    from nanoserve.worker.model_runner import ModelRunner

_BUNDLED = {
    "tiny-qwen3": Path(__file__).parents[2] / "checkpoint" / "tiny_qwen3" / "head.safetensors"
}


def prepare_hidden_head(config: EngineConfig, target: ModelConfig) -> PreparedProposer:
    """Return the proposer of method "hidden_head".

    Raises `ValueError` if the file is not a head, or is for another hidden size.
    """
    require(
        config.tensor_parallel_size == 1 and not config.capture_sampling,
        f"method='hidden_head' is not supported with "
        f"tensor_parallel_size={config.tensor_parallel_size}, "
        f"capture_sampling={config.capture_sampling}: it needs the whole embedding on one rank, "
        f"and hidden states, which graphs with sampling do not keep; use tensor_parallel_size=1 "
        f"and capture_sampling=False, or method='ngram', 'suffix' or 'draft_model'",
    )
    name = config.speculative_config.model
    path = _BUNDLED.get(name, Path(name))
    require(path.is_file(), f"the head {name!r} is neither a file nor one of {[*_BUNDLED]}")
    weights = read_head(path)
    size = len(weights["norm.weight"])
    require(
        size == target.hidden_size,
        f"the head {name!r} has hidden_size={size}, but the model has hidden_size="
        f"{target.hidden_size}; use a head that was trained for this model",
    )

    # The head's weights are floats, even if those of the model are quantized.
    own = replace(config, quantization=None, quantization_activations=None)
    plain = replace(target, quantization_config=None)
    itemsize = getattr(torch, target.dtype).itemsize  # the file may have another dtype
    num_bytes = itemsize * sum(tensor.numel() for tensor in weights.values())

    def make(executor: Any, scheduler: Scheduler) -> HeadProposer:
        context = executor.context
        method = choose_linear_method(own, plain, context.device, num_bytes)
        return HeadProposer(
            HiddenHead.of(weights, replace(context, linear_method=method)), executor
        )

    return PreparedProposer(make, lambda: SecondModelMemory(num_bytes))


class DraftRows(NamedTuple):
    """The tensors of a batch that the sampler reads, each int32 [num_rows] on the device."""

    output_rows: torch.Tensor
    output_slots: torch.Tensor
    positions: torch.Tensor  # of the input tokens, one before those that are sampled


class HeadProposer:
    """A proposer that runs a head on hidden states."""

    is_model = needs_hidden = True

    def __init__(self, head: HiddenHead, runner: "ModelRunner") -> None:
        self._head, self._runner = head, runner
        # The hidden states of a step, the row of the sequence in them, and how many tokens the
        # sequence had then.
        self._known: dict[Sequence, tuple[torch.Tensor, int, int]] = {}
        self._compile()

    @torch.inference_mode()
    def _compile(self) -> None:
        """Run the head once, so that its kernels are not compiled while requests are served."""
        context, size = self._runner.context, self._runner.model_config.hidden_size
        with self._runner.device.guard():
            state = torch.zeros(1, size, dtype=context.dtype, device=context.device)
            self._head(state, state)

    def begin(self, seq: Sequence) -> None:
        pass

    def learn(self, seq: Sequence, hidden: Any, row: int) -> None:
        self._known[seq] = (hidden, row, len(seq.token_ids))

    def forget(self, seq: Sequence) -> None:
        self._known.pop(seq, None)

    def close(self) -> None:
        self._known.clear()

    @torch.inference_mode()
    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        # After an exception, tokens of a sequence may have been undone: its state is then too new.
        able = [seq for seq, _ in wanted if self._num_tokens(seq) == len(seq.token_ids)]
        if not able:
            return [[] for _ in wanted]
        device, num_drafts = self._runner.device, max(count for _, count in wanted)
        with device.guard():
            found = device.wait(device.fetch(self._draft(able, num_drafts).flatten()))
        rows = {seq: found[i * num_drafts : (i + 1) * num_drafts] for i, seq in enumerate(able)}
        return [rows.get(seq, [])[:count] for seq, count in wanted]

    def _draft(self, able: list[Sequence], num_drafts: int) -> torch.Tensor:
        """Return draft tokens [len(able), num_drafts], which the device may not have computed yet.

        All inputs are copied to the device once, at the beginning, so no draft token waits for the
        host.
        """
        runner, num_rows = self._runner, len(able)
        slots = np.array([seq.slot for seq in able])
        positions = np.array([len(seq.token_ids) for seq in able])
        last = np.array([seq.token_ids[-1] for seq in able])
        state = torch.stack([self._known[seq][0][self._known[seq][1]] for seq in able])
        rows_on_host = np.stack((slots, positions - 1, np.arange(num_rows), last)).astype(np.int32)
        (on_device,) = to_device(state.device, rows_on_host)
        row_slots, row_positions, output_rows, token_ids = on_device
        drafts: list[torch.Tensor] = []
        for number in range(num_drafts):
            state, hidden = self._head(state, runner.model.model.embed(token_ids))
            logits = runner.model.compute_logits(hidden)
            rows = DraftRows(output_rows, row_slots, row_positions + number)
            sampled = runner.sampler.sample(logits, slots, positions + number, rows)
            drafts.append(sampled.token_ids.clamp(min=0))  # -1 (no choice) is not a token id
            token_ids = drafts[-1].int()
        return torch.stack(drafts, dim=1)

    def _num_tokens(self, seq: Sequence) -> int:
        return self._known[seq][2] if seq in self._known else -1
