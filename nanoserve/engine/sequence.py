"""One sequence: its tokens, its progress through the model, its place in the KV cache."""

from enum import Enum, auto

from nanoserve.outputs import RequestMetrics
from nanoserve.sampling_params import SamplingParams


class SequenceStatus(Enum):
    HELD = auto()  # waits for something outside the queues: see `Sequence.held_for`
    WAITING = auto()  # new, or preempted: holds no slot and no blocks
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """The state of one completion, in plain integers.

    There is no prefill phase and no decode phase: a step gives a sequence `n` new tokens, so that
    `num_computed_tokens` (those whose K and V are in the cache) catches up with `num_tokens`.
    When it does, the logits of the last token yield the next one, and `num_tokens` moves ahead by
    one. Hence the last token's K and V are never stored while it is the last token.

    A token that a step under way will yield is *pending*: it counts, so that the step after it can
    be planned, but nobody here knows its id yet. The device does.

    A request for `n` completions is n sequences. The first one computes the prompt and carries the
    others as `siblings`; then they share its full blocks by reference count. No copy-on-write is
    needed: only full blocks are ever shared, nobody writes to a full block, and the tokens in the
    prompt's last, partly filled block are computed once more by each sibling.

    token_ids: the prompt, then the output.
    arrival: a counter, not a time, so that no two are equal.
    index: which completion of its prompt.
    cache_key: sequences share KV blocks only with those that have the same one.
    """

    __slots__ = (  # noqa: RUF023  in the order of their story
        "request_id", "token_ids", "params", "seed", "priority", "arrival", "metrics", "index",
        "siblings", "bad_words_token_ids", "cache_key", "num_prompt_tokens", "max_num_tokens",
        "stop_token_ids", "prompt_head", "status", "held_for", "num_computed_tokens",
        "num_pending", "slot", "block_table", "block_hashes", "num_registered_blocks",
        "finish_reason", "stop_reason", "last_token_time",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        seed: int = 0,
        priority: int = 0,
        arrival: int = 0,
        index: int = 0,
        metrics: RequestMetrics | None = None,
        bad_words_token_ids: list[list[int]] | None = None,
        cache_key: tuple[str, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.token_ids = token_ids
        self.params = params
        self.seed, self.priority, self.arrival, self.index = seed, priority, arrival, index
        self.metrics = metrics or RequestMetrics()
        self.siblings: list[Sequence] = []
        self.bad_words_token_ids = bad_words_token_ids or []
        self.cache_key = cache_key

        self.num_prompt_tokens = len(token_ids)
        self.max_num_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            self.stop_token_ids |= eos_token_ids
        # The head that wants the hidden state of every token of the prompt, if there is one.
        wants_prompt = params.prompt_logprobs is not None and index == 0
        self.prompt_head = "prompt_logprobs" if wants_prompt else None

        self.status = SequenceStatus.WAITING
        self.held_for: str | None = None  # while HELD
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.slot = -1  # row of the per-slot tables while RUNNING
        self.block_table: list[int] = []  # [i] holds positions i * block_size and on
        self.block_hashes: list[bytes] = []  # of the full blocks, computed once
        self.num_registered_blocks = 0  # full blocks that the prefix cache has been told of
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.last_token_time: float | None = None

    @property
    def num_tokens(self) -> int:
        """All that there are, the pending one included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Those that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def needs_prompt_outputs(self) -> bool:
        """Whether its prompt must be computed token by token, whatever the prefix cache has."""
        return self.prompt_head is not None and len(self.token_ids) == self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int) -> bool:
        """Take a sampled token; False if it ended the sequence without joining it, as EOS does.

        This is the only way for a token to join. A stop token wins over the length limit when both
        fall on the same token.
        """
        if token_id in self.stop_token_ids:
            self.finish_reason = "stop"
            if token_id in (self.params.stop_token_ids or ()):
                self.stop_reason = token_id
            return False
        self.token_ids.append(token_id)
        if len(self.token_ids) >= self.max_num_tokens:
            self.finish_reason = "length"
        return True

    def __repr__(self) -> str:
        progress = f"{self.num_computed_tokens} of {self.num_tokens} computed"
        return f"Sequence({self.request_id!r}, {self.status.name}, {progress})"
