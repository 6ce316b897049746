"""The course's KV-cache arithmetic, W1 to W4, by the functions that size the engine's pool."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanoserve.attention.flash import FlashAttention
from nanoserve.attention.kv_cache import KVCache, KVCacheSpec
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.kv_groups import group_layers
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.pipeline_parallel import PipelineParallel
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.worker.gpu_memory import GPUMemory
from nanoserve.worker.kv_cache import (
    KVCacheLayout,
    allocate_kv_caches,
    decide_num_kv_blocks,
    kv_block_bytes,
)

MIB, GIB = 2**20, 2**30


def model(layers: int, kv_heads: int, head_dim: int = 128) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        attention_scale=128**-0.5,
        sliding_windows=(None,) * layers,
        dtype="float16",
    )


LLAMA_2_7B = model(layers=32, kv_heads=32)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(512, 256 * MIB), (1024, 512 * MIB), (2048, GIB), (4096, 2 * GIB), (8192, 4 * GIB)],
)
def test_w1_llama_2_7b(num_tokens: int, expected: int) -> None:
    assert num_tokens * LLAMA_2_7B.kv_bytes_per_token() == expected


def test_w2_grouped_queries_divide_the_cache_of_llama_2_70b() -> None:
    grouped = 4096 * model(layers=80, kv_heads=8).kv_bytes_per_token()
    full = 4096 * model(layers=80, kv_heads=64).kv_bytes_per_token()
    assert grouped == 1_342_177_280 and full == 10_737_418_240
    assert full / grouped == 8


def test_w3_how_many_users_fit_into_64_gib() -> None:
    reserved = 4096 * LLAMA_2_7B.kv_bytes_per_token()
    assert 64 * GIB // reserved == 32
    assert 64 * GIB // (300 * LLAMA_2_7B.kv_bytes_per_token()) == 436  # to the token
    pool = 64 * GIB // kv_block_bytes(EngineConfig("x"), LLAMA_2_7B)
    per_user = BlockManager(1, 16).blocks_needed(300)
    assert per_user == 19 and per_user * kv_block_bytes(EngineConfig("x"), LLAMA_2_7B) == 152 * MIB
    assert pool // per_user == 431  # paged


def test_w4_what_preallocation_wastes_and_paging_does_not() -> None:
    per_token = LLAMA_2_7B.kv_bytes_per_token()
    reserved, used = 4096 * per_token, 100 * per_token
    assert (reserved, used) == (2 * GIB, 50 * MIB)
    assert 1 - used / reserved == pytest.approx(0.9756, abs=1e-4)
    used = [tokens * per_token for tokens in (100, 200, 60, 400)]
    assert [part / MIB for part in used] == [50, 100, 30, 200]
    assert 1 - sum(used) / (4 * reserved) == pytest.approx(0.9536, abs=1e-4)
    for num_tokens, blocks, waste in ((100, 7, 0.107), (300, 19, 0.013)):
        assert BlockManager(1, 16).blocks_needed(num_tokens) == blocks
        assert 1 - num_tokens / (blocks * 16) == pytest.approx(waste, abs=1e-3)


def test_the_pool_follows_the_options() -> None:
    block = kv_block_bytes(EngineConfig("x"), LLAMA_2_7B)

    def decide(**options: Any) -> int:
        return decide_num_kv_blocks(EngineConfig("x", **options), LLAMA_2_7B, block, 16 * GIB)

    assert decide(num_kv_blocks=77) == 77
    # One block of the memory is the dummy block.
    assert decide(kv_cache_memory_bytes=10 * block) == 9
    with pytest.raises(ValueError, match=str(block)):
        decide(kv_cache_memory_bytes=2 * block - 1)
    with pytest.raises(ValueError, match=str(16 * GIB)):
        decide(kv_cache_memory_bytes=17 * GIB)
    assert decide(max_num_seqs=1, max_model_len=64) == 4  # no more than can ever be used
    assert decide() == 4 * GIB // block - 1  # nor more than a quarter of the memory, or 4 GiB


def layout(config: EngineConfig, context: LayerContext | None = None) -> KVCacheLayout:
    return KVCacheLayout.of(config, LLAMA_2_7B, context or LayerContext())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_a_rank_has_its_heads_and_a_stage_its_layers(kv_cache_dtype: str) -> None:
    config = EngineConfig("x", kv_cache_dtype=kv_cache_dtype)
    block = kv_block_bytes(config, LLAMA_2_7B)
    assert layout(config).block_bytes == block
    two = ParallelContext(TensorParallel(0, 2))
    assert layout(config, LayerContext(parallel=two)).block_bytes == block // 2
    stage = replace(two, pp=PipelineParallel(1, 4, range(8, 16)))
    of_stage = layout(config, LayerContext(parallel=stage))
    assert of_stage.block_bytes == block // 8
    assert of_stage.layers_here == range(8, 16)


def test_in_8_bits_a_head_takes_a_byte_for_each_number_and_a_scale() -> None:
    assert LLAMA_2_7B.kv_bytes_per_token("int8") == 2 * 32 * 32 * (128 + 4) == 270_336
    config = EngineConfig("x", kv_cache_memory_bytes=64 * GIB, kv_cache_dtype="int8")
    block = kv_block_bytes(config, LLAMA_2_7B)
    assert block == 16 * 270_336
    num_blocks = decide_num_kv_blocks(config, LLAMA_2_7B, block, memory_bytes=80 * GIB)
    assert num_blocks == 64 * GIB // block - 1
    assert num_blocks / (64 * GIB // (16 * 524_288) - 1) == pytest.approx(256 / 132, abs=1e-3)
    # A GPU's, too, counts the scales.
    gpu = GPUMemory(total=80 * GIB, free=80 * GIB, weights=GIB, activations=GIB, graphs=0)
    sizes = {}
    for dtype in ("auto", "int8", "fp8_e4m3"):
        config = EngineConfig("x", kv_cache_dtype=dtype)
        sizes[dtype] = gpu.num_kv_blocks(config, LLAMA_2_7B, layout(config).block_bytes)
    assert sizes["int8"] == sizes["fp8_e4m3"] == 70 * GIB // block - 1
    assert sizes["auto"] == 70 * GIB // (16 * 524_288) - 1


def test_a_backend_that_keeps_no_codes_is_refused_before_anything_is_counted() -> None:
    context = LayerContext(attention=FlashAttention())
    with pytest.raises(ValueError, match=r"kv_cache_dtype='int8'.*flash-attn"):
        layout(EngineConfig("x", kv_cache_dtype="int8"), context)


# ---------------------------------------------------------------- groups of layers

# Two of eight layers have full attention: a group of these, and three of the others.
GROUPS = group_layers([4, 4, None, 4, 4, None, 4, 4])
CPU = torch.device("cpu")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("layers_here", [range(8), range(3), range(3, 8)])
def test_layers_of_different_groups_share_memory(layers_here: range, kv_cache_dtype: str) -> None:
    spec = KVCacheSpec.of_format(4, 2, 8, torch.float32, kv_cache_dtype)
    assert [group.window for group in GROUPS] == [None, 4, 4, 4]
    caches = allocate_kv_caches(spec, GROUPS, layers_here, 5, CPU)
    assert len(caches) == len(layers_here)
    # 1) Each layer knows its group; of a group, each has memory of its own.
    by_group: dict[int, list[KVCache]] = {}
    for layer, cache in zip(layers_here, caches, strict=True):
        assert layer in GROUPS[cache.group].layers
        assert cache.values.shape == (2, 6, 2, 4, 8)  # with the dummy block
        assert (cache.scales is None) == (kv_cache_dtype == "auto")
        by_group.setdefault(cache.group, []).append(cache)
    for own in by_group.values():
        assert len({cache.values.data_ptr() for cache in own}) == len(own)
    # 2) The j-th layer of a group has the memory of the j-th of the others.
    most = max(map(len, by_group.values()))
    for j in range(most):
        same = [own[j] for own in by_group.values() if j < len(own)]
        for part in ("values", "scales"):
            pointers = {getattr(x, part).data_ptr() for x in same if getattr(x, part) is not None}
            assert len(pointers) <= 1
    # 3) All that there is, is what the sizes say.
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for cache in caches
        for x in (cache.values, cache.scales)
        if x is not None
    }
    block_bytes = KVCacheLayout(spec, GROUPS, layers_here).block_bytes
    assert block_bytes == most * spec.block_bytes
    assert sum(storages.values()) == 6 * block_bytes
