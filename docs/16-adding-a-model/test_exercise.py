"""Does a Heron checkpoint give the tokens of a plain reference?"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models import registry
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.tensor_parallel import TensorParallel

from .exercise import HeronForCausalLM

VOCAB, HIDDEN, SIZE, LAYERS, HEADS, KV_HEADS, DIM, EPS, THETA = 96, 32, 64, 2, 4, 2, 8, 1e-5, 1e4
Weights = dict[str, torch.Tensor]


def make_heron(path: Path) -> Weights:
    """A tiny random checkpoint. With small weights all logits would nearly tie."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    norms = ["model.norm.weight"]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.self_attn.qkv_proj.weight"] = ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * DIM)
        shapes[f"{layer}.mlp.up_proj.weight"] = (SIZE, HIDDEN)
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, SIZE)
        norms += [f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"]
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    weights |= {name: 0.5 + torch.rand(HIDDEN, generator=generator) for name in norms}
    save_file(weights, path / "model.safetensors")
    config = {"architectures": ["HeronForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN}
    config |= {"intermediate_size": SIZE, "num_hidden_layers": LAYERS, "head_dim": DIM}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config |= {"max_position_embeddings": 128, "rms_norm_eps": EPS, "rope_theta": THETA}
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return weights


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + DIM / 2) of [num_tokens, heads, DIM], by the token's position."""
    frequencies = THETA ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(len(x)).float(), frequencies)[:, None]
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def reference(weights: Weights, token_ids: list[int]) -> torch.Tensor:
    """Logits [num_tokens, VOCAB] of the whole sequence at once, without a cache."""
    n = len(token_ids)
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    x = weights["model.embed_tokens.weight"][token_ids] * HIDDEN**0.5
    for i in range(LAYERS):
        w = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        heads = F.linear(norm(x, w["input_layernorm.weight"]), w["self_attn.qkv_proj.weight"])
        q, k, v = heads.view(n, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (rotate(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotate(q), k) / DIM**0.5
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", mixed, v).flatten(1)
        x = x + F.linear(mixed, w["self_attn.o_proj.weight"])
        up = F.linear(norm(x, w["post_attention_layernorm.weight"]), w["mlp.up_proj.weight"])
        x = x + F.linear(up.relu() ** 2, w["mlp.down_proj.weight"])
    return F.linear(norm(x, weights["model.norm.weight"]), weights["lm_head.weight"])


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Weights:
    monkeypatch.setattr(registry.MODELS, "_entries", registry.MODELS.entries())
    registry.register_model("HeronForCausalLM", HeronForCausalLM)
    return make_heron(tmp_path)


def test_greedy_tokens_are_those_of_the_reference(weights: Weights, tmp_path: Path) -> None:
    prompts = [[(i * i + 7 * j + j * j % 5) % VOCAB for j in range(1 + 11 * i)] for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "attention_backend": "torch"}
    with LLM(tmp_path, skip_tokenizer_init=True, device="cpu", **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ours = output.outputs[0].token_ids
        logits = reference(weights, prompt + ours)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ours)[:, None])[:, 0]
        assert (logits.max(dim=-1).values - chosen < 1e-4).all(), (prompt, ours)


@torch.inference_mode()
def test_the_feed_forwards_of_two_ranks_add_up(weights: Weights, tmp_path: Path) -> None:
    """Without a process group no sum is taken: each rank returns its summand."""
    config, x = ModelConfig.from_checkpoint(tmp_path), torch.randn(3, HIDDEN)
    summands = []
    for rank in range(2):
        parallel = ParallelContext(TensorParallel(rank, 2))
        model = HeronForCausalLM(config, LayerContext(parallel=parallel))
        load_weights(model, tmp_path)
        summands.append(model.model.layers[1].mlp(x))
    up = F.linear(x, weights["model.layers.1.mlp.up_proj.weight"])
    whole = F.linear(up.relu() ** 2, weights["model.layers.1.mlp.down_proj.weight"])
    case = f"the feed-forward of layer 1 on {x.tolist()}"
    torch.testing.assert_close(sum(summands), whole, msg=lambda message: f"{message}\n{case}")


@torch.inference_mode()
def test_each_rank_keeps_its_heads_of_the_fused_tensor(weights: Weights, tmp_path: Path) -> None:
    config = ModelConfig.from_checkpoint(tmp_path)
    model = HeronForCausalLM(config, LayerContext(parallel=ParallelContext(TensorParallel(1, 2))))
    load_weights(model, tmp_path)
    fused = weights["model.layers.0.self_attn.qkv_proj.weight"]
    q, k, v = fused.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM])
    mine = torch.cat([part.chunk(2)[1] for part in (q, k, v)])
    found = model.model.layers[0].self_attn.qkv_proj.weight
    assert torch.equal(found, mine), f"rank 1 of 2 has {tuple(found.shape)}: {found}"
