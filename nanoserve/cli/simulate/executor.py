"""An executor without a model, and the clock that it moves.

Tokens come from scripts: the output of a request is known before it runs, as the answers of a
recorded trace are, or the drawn lengths of synthetic requests. The scheduler does not know it: a
script ends with a stop token, or at the request's own limit, as the output of a model does.
"""

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.simulate.step_time import StepTime, WindowShares
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.block_manager import blocks_needed
from nanoserve.engine.draft_tokens import accept_draft_tokens
from nanoserve.engine.executor import ForwardInputs, SampleInputs, SlotUpdate, StepResult
from nanoserve.engine.kv_groups import kv_cache_groups
from nanoserve.engine.sequence_room import SequenceRoom

Script = AbstractSequence[int]
# Returns the output of a sequence that is new in its slot: all tokens after its prompt.
FindScript = Callable[[SlotUpdate], Script]


class VirtualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance_to(self, time: float) -> None:
        """Move the clock. Raises `ValueError` for a time that has passed."""
        if time < self.now:
            raise ValueError(f"the clock stands at {self.now} s and cannot go back to {time} s")
        self.now = time


class Scripts:
    """The outputs of requests, found by the seeds of their sequences.

    A seed is what an executor sees of a request's identity. An engine draws 64 bits for each.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, AbstractSequence[Script]] = {}

    def add(self, seed: int, outputs: AbstractSequence[Script]) -> None:
        """Add a request; `outputs` has a script for each of its completions."""
        self._outputs[seed] = outputs

    def remove(self, seed: int | None) -> None:
        self._outputs.pop(seed, None)

    def __call__(self, update: SlotUpdate) -> Script:
        return self._outputs[update.seed][update.completion]


@dataclass
class Handle:
    """A simulated step in flight; `end` is the time at which its tokens are there."""

    end: float
    slots: list[int]  # by output, in batch order
    token_ids: list[int]  # by output
    draft_tokens: dict[int, list[int]]


class SimulatedExecutor:
    """Runs steps in virtual time: `forward` predicts when a step ends, `collect` waits until then.

    The device computes one step after the other, so with async scheduling a step that is launched
    early starts when its predecessor has ended. `speed` divides all times.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        num_kv_blocks: int,
        step_time: StepTime,
        clock: VirtualClock,
        find_script: FindScript,
        speed: float = 1.0,
    ) -> None:
        windows = [group.window for group in kv_cache_groups(config, model_config)]
        room = SequenceRoom(windows, config.block_size, config.max_num_batched_tokens)
        longest = room.longest(num_kv_blocks)
        limit = model_config.max_position_embeddings
        self.num_kv_blocks = num_kv_blocks
        self.max_model_len = config.resolve_max_model_len(limit, num_kv_blocks, longest)
        self.step_time, self.shares = step_time, WindowShares(model_config)
        self.speed, self._is_ahead = speed, config.num_steps_ahead > 0
        self._clock, self._find_script, self._free_at = clock, find_script, 0.0
        width = blocks_needed(self.max_model_len, config.block_size)
        sizes = config.max_num_batched_tokens, config.max_num_seqs, width
        layout = BatchLayout(*sizes, ("prompt_logprobs",), len(windows))
        self._batches = [
            Batch(layout, np.zeros(layout.num_bytes, np.uint8))
            for _ in range(2 + config.num_steps_ahead)
        ]
        self.num_steps = 0
        self._scripts: dict[int, tuple[int, Script]] = {}  # by slot: length of the prompt, output

    def next_batch(self) -> Batch:
        batch = self._batches[self.num_steps % len(self._batches)]
        batch.step, self.num_steps = self.num_steps, self.num_steps + 1
        return batch

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Handle:
        for update in inputs.slot_updates:
            script = self._find_script(update)
            self._scripts[update.slot] = len(update.prompt_token_ids), script
        size = self.shares.size_of(batch, len(inputs.slot_updates))
        start = max(self._clock(), self._free_at)
        self._free_at = start + self.step_time.seconds(size) / self.speed
        slots = batch.output_slots[: size.num_sampled].tolist()
        token_ids = self._sampled(batch, slots, inputs.draft_tokens)
        return Handle(self._free_at, slots, token_ids, inputs.draft_tokens)

    def _sampled(
        self, batch: Batch, slots: list[int], draft_tokens: dict[int, list[int]]
    ) -> list[int]:
        """Return the tokens at all outputs: those of the scripts, whatever the draft tokens are."""
        token_ids = []
        places = batch.positions[batch.output_rows[: len(slots)]].tolist()
        for slot, place in zip(slots, places, strict=True):
            num_prompt_tokens, script = self._scripts[slot]
            index = place + 1 - num_prompt_tokens
            # A draft, or a step that was launched early, may go on where the output has ended.
            if slot in draft_tokens or self._is_ahead:
                index = min(index, len(script) - 1)
            token_ids.append(script[index])
        return token_ids

    def sample(self, handle: Handle, inputs: SampleInputs) -> None:
        """Launch nothing: the tokens are in the scripts."""

    def collect(self, handle: Handle) -> StepResult:
        self._clock.advance_to(handle.end)
        new_ids = [[token_id] for token_id in handle.token_ids]
        return StepResult(accept_draft_tokens(new_ids, handle.slots, handle.draft_tokens).token_ids)

    def script_of(self, slot: int) -> Script:
        """Return the whole output of the sequence in a slot."""
        return self._scripts[slot][1]

    def occupy_until(self, end: float, num_steps: int) -> None:
        """Note that the device has computed `num_steps` more steps, the last until `end`."""
        self._free_at, self.num_steps = end, self.num_steps + num_steps

    def cancel(self, handles: list[Handle]) -> None:
        """Discard launched steps; the device has computed them all the same."""

    def close(self) -> None:
        """Release nothing: there is no device."""
