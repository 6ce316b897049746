"""Which layers each stage of a pipeline has, and where a rank finds its stage.

What a stage is, and how tensors pass from one to the next: `nanoserve.models.layers.pipeline_parallel`.
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

# (stage, first layer, the one behind the last) -> if a stage may have these layers. Where it may,
# it may have fewer of them, too.
Fits = Callable[[int, int, int], bool]


def check_stages(model_config: ModelConfig, num_stages: int) -> None:
    """Raise `ValueError`, before any process is started, for a model that has no such stages."""
    first = PipelineParallel(0, num_stages, share_layers(model_config, num_stages)[0])
    parallel = ParallelContext(pp=first)
    meta = LayerContext(device=torch.device("meta"), parallel=parallel, num_positions=1)
    require(
        bool(tensors_of_other_stages(model_config, meta)),  # else it is a model of one's own
        f"pipeline_parallel_size={num_stages}, but {model_config.architecture} is built whole on "
        f"each stage: its class must build the layers of `context.pp` only, receive and send, as "
        f"nanoserve.models.qwen3.Qwen3Model does",
    )


def share_layers(model_config: ModelConfig, num_stages: int) -> list[range]:
    """Return the layers of each stage: see `split_layers`.

    Raises `ValueError` for fewer layers than stages.
    """
    num_layers = model_config.num_hidden_layers
    require(
        num_layers >= num_stages,
        f"pipeline_parallel_size={num_stages} stages, but the model has {num_layers} layers",
    )
    meta = LayerContext(device=torch.device("meta"), num_positions=1)
    model = model_class(model_config.architecture)(model_config, meta)
    parts = [*model.model.layers, model.model.embed_tokens, model.lm_head]
    *layers, embedding, head = [sum(p.numel() for p in part.parameters()) for part in parts]
    return split_layers(layers, embedding, head, num_stages)


def split_layers(layers: Sequence[int], embedding: int, head: int, num_stages: int) -> list[range]:
    """Split layers into stages: the fastest pipeline, and of those the one with the largest pool.

    `layers` are the numbers of weights of each. The first stage also has the `embedding`, and the
    last one the `head`; if the two are tied, both stages have these weights.

    1. A pipeline is as fast as its slowest stage, and in a step a stage reads its weights: those of
       its layers and of the head, but of the embedding only a row for each token. So the most that
       a stage reads is as little as can be.
    2. All stages have equally many KV blocks, as many as fit where the fewest do. On ranks of equal
       memory that is the smallest (memory - weights) / (layers x bytes of one layer's K and V). So
       the most layers that a stage has are as few as can be.
    3. Among stages with so many layers, the most weights, the embedding included, are as few as
       can be. These two make the pool largest wherever memory is ample beside the weights.

    Qwen3-0.6B has 28 layers, and its tied embedding is as large as 9.9 of them. The slowest of four
    stages reads 10.9 layers' weights at best, the head and one layer: 7/10/10/1 layers do, and so
    do 9/9/9/1, where a block takes the K and V of 9 layers at most, not of 10. (7/7/7/7 would have
    a larger pool still, but its last stage would read 16.9 layers' weights in each step.)

    Of several such splits, this is the one that fills the last stages first.
    """
    sums = [0, *accumulate(layers)]

    def read(stage: int, first: int, end: int) -> int:
        return sums[end] - sums[first] + (head if stage == num_stages - 1 else 0)

    def kept(stage: int, first: int, end: int) -> int:
        return read(stage, first, end) + (embedding if stage == 0 else 0)

    def starts(*limits: int) -> list[int] | None:
        """Return the first layer of each stage under limits of 1, 2, 3; None if there is none."""
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
    """Return the first layer of each stage, if stages that fit can hold all layers; else None.

    From the last stage to the first, each takes as many as fit, and leaves one for each before it.
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
    """Return this rank's place, when it has met the other ranks.

    Ranks 0 to `tp_size` - 1 are the last stage, the next ones that before.
    `join(name, rank, size)` meets a group. All ranks meet theirs in the order of stages.
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
