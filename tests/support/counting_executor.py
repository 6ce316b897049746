"""An executor without a model: the token after t is t + 1. A step costs microseconds.

With a token mask, it is the first allowed one from there on. Draft tokens are verified.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import PENDING, Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.block_manager import blocks_needed
from nanoserve.engine.draft_tokens import accept_draft_tokens
from nanoserve.engine.executor import (
    ForwardInputs,
    SampleInputs,
    SlotUpdate,
    StepResult,
    TokenMask,
)
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.kv_groups import kv_cache_groups
from nanoserve.engine.sequence_room import SequenceRoom
from nanoserve.outputs import RequestOutput

VOCAB_SIZE = 256


@dataclass
class Handle:
    batch: Batch
    token_ids: np.ndarray | None = None  # by output
    draft_tokens: dict[int, list[int]] = field(default_factory=dict)  # by slot
    errors: dict[int, ValueError] = field(default_factory=dict)  # by output


class CountingExecutor:
    def __init__(
        self,
        config: EngineConfig,
        num_kv_blocks: int = 64,
        windows: AbstractSequence[int | None] = (None,),
    ) -> None:
        self.num_kv_blocks = num_kv_blocks
        room = SequenceRoom(windows, config.block_size, config.max_num_batched_tokens)
        self.max_model_len = config.resolve_max_model_len(
            512, num_kv_blocks, room.longest(num_kv_blocks)
        )
        layout = BatchLayout(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            blocks_needed(self.max_model_len, config.block_size),
            ("prompt_logprobs",),
            len(windows),
        )
        self.batches = [
            Batch(layout, np.zeros(layout.num_bytes, np.uint8))
            for _ in range(1 + max(1, config.num_steps_ahead))
        ]
        self.num_batches = 0
        self.last_token = np.zeros(config.max_num_seqs, np.int32)  # by slot
        self.sampling: list[SlotUpdate] = []
        self.fail_next = False
        self.closed = False

    def next_batch(self) -> Batch:
        batch = self.batches[self.num_batches % len(self.batches)]
        batch.step, self.num_batches = self.num_batches, self.num_batches + 1
        return batch

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Handle:
        self.sampling += inputs.slot_updates
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        return Handle(batch, draft_tokens=inputs.draft_tokens)

    def sample(self, handle: Handle, inputs: SampleInputs) -> None:
        batch = handle.batch
        num_sampled = batch.header.num_sampled
        slots = batch.output_slots[:num_sampled]
        input_ids = batch.input_ids[batch.output_rows[:num_sampled]]
        known = np.where(input_ids == PENDING, self.last_token[slots], input_ids)
        handle.token_ids = (known + 1) % VOCAB_SIZE
        for slot, mask in inputs.token_masks.items():
            self._choose_within(mask, handle, np.flatnonzero(slots == slot).tolist())
        self.last_token[slots] = handle.token_ids

    def _choose_within(self, mask: TokenMask, handle: Handle, outputs: list[int]) -> None:
        """Replace what a mask forbids at the outputs of its slot."""
        token_ids = handle.token_ids
        try:
            while (illegal := mask.first_illegal(token_ids[outputs].tolist())) is not None:
                words = np.zeros(VOCAB_SIZE // 32, np.int32)
                mask.fill(illegal, words)
                bits = np.unpackbits(words.view(np.uint8), bitorder="little")
                if not bits.any():
                    handle.errors[outputs[illegal]] = ValueError("no token is allowed")
                    break
                after = (np.flatnonzero(bits) - token_ids[outputs[illegal]]) % VOCAB_SIZE
                token_ids[outputs[illegal]] = (
                    token_ids[outputs[illegal]] + min(after)
                ) % VOCAB_SIZE
        except ValueError as error:
            handle.errors[outputs[0]] = error

    def collect(self, handle: Handle) -> StepResult:
        new_ids = [[token_id] for token_id in handle.token_ids.tolist()]
        for output in handle.errors:
            new_ids[output] = []
        slots = handle.batch.output_slots[: len(new_ids)].tolist()
        rows = accept_draft_tokens(new_ids, slots, handle.draft_tokens)
        return StepResult(rows.token_ids, errors=rows.errors(handle.errors))

    def cancel(self, handles: list[Handle]) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def byte_tokenizer(eos_token_id: int | None = None) -> SimpleNamespace:
    """Token id = byte: every character beyond ASCII is split over several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = _bytes_by_symbol()
    vocab = {symbol: byte_of[symbol] for symbol in alphabet}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return SimpleNamespace(
        backend=backend,
        eos_token_id=eos_token_id,
        encode=lambda text, add_special_tokens=True: list(text.encode()),
        decode=lambda ids, skip=True: backend.decode(ids, skip_special_tokens=skip),
    )


def _bytes_by_symbol() -> dict[str, int]:
    """GPT-2's printable stand-ins: a printable byte is itself, the rest are 256 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(256 + i): byte for i, byte in enumerate(others)}


def make_engine(
    tokenizer: SimpleNamespace | None = None,
    num_kv_blocks: int = 64,
    eos: frozenset[int] = frozenset(),
    clock: Callable[[], float] = time.perf_counter,
    sliding_windows: AbstractSequence[int | None] = (None,),
    **options: Any,
) -> GuardedEngine:
    """Return an engine of a model whose layers have these windows, one layer for each."""
    config = EngineConfig("none", **{"max_num_seqs": 8, **options})
    config = config.for_device("cpu")
    model_config = ModelConfig(
        architecture="Counting",
        vocab_size=VOCAB_SIZE,
        hidden_size=1,
        intermediate_size=1,
        num_hidden_layers=len(sliding_windows),
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        attention_scale=0.25,
        sliding_windows=tuple(sliding_windows),
        dtype="float32",
        eos_token_ids=eos,
    )
    windows = [group.window for group in kv_cache_groups(config, model_config)]
    executor = CountingExecutor(config, num_kv_blocks, windows)
    return GuardedEngine(config, model_config, executor, tokenizer, clock)


def run(engine: GuardedEngine) -> dict[str, RequestOutput]:
    """Step the engine to its end; the final output of every request."""
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished
