"""vLLM's logits processors: its classes under their names, and what runs them here.

Such a class works on all rows of a step at once and keeps what it knows of each in a place of its
own. Which request has which row, `update_state` learns before every step:

    step 1  a, b, c come     added 0, 1, 2   rows a b c
    step 2  nothing changed  None            rows a b c
    step 3  a ends, d comes  added 0         rows d b c  (whoever is added replaces who was there)
    step 4  b ends           removed 1       rows d - c

`VllmProcessor` keeps that book. A request keeps its row as long as it is in every step, and that is
until it ends or is preempted: no row ever moves, and after step 4 there is one of zeros in between.
Whoever comes back from a preemption is added again, with the tokens that it has by then.
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
# (output_token_ids, logits [vocab_size]), or the prompt's token ids before these -> logits.
RequestLogitsProcessor = _OfOutput | _WithPrompt


class MoveDirectionality(Enum):
    """Whether the row that a request moves to is overwritten, or moves to where it came from."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """What has changed since the step before: first `removed`, then `added`, then `moved`.

    batch_size: rows of the logits from now on. removed: rows. added: (row, params, prompt token
    ids, output token ids), and that last list grows in place with every token; who was in that row
    is gone. moved: (from, to, direction), which nanoserve does not do.
    """

    batch_size: int
    removed: Sequence[int]
    added: "Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]"
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Sees all rows of a step at once. It is made when the first step samples."""

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """Raise `ValueError` for parameters of a request that cannot be; it is then not queued."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """vllm_config: the `EngineConfig`. is_pin_memory: whether pinned memory helps."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether a row's most likely token always stays that.

        Then it is applied only for rows that sample, and to logits divided by the temperature.
        """

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before each step; None if the rows are those of the step before."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 [batch_size, vocab_size], which may be changed in place -> the same shape."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Makes a processor of all rows out of those that requests have of their own."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[torch.Tensor]] = {}  # by row

    @abstractmethod
    def new_req_logits_processor(self, params: "SamplingParams") -> RequestLogitsProcessor | None:
        """That of a new request, or None if it needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, processor in self.req_info.items():
            logits[row] = _checked(processor(logits[row]), logits[row], processor.func)
        return logits

    def _bound(
        self, params: "SamplingParams", prompt_ids: list[int] | None, output_ids: list[int]
    ) -> "partial[torch.Tensor] | None":
        """A callable of logits alone; the list of output tokens in it grows by itself."""
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
    """Bring entries by row up to date; returns whether one of them is new, gone or elsewhere.

    new_state makes the entry of a new request, from its parameters, its prompt and its output, or
    None for a request that needs none.
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
    """Whether that changes anything."""
    was_there = entries.pop(row, None) is not None
    if state is not None:
        entries[row] = state
    return was_there or state is not None


def load(entry: Any) -> Any:
    """One of the `logits_processors` that `LLM` is given -> a class for `VllmProcessor`, or itself.

    A class, or the "package.module:Class" of one, must be such a class; other callables are
    nanoserve's own. Raises `ValueError` for anything else.
    """
    found = _imported(entry) if isinstance(entry, str) else entry
    told = f"logits_processors: {shown(entry)}"
    if not isinstance(found, type):
        require(not isinstance(entry, str), f"{told} is no class, but {shown(found)}")
        require(callable(found), f"{told} is neither a class, the name of one nor a callable")
        return found
    methods = ("update_state", "apply", "is_argmax_invariant")
    lacking = {name for name in methods if not callable(getattr(found, name, None))}
    lacking |= getattr(found, "__abstractmethods__", frozenset())
    require(not lacking, f"{told} is no LogitsProcessor: it has no {', '.join(sorted(lacking))}")
    return found


def _imported(name: str) -> Any:
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ValueError(f"logits_processors: {name!r} must read 'package.module:Class'")
    try:
        found = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the module does when it is imported
        raise ValueError(
            f"logits_processors: {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return found


class VllmProcessor:
    """Runs one such class as an engine-wide processor; see `nanoserve.sampling.processors`.

    What the class raises goes through. An engine has one of its own: its rows are those of a step.
    """

    def __init__(self, processor_class: type, vllm_config: Any) -> None:
        self._class, self._config = processor_class, vllm_config
        self._processor: Any = None  # made where the first logits are
        self._is_invariant = False
        self._rows: dict[SlotState, int] = {}  # of the step before

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
        """Give rows to those that are new, the lowest free ones first.

        A row that is taken over at once is only `added`, as in vLLM.
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
        """logits: [len(rows), vocab_size], which may be overwritten -> what becomes of them."""
        if rows == list(range(len(rows))):
            return _checked(self._processor.apply(logits), logits, self._class)
        index = tensor_of(np.array(rows), logits)
        batch = logits.new_zeros(1 + max(rows), logits.shape[1])
        batch[index] = logits
        return _checked(self._processor.apply(batch), batch, self._class)[index]

    def _apply_sampling(
        self, logits: torch.Tensor, states: "list[SlotState]", rows: list[int]
    ) -> None:
        """As vLLM does it for classes that never change the most likely token.

        A filter by probabilities expects them as they are drawn from. The temperature comes after
        us, so what was changed is multiplied by it, and what was not stays the same to the bit.
        """
        is_greedy = tensor_of(np.array([s.params.is_greedy for s in states]), logits)
        given = [1.0 if s.params.is_greedy else s.params.temperature for s in states]
        temperature = tensor_of(np.array(given, dtype=np.float32), logits).unsqueeze(1)
        before = logits / temperature
        after = self._apply(before.clone(), rows)
        is_kept = (after == before) | is_greedy.unsqueeze(1)
        logits.copy_(torch.where(is_kept, logits, after * temperature))


def _checked(result: Any, given: torch.Tensor, source: Any) -> torch.Tensor:
    """What a processor returned for `given`; torch would broadcast anything."""
    name = getattr(source, "__qualname__", type(source).__qualname__)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"{name} returned {type(result).__name__}, and must return the logits")
    if result.shape != given.shape or not result.is_floating_point():
        raise ValueError(
            f"{name} returned {result.dtype} of shape {list(result.shape)}, and must return "
            f"floating-point logits of shape {list(given.shape)}"
        )
    return result
