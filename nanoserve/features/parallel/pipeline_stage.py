"""Assign layers to the stages of a pipeline, and ranks to stages.

See `nanoserve.models.layers.pipeline_parallel` for stages, and for how tensors pass between them.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf

import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.features.parallel.process_group import Group
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.pipeline_parallel import PipelineParallel
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.models.registry import model_class
from nanoserve.utils.checks import require
from nanoserve.worker.load_model import tensors_of_other_stages

# (stage, first layer, last layer + 1) -> True if the stage may have these layers. If so, it may
# also have fewer of them.
Fits = Callable[[int, int, int], bool]


def check_stages(model_config: ModelConfig, num_stages: int) -> None:
    """Raise `ValueError`, before any process is started, if a model cannot be split into stages."""
    first = PipelineParallel(0, num_stages, share_layers(model_config, num_stages)[0])
    parallel = ParallelContext(pp=first)
    meta = LayerContext(device=torch.device("meta"), parallel=parallel, num_positions=1)
    require(
        bool(tensors_of_other_stages(model_config, meta)),  # otherwise a class without stages
        f"pipeline_parallel_size={num_stages} is not supported by {model_config.architecture}, "
        f"which builds all layers on each stage; its class must build only the layers of "
        f"`context.pp`, receive and send, as nanoserve.models.qwen3.Qwen3Model does",
    )


def share_layers(model_config: ModelConfig, num_stages: int) -> list[range]:
    """Return the layers of each stage; see `split_layers`.

    Raises `ValueError` if there are fewer layers than stages.
    """
    num_layers = model_config.num_hidden_layers
    require(
        num_layers >= num_stages,
        f"pipeline_parallel_size={num_stages} must be at most the model's {num_layers} layers",
    )
    meta = LayerContext(device=torch.device("meta"), num_positions=1)
    model = model_class(model_config.architecture)(model_config, meta)
    parts = [*model.model.layers, model.model.embed_tokens, model.lm_head]
    *layers, embedding, head = [sum(p.numel() for p in part.parameters()) for part in parts]
    return split_layers(layers, embedding, head, num_stages)


def split_layers(layers: Sequence[int], embedding: int, head: int, num_stages: int) -> list[range]:
    """Split layers for the fastest pipeline and, among equally fast splits, the largest KV pool.

    `layers` are the numbers of weights of each layer. The first stage also has the `embedding`, and
    the last one the `head`; if the two are tied, both stages have these weights.

    1. A pipeline is as fast as its slowest stage. In a step, a stage reads the weights of its
       layers and of the head, but only one row of the embedding for each token. So the maximum
       over the stages of the weights read is minimized first.
    2. All stages have the same number of KV blocks, limited by the stage where the fewest fit. On
       ranks of equal memory that number is the minimum of (memory - weights) / (layers x bytes of
       one layer's K and V). So the maximum number of layers of a stage is minimized next.
    3. Among the stages with that many layers, the maximum number of weights, the embedding
       included, is minimized. 2 and 3 make the pool largest if memory is ample beside the weights.

    Qwen3-0.6B has 28 layers, and its tied embedding is as large as 9.9 of them. The slowest of four
    stages reads 10.9 layers' weights at best, the head and one layer: 7/10/10/1 layers achieve
    that, and so do 9/9/9/1, where a block holds the K and V of 9 layers at most, not of 10.
    (7/7/7/7 would have a larger pool still, but its last stage would read 16.9 layers' weights in
    each step.)

    If several splits remain, the one that fills the last stages first is returned.
    """
    sums = [0, *accumulate(layers)]

    def read(stage: int, first: int, end: int) -> int:
        return sums[end] - sums[first] + (head if stage == num_stages - 1 else 0)

    def kept(stage: int, first: int, end: int) -> int:
        return read(stage, first, end) + (embedding if stage == 0 else 0)

    def starts(*limits: int) -> list[int] | None:
        """Return each stage's first layer under limits 1, 2 and 3, or None if impossible."""
        most_read, most_layers, most_kept = (*limits, inf, inf)[:3]

        def fits(stage: int, first: int, end: int) -> bool:
            num_layers = end - first
            is_kept = num_layers < most_layers or kept(stage, first, end) <= most_kept
            return is_kept and num_layers <= most_layers and read(stage, first, end) <= most_read

        return _starts(fits, len(layers), num_stages)

    limits: list[int] = []
    for highest in (sums[-1] + head, len(layers), embedding + sums[-1] + head):
        has_split = lambda limit: starts(*limits, limit) is not None  # noqa: E731
        limits.append(bisect_left(range(highest), True, key=has_split))
    found = starts(*limits)
    return [range(a, b) for a, b in pairwise([*found, len(layers)])]


def _starts(fits: Fits, num_layers: int, num_stages: int) -> list[int] | None:
    """Return the first layer of each stage if stages that fit can hold all layers, else None.

    From the last stage to the first, each takes as many layers as fit, and leaves at least one for
    each stage before it.
    """
    starts, end = [], num_layers
    for stage in reversed(range(num_stages)):
        first = end
        while first > stage and fits(stage, first - 1, end):
            first -= 1
        if first == end:
            return None
        starts.append(first)
        end = first
    return starts[::-1] if end == 0 else None


def join_stage(
    num_stages: int,
    tp_size: int,
    rank: int,
    model_config: ModelConfig,
    join: Callable[[str, int, int], Group],
) -> ParallelContext:
    """Join the other ranks, and return this rank's context.

    Ranks 0 to `tp_size` - 1 are the last stage, the next `tp_size` ranks the stage before, and so
    on. `join(name, rank, size)` joins a group. All ranks join their groups in the order of stages.
    """
    index, tp_rank = num_stages - 1 - rank // tp_size, rank % tp_size
    layers, before, behind = share_layers(model_config, num_stages)[index], None, None
    world = join("world", rank, num_stages * tp_size)
    group = join(f"stage {index}", tp_rank, tp_size) if tp_size > 1 else None
    if index > 0:
        before = join(f"link {index - 1} {tp_rank}", 1, 2)
    if index < num_stages - 1:
        behind = join(f"link {index} {tp_rank}", 0, 2)
    pp = PipelineParallel(index, num_stages, layers, before, behind)
    return ParallelContext(TensorParallel(tp_rank, tp_size, group), pp, world)
