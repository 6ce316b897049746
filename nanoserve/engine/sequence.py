"""The state of a sequence: its tokens, progress through the model, and place in the KV cache."""

from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from itertools import chain

from nanoserve.engine.prompt_embeds import PromptEmbeds
from nanoserve.lora_request import LoRARequest
from nanoserve.outputs import RequestMetrics
from nanoserve.sampling_params import SamplingParams

StopCondition = Callable[["Sequence"], tuple[str, str | None] | None]
CacheKey = tuple[str, ...]  # what else K and V depend on, such as a tenant's salt


class SequenceStatus(Enum):
    HELD = auto()  # kept out of the waiting queue for the reasons in `Sequence.held_for`
    WAITING = auto()  # new or preempted: holds no slot and no blocks
    RUNNING = auto()
    FINISHED = auto()


class BlockTable(list[int]):
    """A sequence's KV blocks. Entry i holds positions i x block_size to (i + 1) x block_size.

    The first `num_released` entries are 0: a layer group with a sliding window has freed these
    blocks, or a prefix-cache hit did not need them.
    """

    __slots__ = ("num_released",)

    def __init__(self) -> None:
        super().__init__()
        self.num_released = 0

    def add_hits(self, blocks: Iterable[int]) -> None:
        """Add the blocks of a prefix-cache hit to an empty table; unneeded blocks are 0."""
        self += blocks
        self.num_released = self.count(0)

    def release_first(self) -> int:
        """Remove the first block that has not been released, and return it."""
        block = self[self.num_released]
        self[self.num_released] = 0
        self.num_released += 1
        return block

    def pop_last(self) -> int:
        """Remove the last entry and return it; 0 if its block was released."""
        block = self.pop()
        self.num_released = min(self.num_released, len(self))
        return block


@dataclass(slots=True, eq=False)  # two sequences are never equal, so they can be dictionary keys
class Sequence:
    """The state of one completion, in plain integers.

    There is no prefill phase and no decode phase: a step gives a sequence `n` new tokens, so that
    `num_computed_tokens` (tokens whose K and V are in the cache) catches up with `num_tokens`. When
    it does, the logits of the last token yield the next one, and `num_tokens` moves ahead by one.
    Hence the last token's K and V are never stored while it is the last token.

    A token that a step in flight will yield is *pending*: it counts in `num_tokens`, so that the
    next step can be planned, but only the device knows its id yet. With draft tokens several tokens
    may be pending, and their number is not known either until the step has been verified.

    A request for `n` completions is n sequences. The first one computes the prompt and has the
    others as its `siblings`; then they share its full blocks by reference count. No copy-on-write
    is needed: only full blocks are ever shared, a full block is never written to, and the tokens in
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
    cache_key: CacheKey = ()  # only sequences with the same key share KV blocks
    weights_id: int = 0  # of the engine when it was added: likewise
    lora_request: LoRARequest | None = None  # its adapter
    siblings: list["Sequence"] = field(default_factory=list)

    status: SequenceStatus = SequenceStatus.WAITING
    held_for: set[str] = field(default_factory=set)  # reasons, while HELD
    num_computed_tokens: int = 0
    num_pending: int = 0
    slot: int = -1  # row of the per-slot tables while RUNNING
    block_tables: list[BlockTable] = field(default_factory=list)  # by layer group
    num_allocated_tokens: int = 0  # number of tokens for which all tables have blocks
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks, computed once
    num_cached_blocks: int = 0  # full blocks offered to the prefix cache so far
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_token_time: float | None = None
    # Called after each appended token; one that ends the sequence, such as a stop string, returns
    # the finish reason and the stop reason.
    stop_conditions: list[StopCondition] = field(default_factory=list)
    prompt_head: str | None = None  # head that reads hidden states of the prompt
    reads_last: bool = False  # True if that head reads only the last token's
    prompt_embeds: PromptEmbeds | None = None  # in place of the embeddings of some prompt tokens

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
        if params.prompt_logprobs is not None and self.index == 0:
            self.prompt_head = "prompt_logprobs"

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
        """True if every token of the prompt must be computed, even if it is cached."""
        reads_all = self.prompt_head is not None and not self.reads_last
        return reads_all and len(self.token_ids) == self.num_prompt_tokens

    @property
    def block_table(self) -> list[int]:
        """Block table of the first layer group; most models have no other group."""
        return self.block_tables[0] if self.block_tables else []

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def set_key(self, kind: str, value: str) -> None:
        """Set a part of `cache_key`, before any block is looked up."""
        kinds = dict(zip(self.cache_key[::2], self.cache_key[1::2], strict=True)) | {kind: value}
        self.cache_key = tuple(chain.from_iterable(kinds.items()))

    def append(self, token_id: int) -> bool:
        """Append a sampled token; returns False for a stop token, which is not appended.

        No other method appends tokens, and no other place ends a sequence because of a token:
        `finish_reason` is set here. A stop token, such as EOS, or a stop condition takes precedence
        over the length limit when both apply to the same token.
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
