"""Layers split over 2 and 4 ranks give what one gives. The ranks are threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_checkpoints import make_checkpoint, make_qwen3, prompt_logits
from torch import nn
from transformers import MixtralForCausalLM

from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.features.parallel.process_group import Group, join_group
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanoserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.models.mixtral import MixtralForCausalLM as OurMixtral
from nanoserve.models.qwen3 import Qwen3ForCausalLM

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
HIDDEN = 24
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


def on_ranks(size: int, work: Callable[[LayerContext], T]) -> list[T]:
    """What `work` returns on each rank."""
    store = dist.HashStore()
    groups = []  # to the end: a rank that has gone may not yet have met all others

    @torch.inference_mode()
    def one_rank(rank: int) -> T:
        group = None
        if size > 1:
            group = join_group(rank, size, store, torch.device("cpu"), timeout=60)
            groups.append(group)
        return work(LayerContext(parallel=ParallelContext(TensorParallel(rank, size, group))))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one_rank, range(size)))


def context_of(rank: int, size: int) -> LayerContext:
    """For layers that are built but do not communicate."""
    return LayerContext(parallel=ParallelContext(TensorParallel(rank, size)))


def fill(layer: nn.Module, own_name: str, whole: Tensors) -> None:
    """Each of the layer's parameters from its part of the whole tensors, as the loader does it."""
    for parameter in layer.parameters():
        parameter.fill_(torch.nan)  # whatever stays unfilled shows
    names = set()
    for target in layer.checkpoint_tensors(own_name):
        source = whole[target.name]
        assert target.shape == source.shape
        length = target.destination.shape[target.dim]
        target.destination.copy_(source.narrow(target.dim, target.start, length))
        names.add(target.name)
    assert names == set(whole)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def projections(sizes: dict[str, int], bias: bool) -> Tensors:
    tensors = {}
    for i, (name, out_features) in enumerate(sizes.items()):
        tensors[f"{name}.weight"] = random(out_features, HIDDEN, seed=100 * i)
        if bias:
            tensors[f"{name}.bias"] = random(out_features, seed=100 * i)
    return tensors


def apply(x: torch.Tensor, whole: Tensors, name: str) -> torch.Tensor:
    return F.linear(x, whole[f"{name}.weight"], whole.get(f"{name}.bias"))


X = random(5, HIDDEN)


@SIZES
@pytest.mark.parametrize("bias", [False, True])
def test_each_rank_of_a_fused_projection_has_its_part_of_each_output(size: int, bias: bool) -> None:
    outputs = {"gate_proj": 16, "up_proj": 32}
    whole = projections(outputs, bias)

    def work(context: LayerContext) -> torch.Tensor:
        layer = ColumnParallelLinear(HIDDEN, outputs, context, bias=bias)
        fill(layer, "gate_up_proj", whole)
        return layer(X)

    gate, up = (apply(X, whole, name).chunk(size, dim=-1) for name in outputs)
    for rank, y in enumerate(on_ranks(size, work)):
        torch.testing.assert_close(y, torch.cat([gate[rank], up[rank]], dim=-1))


@pytest.mark.small(size=[4])
@SIZES
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_ranks_share_kv_heads_when_there_are_fewer_heads_than_ranks(
    size: int, num_kv_heads: int, bias: bool
) -> None:
    num_heads, head_dim = 4, 6
    outputs = {
        "q_proj": num_heads * head_dim,
        "k_proj": num_kv_heads * head_dim,
        "v_proj": num_kv_heads * head_dim,
    }
    whole = projections(outputs, bias)
    kv_slices = min(size, num_kv_heads)

    def work(context: LayerContext) -> torch.Tensor:
        slices = {"k_proj": kv_slices, "v_proj": kv_slices}
        layer = ColumnParallelLinear(HIDDEN, outputs, context, bias=bias, num_slices=slices)
        fill(layer, "qkv_proj", whole)
        return layer(X)

    q, k, v = (apply(X, whole, name).unflatten(-1, (-1, head_dim)) for name in outputs)
    for rank, y in enumerate(on_ranks(size, work)):
        q_heads = range(rank * num_heads // size, (rank + 1) * num_heads // size)
        kv_heads = sorted({head * num_kv_heads // num_heads for head in q_heads})
        expected = torch.cat([q[:, q_heads], k[:, kv_heads], v[:, kv_heads]], dim=1)
        torch.testing.assert_close(y, expected.flatten(1))


@SIZES
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_parallel_linear_sums_the_ranks_and_adds_its_bias_once(size: int, bias: bool) -> None:
    whole = projections({"down_proj": 10}, bias)

    def work(context: LayerContext) -> torch.Tensor:
        layer = RowParallelLinear(HIDDEN, 10, context, bias=bias)
        fill(layer, "down_proj", whole)
        return layer(X.chunk(size, dim=-1)[context.tp.rank])

    for y in on_ranks(size, work):
        torch.testing.assert_close(y, apply(X, whole, "down_proj"))


@SIZES
@pytest.mark.parametrize("vocab_size", [5, 8, 301])
def test_a_vocab_parallel_embedding_looks_every_token_up(size: int, vocab_size: int) -> None:
    whole = {"embed_tokens.weight": random(vocab_size, HIDDEN)}
    ids = torch.arange(vocab_size, dtype=torch.int32)

    def work(context: LayerContext) -> torch.Tensor:
        layer = VocabParallelEmbedding(vocab_size, HIDDEN, context)
        padding = layer.weight[layer.num_here :].clone()
        fill(layer, "embed_tokens", whole)
        layer.weight[layer.num_here :] = padding
        return layer(ids)

    for y in on_ranks(size, work):
        assert torch.equal(y, whole["embed_tokens.weight"])


@pytest.mark.small(size=[4])
@SIZES
@pytest.mark.parametrize("vocab_size", [5, 8, 301])
@pytest.mark.parametrize("tie", [False, True])
def test_a_parallel_head_gathers_the_logits_of_the_whole_vocabulary(
    size: int, vocab_size: int, tie: bool
) -> None:
    weight = random(vocab_size, HIDDEN)

    def work(context: LayerContext) -> torch.Tensor:
        head = ParallelLMHead(vocab_size, HIDDEN, context)
        if tie:
            embedding = VocabParallelEmbedding(vocab_size, HIDDEN, context)
            head.tie(embedding)
            fill(embedding, "embed_tokens", {"embed_tokens.weight": weight})
        else:
            fill(head, "lm_head", {"lm_head.weight": weight})
        return head(X)

    logits, *others = on_ranks(size, work)
    torch.testing.assert_close(logits, F.linear(X, weight))
    assert others == [None] * (size - 1)  # only rank 0 samples, so only it needs them


@pytest.mark.small(size=[4], tie_word_embeddings=[True])
@SIZES
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_a_whole_model_split_over_ranks_has_the_logits_of_transformers(
    tmp_path: Path, size: int, num_key_value_heads: int, tie_word_embeddings: bool
) -> None:
    reference = make_qwen3(
        tmp_path,
        vocab_size=301,
        num_key_value_heads=num_key_value_heads,
        tie_word_embeddings=tie_word_embeddings,
        attention_bias=True,
    )
    config = ModelConfig.from_checkpoint(tmp_path)
    ids = [(7 * i * i + i) % 301 for i in range(20)]

    def work(context: LayerContext) -> torch.Tensor:
        model = Qwen3ForCausalLM(config, context)
        load_weights(model, tmp_path)
        return prompt_logits(model, ids)

    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    logits, *_ = on_ranks(size, work)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.small(size=[4])
@SIZES
@pytest.mark.parametrize("num_experts", [3, 4])  # a rank may have one more than others, or none
def test_whole_experts_are_distributed_over_the_ranks(
    tmp_path: Path, size: int, num_experts: int
) -> None:
    settings = {"num_local_experts": num_experts, "vocab_size": 301}
    reference = make_checkpoint(MixtralForCausalLM, tmp_path, **settings)
    config = ModelConfig.from_checkpoint(tmp_path)
    ids = [(7 * i * i + i) % 301 for i in range(20)]

    def work(context: LayerContext) -> tuple[torch.Tensor, range]:
        model = OurMixtral(config, context)
        load_weights(model, tmp_path)
        experts = model.model.layers[0].mlp
        end = experts.first_expert + len(experts.down)
        return prompt_logits(model, ids), range(experts.first_expert, end)

    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    logits, experts_of_rank = zip(*on_ranks(size, work), strict=True)
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)
    assert [e for experts in experts_of_rank for e in experts] == [*range(num_experts)]
    counts = [len(experts) for experts in experts_of_rank]
    assert max(counts) - min(counts) <= 1


# ---------------------------------------------------------------- what does not divide


def test_outputs_that_the_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"up_proj has 10 outputs.* 4 ranks"):
        ColumnParallelLinear(HIDDEN, {"gate_proj": 8, "up_proj": 10}, context_of(0, 4))


def test_inputs_that_the_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"in_features=10 .*tensor_parallel_size=4"):
        RowParallelLinear(10, 8, context_of(0, 4))


def test_slices_that_the_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"k_proj.*\b3\b.*\b4\b"):
        ColumnParallelLinear(HIDDEN, {"k_proj": 12}, context_of(0, 4), num_slices={"k_proj": 3})


@pytest.mark.parametrize(
    ("size", "num_attention_heads", "num_key_value_heads", "told"),
    [
        (4, 6, 2, "num_attention_heads=6"),
        (2, 6, 3, "num_key_value_heads=3"),  # three heads over two ranks
        (4, 12, 3, "num_key_value_heads=3"),  # four ranks over three heads
    ],
)
def test_heads_that_the_ranks_cannot_share_are_refused(
    size: int, num_attention_heads: int, num_key_value_heads: int, told: str
) -> None:
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    with pytest.raises(ValueError, match=told):
        Qwen3ForCausalLM(ModelConfig.from_hf(config, {}), context_of(0, size))


def test_ranks_agree_on_the_least_that_one_of_them_has() -> None:
    assert on_ranks(4, lambda context: context.parallel.smallest(100 - context.tp.rank)) == [97] * 4
    assert ParallelContext().smallest(7) == 7


class LateWork:
    """A collective that ends while the wait for it gives up, as one of a busy machine may."""

    def __init__(self, error: str | None) -> None:
        self.error, self.has_ended = error, False

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> "LateWork":
        return self

    def is_completed(self) -> bool:
        return self.has_ended

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.has_ended:
            self.has_ended = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def test_a_collective_that_ends_as_the_wait_for_it_does() -> None:
    Group(LateWork(error=None), None, torch.device("cpu")).all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="Connection closed"):
        Group(LateWork("Connection closed"), None, torch.device("cpu")).all_reduce(torch.ones(1))
