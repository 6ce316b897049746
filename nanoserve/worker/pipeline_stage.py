"""A stage of a pipeline: some of the model's layers, and what passes from it to the next.

Huang et al. 2018 ("GPipe"): a model is cut between layers, and each part has devices of its own.
Unlike tensor parallelism, which talks twice in each layer, a stage sends one tensor a step,
[num_tokens, hidden_size]; so stages may be far apart, and one of them is busy only while a step is
in it. They are all busy when as many steps are under way (`nanoserve.engine.pipeline`).

Nothing in a model knows of stages. The first one embeds tokens; in the others, what was received
takes the place of that. The last one has the final norm and the head; in the others, a sender has.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nanoserve.checkpoint.loader import expected_tensors
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checks import require
from nanoserve.layers.context import LayerContext
from nanoserve.layers.tensor_parallel import TensorParallel
from nanoserve.models.registry import model_class
from nanoserve.worker.process_group import Group


@dataclass
class Stage:
    """One stage, as one of its ranks sees it.

    Rank 0, which samples, is in the last stage: so no token travels, and the brain plans while the
    others compute. `layers` are those computed here. `before` joins this rank to one of the stage
    before, `behind` to one of the next; `world` is all ranks'.
    """

    index: int
    num_stages: int
    layers: range
    world: Group | None = None
    before: Group | None = None
    behind: Group | None = None
    span: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of the last step, when it ran
    _sent: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def part_of(self, whole: type[nn.Module]) -> Callable[[ModelConfig, LayerContext], nn.Module]:
        """What builds this stage of models of the class `whole`."""

        def build(config: ModelConfig, context: LayerContext) -> nn.Module:
            # Other stages' layers are built without memory (`LayerContext.of_layer`), then dropped:
            # models may look at all of theirs.
            model = whole(config, context)
            everywhere = expected_tensors(model).keys()
            self._cut(model, context)
            model.elsewhere = everywhere - expected_tensors(model).keys()
            return model

        return build

    def _cut(self, model: nn.Module, context: LayerContext) -> None:
        """Leave what is computed here; its names stay those of the checkpoint."""
        body = model.model
        for index in set(range(len(body.layers))) - set(self.layers):
            delattr(body.layers, str(index))  # `del` would give the others new names
        hidden_size, dtype = model.config.hidden_size, context.dtype
        if not self.is_first:
            if not (self.is_last and model.tied_tensors):  # else the head is the embedding
                body.embed_tokens = Elsewhere(body.embed_tokens)
            body.embed = Receiver(self, hidden_size, dtype, context.device)
        else:
            body.embed = Beginning(self, body.embed)
        if not self.is_last:
            body.norm, model.lm_head = Sender(self), Elsewhere(model.lm_head)

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill `hidden`, [num_tokens, hidden_size], with what the stage before has sent."""
        self.before.broadcast(hidden.view(torch.uint8))
        self.span[0] = time.perf_counter()
        return hidden

    def send(self, hidden: Tensor) -> None:
        """To the next stage, which may be busy: this one goes on with its next step meanwhile."""
        self.span[1] = time.perf_counter()
        while len(self._sent) >= self.num_stages:  # so many steps are under way at most
            work, _ = self._sent.popleft()
            self.behind.wait(work)
        work = self.behind.start_broadcast(hidden.view(torch.uint8))
        self._sent.append((work, hidden))


class Beginning:
    """Embeds tokens, and notes when: `embed` is the model's own method."""

    def __init__(self, stage: Stage, embed: Callable[[Tensor], Tensor]) -> None:
        self._stage, self._embed = stage, embed

    def __call__(self, input_ids: Tensor) -> Tensor:
        self._stage.span[0] = time.perf_counter()
        return self._embed(input_ids)


class Receiver:
    """In the place of the model's `embed`: what its tokens have become in the stages before."""

    def __init__(
        self, stage: Stage, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stage, self._hidden_size = stage, hidden_size
        self._kind = {"dtype": dtype, "device": device}

    def __call__(self, input_ids: Tensor) -> Tensor:
        return self._stage.receive(torch.empty(len(input_ids), self._hidden_size, **self._kind))


class Sender(nn.Module):
    """In the place of the final norm: the residual stream, with the last block's output, goes on.

    The next stage begins with it as the first one does with embeddings, and adds nothing to it.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def add(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + hidden
        self._stage.send(total)
        return total, total


class Elsewhere(nn.Module):
    """In the place of an embedding or a head that another stage has. There are no logits of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.method = getattr(layer, "method", None)
        self.weight = layer.weight[:0]  # nothing of its memory, but its dtype
        if not self.weight.is_meta:
            self.weight = self.weight.clone()

    def forward(self, hidden: Tensor) -> None:
        return None


def share_layers(model_config: ModelConfig, num_stages: int) -> list[range]:
    """The layers of each stage, so that the largest has as few weights as can be.

    The head counts as a part of the last one: for each sampled token it is read as a layer is.
    Where several shares are equally good, the last stages are filled first. Raises `ValueError` for
    fewer layers than stages.
    """
    num_layers = model_config.num_hidden_layers
    require(
        num_layers >= num_stages,
        f"pipeline_parallel_size={num_stages} stages, but the model has {num_layers} layers",
    )
    meta = LayerContext(device=torch.device("meta"), num_positions=1)
    model = model_class(model_config.architecture)(model_config, meta)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    head = sum(p.numel() for p in model.lm_head.parameters())
    # From the last stage to the first: how far each goes back under a bound that all keep.
    for bound in sorted(_bounds(sizes, head)):
        starts = _starts_under(bound, sizes, head, num_stages)
        if starts is not None:
            break
    return [range(a, b) for a, b in zip(starts, [*starts[1:], num_layers], strict=True)]


def _bounds(sizes: list[int], head: int) -> set[int]:
    """Every sum that a stage may have."""
    num_layers = len(sizes)
    inner = {sum(sizes[a:b]) for a in range(num_layers) for b in range(a + 1, num_layers + 1)}
    return inner | {head + sum(sizes[a:]) for a in range(num_layers)}


def _starts_under(bound: int, sizes: list[int], head: int, num_stages: int) -> list[int] | None:
    """The first layer of each stage if none is larger than `bound`; None if that cannot be."""
    starts, end, taken = [], len(sizes), head
    for stage in reversed(range(num_stages)):
        start, total = end, taken
        # Each of the stages before needs a layer.
        while start > stage and (start == end or total + sizes[start - 1] <= bound):
            start -= 1
            total += sizes[start]
        if total > bound or (stage == 0 and start > 0):
            return None
        starts.append(start)
        end, taken = start, 0
    return starts[::-1]


def join_stage(
    num_stages: int,
    tp_size: int,
    rank: int,
    model_config: ModelConfig,
    join: Callable[[str, int, int], Group],
) -> TensorParallel:
    """This rank's place. Ranks 0 to `tp_size` - 1 are the last stage, the next ones that before.

    `join(name, rank, size)` meets a group. All ranks meet theirs in the order of stages.
    """
    index, tp_rank = num_stages - 1 - rank // tp_size, rank % tp_size
    stage = Stage(index, num_stages, share_layers(model_config, num_stages)[index])
    stage.world = join("world", rank, num_stages * tp_size)
    group = join(f"stage {index}", tp_rank, tp_size) if tp_size > 1 else None
    if not stage.is_first:
        stage.before = join(f"link {index - 1} {tp_rank}", 1, 2)
    if not stage.is_last:
        stage.behind = join(f"link {index} {tp_rank}", 0, 2)
    return TensorParallel(tp_rank, tp_size, group, stage)
