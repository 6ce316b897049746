"""One sequence: its tokens, its progress through the model, its place in the KV cache."""

from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto

from nanoserve.outputs import RequestMetrics
from nanoserve.sampling_params import SamplingParams

StopCondition = Callable[["Sequence"], tuple[str, str | None] | None]
CacheKey = tuple[str, ...]  # what K and V depend on besides the tokens, such as a tenant's salt


class SequenceStatus(Enum):
    HELD = auto()  # waits for something outside the queues: `Sequence.held_for` says what for
    WAITING = auto()  # new, or preempted: holds no slot and no blocks
    RUNNING = auto()
    FINISHED = auto()


class BlockTable(list[int]):
    """The KV blocks of a sequence: entry i holds positions i x block_size to (i + 1) x block_size.

    The first `num_released` entries are 0: a group of layers with a sliding window has given them
    back, or a prefix-cache hit did not need them.
    """

    __slots__ = ("num_released",)

    def __init__(self) -> None:
        super().__init__()
        self.num_released = 0

    def add_hits(self, blocks: Iterable[int]) -> None:
        """Begin with the blocks of a prefix-cache hit; those that are not needed are 0."""
        self += blocks
        self.num_released = self.count(0)

    def release_first(self) -> int:
        """Take the first block that is there out of the table, and return it."""
        block = self[self.num_released]
        self[self.num_released] = 0
        self.num_released += 1
        return block

    def pop_last(self) -> int:
        """Take the last entry out of the table, and return it; 0 if its block was released."""
        block = self.pop()
        self.num_released = min(self.num_released, len(self))
        return block


@dataclass(slots=True, eq=False)  # two sequences are never equal, so they can be dictionary keys
class Sequence:
    """The state of one completion, in plain integers.

    There is no prefill phase and no decode phase: a step gives a sequence `n` new tokens, so that
    `num_computed_tokens` (those whose K and V are in the cache) catches up with `num_tokens`.
    When it does, the logits of the last token yield the next one, and `num_tokens` moves ahead by
    one. Hence the last token's K and V are never stored while it is the last token.

    A token that a step under way will yield is *pending*: it counts, so that the step after it can
    be planned, but only the device knows its id yet. With draft tokens, several may be pending, and
    how many of them there will be is not known either.

    A request for `n` completions is n sequences. The first one computes the prompt and carries the
    others as `siblings`; then they share its full blocks by reference count. No copy-on-write is
    needed: only full blocks are ever shared, a full block is never written to, and the tokens in
    the prompt's last, partly filled block are computed once more by each sibling.
    """

    request_id: str
    token_ids: list[int]  # the prompt, then the output
    params: SamplingParams
    max_model_len: InitVar[int]
    eos_token_ids: InitVar[frozenset[int]] = frozenset()
    seed: int = 0
    priority: int = 0
    arrival: int = 0  # a counter, not a time: ties are impossible
    index: int = 0  # which completion of its prompt
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    cache_key: CacheKey = ()  # KV blocks are shared by sequences with the same key
    siblings: list["Sequence"] = field(default_factory=list)

    status: SequenceStatus = SequenceStatus.WAITING
    held_for: set[str] = field(default_factory=set)  # reasons, while HELD
    num_computed_tokens: int = 0
    num_pending: int = 0
    slot: int = -1  # row of the per-slot tables while RUNNING
    block_tables: list[BlockTable] = field(default_factory=list)  # by group of layers
    num_allocated_tokens: int = 0  # so many tokens' K and V have room in all of its tables
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks, computed once
    num_cached_blocks: int = 0  # full blocks that have been offered to the prefix cache
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_token_time: float | None = None
    # Called after each token that joins; they return the finish and stop reason if it is the last,
    # as a stop string makes it.
    stop_conditions: list[StopCondition] = field(default_factory=list)

    prompt_head: str | None = field(init=False)  # a head that needs every token of the prompt
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self, max_model_len: int, eos_token_ids: frozenset[int]) -> None:
        params = self.params
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = max_model_len
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + params.max_tokens)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            self.stop_token_ids |= eos_token_ids
        wants_prompt = params.prompt_logprobs is not None and self.index == 0
        self.prompt_head = "prompt_logprobs" if wants_prompt else None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens, pending ones excluded."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def needs_prompt_outputs(self) -> bool:
        """True if every token of the prompt must be computed, whatever the prefix cache has."""
        return self.prompt_head is not None and len(self.token_ids) == self.num_prompt_tokens

    @property
    def block_table(self) -> list[int]:
        """The blocks of the first group of layers; in most models there is no other."""
        return self.block_tables[0] if self.block_tables else []

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int) -> bool:
        """Take a sampled token; False if it ended the sequence without joining it, as EOS does.

        This is the only way for a token to join, and the only place where a token ends a sequence:
        `finish_reason` is set then. A stop token wins over the length limit when both fall on the
        same token, and so does a stop condition.
        """
        if token_id in self.stop_token_ids:
            self.finish_reason = "stop"
            if token_id in (self.params.stop_token_ids or ()):
                self.stop_reason = token_id
            return False
        self.token_ids.append(token_id)
        if len(self.token_ids) >= self.max_num_tokens:
            self.finish_reason = "length"
        if self.stop_conditions:
            for condition in self.stop_conditions:
                end = condition(self)
                if end is not None:
                    self.finish_reason, self.stop_reason = end
        return True

    def __repr__(self) -> str:
        progress = f"{self.num_computed_tokens} of {self.num_tokens} computed"
        return f"Sequence({self.request_id!r}, {self.status.name}, {progress})"
