"""Sizes by hand, and by the functions that size the engine's pool."""

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.attention.interface import AttentionBackend
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.sequence import Sequence
from nanoserve.worker.gpu_memory import GPUMemory
from nanoserve.worker.kv_cache import decide_num_kv_blocks, kv_block_bytes

from . import worked as kv_cache

MIB, GIB = 2**20, 2**30


def test_llama_2_7b_keeps_half_a_mib_per_token() -> None:
    assert kv_cache.bytes_per_token(32, 32, 128, 2) == 524_288
    rows = kv_cache.growth_table([512, 1024, 2048, 4096, 8192], 524_288).splitlines()[2:]
    sizes = [row.split("|")[2].strip() for row in rows]
    assert sizes == ["256 MiB", "512 MiB", "1,024 MiB", "2,048 MiB", "4,096 MiB"]


def test_opt_13b_as_the_paper_has_it() -> None:
    assert kv_cache.bytes_per_token(40, 40, 128, 2) == 800 * 1024


def test_grouped_queries_divide_the_cache_of_llama_2_70b_by_eight() -> None:
    grouped, full = (4096 * kv_cache.bytes_per_token(80, heads, 128, 2) for heads in (8, 64))
    assert (grouped, full) == (1_342_177_280, 10_737_418_240)
    assert 32 * grouped == 42_949_672_960


KIB_PER_TOKEN = {
    "tiny-qwen3 (bundled)": 1.5, "Qwen2.5-0.5B": 12, "Llama-3.2-1B": 32, "Qwen3-30B-A3B": 96,
    "Qwen3-0.6B": 112, "Llama-3.1-8B": 128, "Qwen3-8B": 144, "LLaMA-2-70B": 320,
    "LLaMA-2-7B": 512,
}  # fmt: skip


@pytest.mark.parametrize("model", kv_cache.MODELS)
def test_every_model_of_the_table(model: str) -> None:
    shape = kv_cache.MODELS[model]
    assert shape.bytes_per_token == KIB_PER_TOKEN[model] * 1024
    config = None
    if model.startswith("tiny"):
        config = ModelConfig.from_checkpoint(bundled_checkpoint("tiny-qwen3"))
    elif model.lower() in SHAPES:
        config = ModelConfig.from_hf(SHAPES[model.lower()], {}, "bfloat16")
    if config is not None:
        assert config.kv_bytes_per_token() == shape.bytes_per_token
        assert config.num_attention_heads == shape.heads


def test_the_table_of_models_is_sorted_by_size() -> None:
    lines = kv_cache.sizes_table(4096).splitlines()
    assert lines[-1] == "| LLaMA-2-7B | 32 | 32 | 32 | 128 | 512.0 KiB | 2,048 MiB |"
    sizes = [float(line.split("|")[6].split()[0]) for line in lines[2:]]
    assert sizes == sorted(sizes) and len(sizes) == 9


@pytest.mark.parametrize(("n", "without"), [(1, 1), (2, 3), (3, 6), (1000, 500_500)])
def test_a_cache_saves_projections(n: int, without: int) -> None:
    computed = sum(len(range(step)) for step in range(1, n + 1))
    assert kv_cache.projections(n, cached=False) == without == computed
    assert kv_cache.projections(n, cached=True) == n
    assert kv_cache.scores(n) == computed


def test_the_table_of_projections() -> None:
    row = "| 1,000 | 500,500 | 1,000 | 167,167,000 | 500,500 |"
    assert kv_cache.projections_table([1, 1000]).splitlines()[3] == row


def test_64_gib_hold_8192_blocks_of_16_tokens() -> None:
    block = kv_cache.block_bytes(16, 524_288)
    assert block == 32 * 262_144 == 8 * MIB
    assert 64 * GIB // block == 8192
    assert kv_cache.usable_blocks(64 * GIB, block) == 8191  # one is the dummy block


def test_our_engine_counts_blocks_in_the_same_way() -> None:
    config = ModelConfig.from_hf(SHAPES["qwen3-0.6b"], {}, "bfloat16")
    block = kv_cache.block_bytes(16, 114_688)
    assert kv_block_bytes(EngineConfig("x", block_size=16), config) == block == 1_835_008
    engine = EngineConfig("x", kv_cache_memory_bytes=GIB)
    assert (
        decide_num_kv_blocks(engine, config, block, 80 * GIB)
        == kv_cache.usable_blocks(GIB, block)
        == 584
    )
    gpu = GPUMemory(80 * GIB, 80 * GIB, weights=2 * GIB, activations=3 * GIB, graphs=GIB)
    left = kv_cache.pool_bytes(80 * GIB, 0.9, 2 * GIB, 3 * GIB, GIB)
    assert left == 66 * GIB
    assert gpu.num_kv_blocks(EngineConfig("x"), config, block) == kv_cache.usable_blocks(
        left, block
    )


@pytest.mark.parametrize(("head_first", "run"), [(True, 4096), (False, 256)])
def test_what_a_head_reads_in_one_piece(head_first: bool, run: int) -> None:
    """Measured in a tensor: the addresses of one head's tokens up to the first gap."""
    assert kv_cache.run_bytes(8, 16, 128, 2, head_first) == run
    spec = AttentionBackend().kv_cache_spec(16, 8, 128, torch.bfloat16)
    (ours,) = spec.allocate(1, 3)
    shape = (2, 3, 8, 16, 128)
    assert ours.values.shape == shape and ours.values.is_contiguous()
    cache = torch.arange(3 * 8 * 16 * 128, dtype=torch.int32).view(shape[1:])
    if not head_first:
        cache = cache.view(3, 16, 8, 128).transpose(1, 2)
    addresses = cache[1, 5].flatten()
    gaps = (addresses.diff() != 1).nonzero().flatten().tolist()
    assert (gaps[0] + 1 if gaps else len(addresses)) * 2 == run


def test_with_one_kv_head_the_order_does_not_matter() -> None:
    assert kv_cache.run_bytes(1, 16, 128, 2, head_first=False) == 4096


def test_the_engine_computes_each_token_once_and_the_last_one_never() -> None:
    """The prompt is new, so no part of it is a prefix hit."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM("tiny-qwen3", num_kv_blocks=12, block_size=4, max_model_len=48) as llm:
        (output,) = llm.generate("The KV cache keeps", params, use_tqdm=False)
        known = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
        assert llm.stats.num_computed_tokens == known - 1


def test_a_latent_is_smaller_than_the_heads_that_are_made_of_it() -> None:
    # DeepSeek-V3's config.json: kv_lora_rank 512, qk_rope_head_dim 64, qk_nope 128, v_head_dim 128.
    assert kv_cache.latent_bytes(61, latent=512, rotated=64) == 70_272
    assert kv_cache.full_bytes(61, heads=128, key_dim=128 + 64, value_dim=128) == 4_997_120


def test_groups_keep_the_blocks_of_a_window() -> None:
    rows = kv_cache.groups_table([1024, 32768], window=1024, block_size=16, windowed=5)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()[2:]]
    assert cells == [["1,024", "64", "64", "100 %"], ["32,768", "2,048", "65", "19 %"]]


@pytest.mark.parametrize("length", [1024, 4096])
def test_our_engine_holds_the_blocks_of_the_table(length: int) -> None:
    """Compare the most blocks in its tables during decode, after a prompt in steps of 256."""
    manager = BlockManager(1000, 16, windows=(None, 1024), max_step_tokens=256)
    seq = Sequence("long", [1] * (length - 40), SamplingParams(max_tokens=40), length)
    held = [0, 0]
    while seq.num_computed_tokens < length:
        is_prompt = seq.num_computed_tokens < seq.num_prompt_tokens
        step = min(256, seq.num_prompt_tokens - seq.num_computed_tokens) if is_prompt else 1
        assert manager.allocate(seq, seq.num_computed_tokens + step)
        seq.num_computed_tokens += step
        if not is_prompt:
            held = [
                max(before, sum(map(bool, table)))
                for before, table in zip(held, seq.block_tables, strict=True)
            ]
        if seq.num_computed_tokens >= seq.num_prompt_tokens and seq.num_tokens < length:
            seq.append(1)
            manager.cache(seq, seq.num_computed_tokens)
    (row,) = kv_cache.groups_table([length], 1024, 16, windowed=5).splitlines()[2:]
    assert held == [int(cell.replace(",", "")) for cell in row.split("|")[2:4]]


def test_a_window_matters_for_texts_that_are_longer() -> None:
    assert kv_cache.windowed_share(1000, window=1024, windowed=5, layers=6) == 1
    # One layer of 6 with all 32,768 tokens, five with 1,024.
    assert kv_cache.windowed_share(32768, 1024, 5, 6) == pytest.approx(
        (32768 + 5 * 1024) / 6 / 32768
    )
