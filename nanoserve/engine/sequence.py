"""One sequence: its tokens, its progress through the model, its place in the KV cache."""

from enum import Enum, auto

from nanoserve.outputs import RequestMetrics
from nanoserve.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()  # new, or preempted: holds no slot and no blocks
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """The state of one request, in plain integers.

    There is no prefill phase and no decode phase: a step gives a sequence `n` new tokens, so that
    `num_computed_tokens` (those whose K and V are in the cache) catches up with `num_tokens`.
    When it does, the logits of the last token yield the next one, and `num_tokens` moves ahead by
    one. Hence the last token's K and V are never stored while it is the last token.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "finish_reason",
        "max_num_tokens",
        "metrics",
        "num_computed_tokens",
        "num_prompt_tokens",
        "params",
        "priority",
        "prompt",
        "request_id",
        "seed",
        "slot",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        arrival: int = 0,
        priority: int = 0,
        seed: int = 0,
        prompt: str | None = None,
        arrival_time: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.params = params
        self.seed = seed
        self.priority = priority
        self.arrival = arrival  # a counter, not a time: ties are impossible

        self.status = SequenceStatus.WAITING
        self.slot = -1  # row of the per-slot tables while RUNNING
        self.block_table: list[int] = []  # block_table[i] holds positions i*block_size ...
        self.block_hashes: list[bytes] = []  # chain hash of each full block, computed once

        stop_token_ids = frozenset(params.stop_token_ids or ())
        self.stop_token_ids = stop_token_ids
        if not params.ignore_eos:
            self.stop_token_ids |= eos_token_ids
        self.max_num_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.metrics = RequestMetrics(arrival_time=arrival_time)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int) -> None:
        """Take a sampled token, or finish: EOS and stop tokens end a sequence without joining it.

        A stop token wins over the length limit when both fall on the same token.
        """
        if token_id in self.stop_token_ids:
            self.finish_reason = "stop"
            if token_id in (self.params.stop_token_ids or ()):
                self.stop_reason = token_id
            return
        self.token_ids.append(token_id)
        if len(self.token_ids) >= self.max_num_tokens:
            self.finish_reason = "length"

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.name}, computed "
            f"{self.num_computed_tokens} of {self.num_tokens}, blocks {self.block_table})"
        )
