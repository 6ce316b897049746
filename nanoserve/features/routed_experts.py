"""Return the experts that computed each token (`enable_return_routed_experts=True`).

A trainer of a mixture of experts replays these routes: `nanoserve.models.layers.routed_experts`.
So they must be those with which the K and V in the cache were computed, whatever happened to the
request. The runner returns the routes of all tokens of a step, and they are kept in two places:

    by KV slot    until the slot is written again, like its K and V: a prefix-cache hit finds the
                  routes of its tokens in the same blocks
    by sequence   until it ends: its blocks may be freed before, by a preemption or behind a sliding
                  window, and are free when its last result is read

Steps end in the order in which they were launched. So when the result of a step is read, each slot
has the routes with which the K and V that this step has read were computed.
"""

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nanoserve.engine.executor import ForwardInputs, StepResult
from nanoserve.engine.extension import Extension, PreparedFeature
from nanoserve.engine.kv_groups import kv_cache_groups
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.routed_experts import RoutedExperts, expert_id_dtype
from nanoserve.models.registry import model_class
from nanoserve.utils.checks import require
from nanoserve.worker.heads import ROUTED_EXPERTS, StepRoutes

if TYPE_CHECKING:
    from nanoserve.checkpoint.model_config import ModelConfig
    from nanoserve.config import EngineConfig
    from nanoserve.engine.guard import GuardedEngine


class SequenceRoutes:
    """The routes of one sequence: `expert_ids` [max_num_tokens, num_layers, top_k].

    Only the first `num_tokens` are set: tokens that are computed and were not rejected.
    """

    def __init__(self, expert_ids: np.ndarray) -> None:
        self.expert_ids, self.num_tokens = expert_ids, 0

    def write(self, start: int, expert_ids: np.ndarray) -> None:
        """Store the routes of the tokens from `start` on, the last ones that are computed."""
        self.num_tokens = start + len(expert_ids)
        self.expert_ids[start : self.num_tokens] = expert_ids


class LaunchedStep(NamedTuple):
    """A step in flight.

    routes: of the sequence of each row.
    hits: of the sequences that are new in this step, the blocks of their prefix-cache hits. They
        are noted here because they may be freed before the result of the step is read.
    """

    routes: list[SequenceRoutes]
    hits: list[tuple[SequenceRoutes, list[int]]]


class ReturnRoutedExperts(Extension):
    """Collects the routes of every sequence, and adds them to its completion when it ends."""

    def __init__(self, engine: "GuardedEngine") -> None:
        config, model_config, moe = engine.config, engine.model_config, engine.model_config.moe
        self._requests = engine.output_processor.requests
        self._shape = (model_config.num_hidden_layers, moe.num_experts_per_tok)
        self._dtype, self._block_size = np.dtype(expert_id_dtype(moe)), config.block_size
        self._by_slot: np.ndarray | None = None  # [num_slots, num_layers, top_k]
        if config.enable_prefix_caching:
            # The system provides zeroed memory page by page, on first use.
            num_slots = (engine.executor.num_kv_blocks + 1) * self._block_size
            self._by_slot = np.zeros((num_slots, *self._shape), self._dtype)
        self._routes: dict[Sequence, SequenceRoutes] = {}
        self._admitted: set[Sequence] = set()  # sequences that had no row since their admission
        self._launched: deque[LaunchedStep] = deque()  # oldest first

    def extend_plan(self, plan: Plan) -> None:
        if plan.admitted:
            self._admitted.update(plan.admitted)

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        step = LaunchedStep([], [])
        for seq, start, *_ in plan.rows:
            routes = self._routes.get(seq)
            if routes is None:
                expert_ids = np.empty((seq.max_num_tokens, *self._shape), self._dtype)
                routes = self._routes[seq] = SequenceRoutes(expert_ids)
            if seq in self._admitted:
                self._admitted.discard(seq)
                if start:
                    step.hits.append((routes, seq.block_table[: start // self._block_size]))
            step.routes.append(routes)
        self._launched.append(step)

    def on_result(self, plan: Plan, result: StepResult) -> None:
        new: StepRoutes = result.of_heads[ROUTED_EXPERTS]
        step = self._launched.popleft()
        if self._by_slot is not None:  # before the hits: one may be on blocks filled in this step
            self._by_slot[new.slots] = new.expert_ids
        for routes, blocks in step.hits:
            by_block = self._by_slot.reshape(-1, self._block_size, *self._shape)
            routes.write(0, by_block[blocks].reshape(-1, *self._shape))
        first, sampled = 0, iter(result.token_ids)
        for row, routes in zip(plan.rows, step.routes, strict=True):
            num_kept = row.n - _num_rejected(row, next(sampled) if row.num_sampled else [])
            routes.write(row.start, new.expert_ids[first : first + num_kept])
            if row.seq.finished:
                self._deliver(row.seq, routes)
            first += row.n

    def on_release(self, seq: Sequence) -> None:
        self._admitted.discard(seq)
        if seq.finished and seq in self._routes:
            # After an abort, these are all; if a step has ended it, `on_result` has the last ones.
            self._deliver(seq, self._routes.pop(seq))

    def on_reset(self) -> None:
        self._admitted.clear()
        self._launched.clear()

    def _deliver(self, seq: Sequence, routes: SequenceRoutes) -> None:
        """Add the routes of a sequence that has ended to its completion.

        Its last token was sampled and not computed. A stop token is not in `token_ids`, so then all
        tokens in `token_ids` have routes.
        """
        request = self._requests.get(seq.request_id)
        if request is None or seq not in request.sequences:
            return  # it was aborted, and another request may use its id
        has_stop_token = seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
        num_tokens = min(routes.num_tokens, len(seq.token_ids) - (not has_stop_token))
        request.completions[seq.index].set_routed_experts(routes.expert_ids[:num_tokens])


def _num_rejected(row: Row, new_ids: list[int]) -> int:
    """Return how many draft tokens of a row were rejected; new_ids: the tokens it has yielded."""
    return max(0, row.num_sampled - max(1, len(new_ids)))


def prepare_routed_experts(config: "EngineConfig", model_config: "ModelConfig") -> PreparedFeature:
    """Return a feature that adds `ReturnRoutedExperts` to an engine.

    Raises `ValueError`, before any weight is read, for a model or options that cannot have it.
    """
    option, name = "enable_return_routed_experts=True", model_config.architecture
    layers, moe = range(model_config.num_hidden_layers), model_config.moe
    expected = set() if moe is None else set(layers) - moe.dense_layers
    require(
        bool(expected),
        f"{option}, but no layer of this {name} has experts: remove the option",
    )
    recorded = _layers_that_record(model_config)
    require(
        recorded == expected,
        f"{option}: layers {sorted(expected - recorded)} of {name} do not record experts: use "
        "nanoserve.models.layers.experts.SparseMoE in them, or remove the option",
    )
    window = kv_cache_groups(config, model_config)[0].window
    require(
        window is None or not config.enable_prefix_caching,
        f"{option}: all layers of this model have a sliding window of {window} tokens, so a cached "
        "prefix keeps only the blocks of its last tokens: set enable_prefix_caching=False or "
        "disable_hybrid_kv_cache_manager=True",
    )
    drafts = config.speculative_config
    require(
        drafts is None or drafts.enforce_eager,
        f"{option}: CUDA graphs of steps with draft tokens move the tokens: add "
        "'enforce_eager': True to speculative_config",
    )
    return PreparedFeature(lambda engine: engine.add_extension(ReturnRoutedExperts(engine)))


def _layers_that_record(model_config: "ModelConfig") -> set[int]:
    """Build the model without memory; return the indices of the layers that record experts."""
    meta = torch.device("meta")
    routes = RoutedExperts(model_config, num_tokens=1, device=meta)
    context = LayerContext(device=meta, num_positions=1, routed_experts=routes)
    model_class(model_config.architecture)(model_config, context)
    return routes.layers
