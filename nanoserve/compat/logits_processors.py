"""Classes under the names of vLLM's logits processors, and an adapter that runs them.

Such a class processes all rows of a step at once and keeps state for each row. Before every step,
`update_state` is given the changes in the assignment of requests to rows:

    step 1  a, b, c start     added 0, 1, 2   rows a b c
    step 2  no change         None            rows a b c
    step 3  a ends, d starts  added 0         rows d b c  (the added request replaces a)
    step 4  b ends            removed 1       rows d - c

`VllmProcessor` keeps these assignments. A request keeps its row until it ends or is preempted. No
row ever moves, and after step 4 the row in the middle is zeros. A request that resumes after a
preemption is added again, with the tokens that it has by then.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from nanoserve.sampling.rows import tensor_of
from nanoserve.utils.checks import require, shown

if TYPE_CHECKING:
    from nanoserve.sampling.slot_state import SlotState
    from nanoserve.sampling_params import SamplingParams

State = TypeVar("State")

_OfOutput = Callable[[list[int], torch.Tensor], torch.Tensor]
_WithPrompt = Callable[[list[int] | None, list[int], torch.Tensor], torch.Tensor]
# (output_token_ids, logits [vocab_size]) -> logits. The prompt's token ids may be an additional
# first argument.
RequestLogitsProcessor = _OfOutput | _WithPrompt


class MoveDirectionality(Enum):
    """The kind of a move between rows, which overwrites the target or swaps the two rows."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """The changes of rows since the previous step, to be applied as `removed`, `added`, `moved`.

    batch_size: number of rows of the logits from now on. removed: rows. added: (row, params, prompt
    token ids, output token ids). The last list grows in place with every token, and a request that
    had this row has ended. moved: (from, to, direction); empty in nanoserve.
    """

    batch_size: int
    removed: Sequence[int]
    added: "Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]"
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """A logits processor of all rows of a step, constructed when the first step samples."""

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """Raise `ValueError` for invalid parameters of a request, which is then not queued."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Initialise from `vllm_config`, the `EngineConfig`.

        is_pin_memory: True if pinned memory makes copies faster.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return True if `apply` never changes which token of a row is the most likely one.

        It is then applied only to rows that sample, and to logits divided by the temperature.
        """

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of rows before each step; None if there are none."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return processed logits, float32 [batch_size, vocab_size]; the input may be changed."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A logits processor that applies a separate processor to each request's row."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[torch.Tensor]] = {}  # by row

    @abstractmethod
    def new_req_logits_processor(self, params: "SamplingParams") -> RequestLogitsProcessor | None:
        """Return the processor for a new request, or None if it needs no processor."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, processor in self.req_info.items():
            logits[row] = _checked(processor(logits[row]), logits[row], processor.func)
        return logits

    def _bound(
        self, params: "SamplingParams", prompt_ids: list[int] | None, output_ids: list[int]
    ) -> "partial[torch.Tensor] | None":
        """Bind a request's processor to its tokens, so that it takes logits alone.

        The bound list of output tokens grows in place.
        """
        processor = self.new_req_logits_processor(params)
        if processor is None:
            return None
        if len(inspect.signature(processor).parameters) == 3:
            return partial(cast(_WithPrompt, processor), prompt_ids, output_ids)
        return partial(cast(_OfOutput, processor), output_ids)


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: "Callable[[SamplingParams, list[int] | None, list[int]], State | None]",
) -> bool:
    """Update the entries by row; return True if an entry was added, removed or moved.

    new_state: makes the entry of a new request from its parameters, prompt and output, or returns
    None for a request that needs no entry.
    """
    if batch_update is None:
        return False
    has_changed = False
    for row in batch_update.removed:
        has_changed |= req_entries.pop(row, None) is not None
    for row, params, prompt_ids, output_ids in batch_update.added:
        has_changed |= _put(req_entries, row, new_state(params, prompt_ids, output_ids))
    for source, target, direction in batch_update.moved:
        moving, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        if direction is MoveDirectionality.SWAP:
            has_changed |= _put(req_entries, source, replaced)
        has_changed |= _put(req_entries, target, moving) or replaced is not None
    return has_changed


def _put(entries: dict[int, State], row: int, state: State | None) -> bool:
    """Set the entry of a row, or remove it if `state` is None; return True if this is a change."""
    was_there = entries.pop(row, None) is not None
    if state is not None:
        entries[row] = state
    return was_there or state is not None


def load(entry: Any) -> Any:
    """Return the class that an entry of `logits_processors` names, or the entry itself.

    A class, or the one that "package.module:Class" names, must be a `LogitsProcessor` and is run by
    `VllmProcessor`; other callables are nanoserve's own processors. Raises `ValueError` for
    anything else.
    """
    found = _imported(entry) if isinstance(entry, str) else entry
    given = f"logits_processors: {shown(entry)}"
    if not isinstance(found, type):
        require(not isinstance(entry, str), f"{given} is not a class, but {shown(found)}")
        require(callable(found), f"{given} is neither a class, the name of one nor a callable")
        return found
    methods = ("update_state", "apply", "is_argmax_invariant")
    lacking = {name for name in methods if not callable(getattr(found, name, None))}
    lacking |= getattr(found, "__abstractmethods__", frozenset())
    require(
        not lacking, f"{given} is not a LogitsProcessor: it has no {', '.join(sorted(lacking))}"
    )
    return found


def _imported(name: str) -> Any:
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ValueError(f"logits_processors: {name!r} must have the form 'package.module:Class'")
    try:
        found = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # a module may raise anything when it is imported
        raise ValueError(
            f"logits_processors: {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return found


class VllmProcessor:
    """An engine-wide processor that runs a vLLM class; see `nanoserve.sampling.processors`.

    Errors of the class are passed on. Each engine has its own processor, since rows belong to its
    steps.
    """

    def __init__(self, processor_class: type, vllm_config: Any) -> None:
        self._class, self._config = processor_class, vllm_config
        self._processor: Any = None  # constructed on the device of the first logits
        self._is_invariant = False
        self._rows: dict[SlotState, int] = {}  # of the previous step

    def validate_params(self, params: "SamplingParams") -> None:
        check = getattr(self._class, "validate_params", None)
        if check is not None:
            check(params)

    def __call__(self, logits: torch.Tensor, states: "list[SlotState]") -> None:
        """Change float32 `logits` [num_rows, vocab_size] in place; `states` has one per row."""
        if self._processor is None:
            processor = self._class(self._config, logits.device, logits.is_cuda)
            self._is_invariant = processor.is_argmax_invariant()
            self._processor = processor
        self._processor.update_state(self._update(states))
        rows = [self._rows[state] for state in states]
        if not self._is_invariant:
            logits.copy_(self._apply(logits, rows))
        elif not all(state.params.is_greedy for state in states):
            self._apply_sampling(logits, states, rows)

    def _update(self, states: "list[SlotState]") -> BatchUpdate | None:
        """Assign rows to new requests, the lowest free ones first; return the changes.

        A row that is freed and taken in the same step is only in `added`, as in vLLM.
        """
        present, before = set(states), self._rows
        rows = {state: row for state, row in before.items() if state in present}
        taken, added = set(rows.values()), []
        free = (row for row in count() if row not in taken)
        for state in states:
            if state not in rows:
                rows[state] = next(free)
                request = (state.params, state.prompt_token_ids, state.output_token_ids)
                added.append((rows[state], *request))
        self._rows = rows
        removed = sorted(set(before.values()) - set(rows.values()), reverse=True)
        if not added and not removed:
            return None
        return BatchUpdate(1 + max(rows.values(), default=-1), removed, added, [])

    def _apply(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Return the processed logits [len(rows), vocab_size]; the input may be overwritten."""
        if rows == list(range(len(rows))):
            return _checked(self._processor.apply(logits), logits, self._class)
        index = tensor_of(np.array(rows), logits)
        batch = logits.new_zeros(1 + max(rows), logits.shape[1])
        batch[index] = logits
        return _checked(self._processor.apply(batch), batch, self._class)[index]

    def _apply_sampling(
        self, logits: torch.Tensor, states: "list[SlotState]", rows: list[int]
    ) -> None:
        """Apply a class that never changes the most likely token, to rows that sample.

        As in vLLM it gets logits divided by the temperature, since a filter by probability expects
        the probabilities that tokens are drawn from. The sampler applies the temperature later, so
        changed logits are multiplied by it, and unchanged ones stay the same to the bit.
        """
        is_greedy = tensor_of(np.array([s.params.is_greedy for s in states]), logits)
        given = [1.0 if s.params.is_greedy else s.params.temperature for s in states]
        temperature = tensor_of(np.array(given, dtype=np.float32), logits).unsqueeze(1)
        before = logits / temperature
        after = self._apply(before.clone(), rows)
        is_kept = (after == before) | is_greedy.unsqueeze(1)
        logits.copy_(torch.where(is_kept, logits, after * temperature))


def _checked(result: Any, given: torch.Tensor, source: Any) -> torch.Tensor:
    """Check the shape and type that a processor returned for `given`; torch would broadcast it."""
    name = getattr(source, "__qualname__", type(source).__qualname__)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"{name} returned {type(result).__name__}, and must return a tensor")
    if result.shape != given.shape or not result.is_floating_point():
        raise ValueError(
            f"{name} returned {result.dtype} of shape {list(result.shape)}, and must return "
            f"floating-point logits of shape {list(given.shape)}"
        )
    return result
