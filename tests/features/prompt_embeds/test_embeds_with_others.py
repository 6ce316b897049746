"""Prompt embeddings with ranks, KV stores, events, sleep, other weights; what rejects them."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from embedded_prompts import (
    expected_tokens,
    greedy,
    mixed_prompts,
    random_rows,
    tokens_of,
)
from tiny_checkpoints import make_checkpoint, make_qwen3
from torch import Tensor

from nanoserve import LLM, register_model
from nanoserve.engine.listeners import BlockListener, CachedBlock
from nanoserve.features.kv_events.events import EventCollector
from nanoserve.features.kv_transfer.block_keys import BlockKeys
from nanoserve.models.qwen3 import Qwen3ForCausalLM, Qwen3Model
from nanoserve.serve.replicas.prefix_router import PrefixRouter

OPTIONS: dict[str, Any] = {
    **{"skip_tokenizer_init": True, "enable_prompt_embeds": True, "dtype": "float32"},
    **{"block_size": 4, "max_model_len": 120, "num_kv_blocks": 200, "max_num_seqs": 4},
    **{"max_num_batched_tokens": 48},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("embeds")
    return folder, make_qwen3(folder)


def test_two_ranks_are_as_one(model: tuple[Path, Any]) -> None:
    folder, reference = model
    prompts = mixed_prompts(reference)
    options = OPTIONS | {"tensor_parallel_size": 2, "max_num_batched_tokens": 20}
    with LLM(str(folder), **options) as llm:
        first, again = tokens_of(llm, prompts), tokens_of(llm, prompts)
        assert llm.stats.prefix_cache_hits > 0
    assert first == again == [expected_tokens(reference, prompt) for prompt in prompts]


@pytest.mark.size("full")
def test_rows_are_longer_than_a_pipe_to_a_rank(tmp_path: Path) -> None:
    """65,536 bytes fit into a pipe; these prompts have 600 rows of 1,024 bytes."""
    sizes = {"hidden_size": 256, "max_position_embeddings": 2048}
    reference = make_qwen3(tmp_path, **sizes)
    prompts = [{"prompt_embeds": random_rows(reference, n, n)} for n in (600, 100, 601)]
    options = OPTIONS | {"max_model_len": 700, "num_kv_blocks": 600, "tensor_parallel_size": 2}
    options |= {"max_num_batched_tokens": 1024, "async_scheduling": True}
    with LLM(str(tmp_path), **options) as llm:
        found = tokens_of(llm, prompts)
    assert found == [expected_tokens(reference, prompt) for prompt in prompts]


def test_blocks_on_disk_are_found_by_their_embeddings(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = model
    rows = random_rows(reference, 41)
    changed = rows.clone()
    changed[17] *= 1.25
    prompts = [{"prompt_embeds": rows}, {"prompt_embeds": changed}]
    expected = [expected_tokens(reference, prompt) for prompt in prompts]
    options = OPTIONS | {"kv_offloading_path": tmp_path}
    with LLM(str(folder), **options) as llm:
        assert tokens_of(llm, prompts[:1]) == expected[:1]
    for prompt, tokens, num_cached in zip(prompts, expected, (40, 16), strict=True):
        with LLM(str(folder), **options) as llm:
            (output,) = llm.generate(prompt, greedy(), use_tqdm=False)
        assert list(output.outputs[0].token_ids) == tokens
        # A load is started only if it is expected to take less time than computing.
        assert output.num_cached_tokens in (0, num_cached)


def test_keys_of_stored_blocks_have_the_embeddings(model: tuple[Path, Any]) -> None:
    folder, reference = model
    rows, ids = random_rows(reference, 6), [*range(20)]
    changed = rows.clone()
    changed[4] *= 1.25  # at position 9, in the third block
    keys = BlockKeys(b"model", 4, 1)
    with LLM(str(folder), **OPTIONS) as llm:
        process = llm.engine.input_processor.process
        cache = llm.engine.scheduler.block_manager.prefix_cache

        def keys_of(*pieces: Any) -> list[bytes]:
            given = {"prompt_embeds_pieces": list(pieces)} if pieces else {}
            prompt = {"prompt_token_ids": ids} | given
            llm.generate(prompt, greedy(1), use_tqdm=False)
            (seq,) = process("r", prompt, greedy()).sequences
            found = keys.of_sequence(seq, 0, 4)
            assert found == [keys.of_prefix(prefix, 0) for prefix in cache.chain(seq, 4)]
            assert found[2:] == keys.of_sequence(seq, 2, 4)
            return [key.block_hash for key in found]

        plain, first, other = keys_of(), keys_of((5, rows)), keys_of((5, changed))
        assert keys_of((5, rows[:2]), (7, rows[2:])) == first
    assert plain[0] == first[0] == other[0] and first[1] == other[1] != plain[1]
    assert len({plain[2], first[2], other[2]}) == len({plain[3], first[3], other[3]}) == 3


class Recorder(BlockListener):
    def __init__(self) -> None:
        self.cached: list[CachedBlock] = []

    def on_cached(self, cached: CachedBlock) -> None:
        self.cached.append(cached)


def test_events_have_the_hash_of_a_block(model: tuple[Path, Any]) -> None:
    folder, reference = model
    rows = random_rows(reference, 5)
    recorder, collector = Recorder(), EventCollector()
    with LLM(str(folder), **OPTIONS) as llm:
        llm.engine.scheduler.block_manager.listeners.extend([recorder, collector])
        ids = [*range(20)]
        prompt = {"prompt_token_ids": ids, "prompt_embeds_pieces": [(6, rows)]}
        llm.generate(prompt | {"cache_salt": "t"}, greedy(1), use_tqdm=False)
    keys = [cached.embeds_key for cached in recorder.cached]
    assert [len(key) for key in keys] == [0, 32, 32, 0, 0]
    (event,) = collector.take()
    hexes = [key.hex() for key in keys]
    wire = event.wire()
    assert wire["extra_keys"] == [["t"], [hexes[1]], [hexes[2]], None, None]
    assert wire["token_ids"] == ids


def test_sleep_and_other_weights(model: tuple[Path, Any], tmp_path: Path) -> None:
    folder, reference = model
    other = make_qwen3(tmp_path, seed=7)
    prompts = mixed_prompts(reference)
    with LLM(str(folder), **OPTIONS) as llm:
        expected = [expected_tokens(reference, prompt) for prompt in prompts]
        assert tokens_of(llm, prompts) == expected
        llm.sleep(1)
        llm.wake_up()
        assert tokens_of(llm, prompts) == expected
        llm.update_weights(dict(other.state_dict()))
        assert tokens_of(llm, prompts) == [expected_tokens(other, prompt) for prompt in prompts]


@pytest.mark.size("full")
def test_a_head_drafts_behind_embeddings() -> None:
    options: dict[str, Any] = {"num_kv_blocks": 100, "dtype": "float32"}
    drafts = {"method": "hidden_head", "model": "tiny-qwen3", "adaptive": False}
    with LLM("tiny-qwen3", enable_prompt_embeds=True, **options) as llm:
        embedding = llm.engine.executor.model.model.embed_tokens
        ids = llm.engine.tokenizer.encode("A block table lists the blocks of a sequence")
        with torch.inference_mode():
            rows = embedding(torch.tensor(ids, dtype=torch.int32)).clone()
        prompt = {"prompt_embeds": rows}
        expected = tokens_of(llm, [prompt], greedy(40))
    options |= {"speculative_config": drafts}
    with LLM("tiny-qwen3", enable_prompt_embeds=True, **options) as llm:
        assert tokens_of(llm, [prompt], greedy(40)) == expected
        assert llm.stats.num_accepted_tokens > 0


class OwnModel(Qwen3Model):
    """A model of before prompt embeddings."""

    def forward(self, input_ids: Tensor, kv_caches: Any, metadata: Any) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, kv_caches, metadata)


class OwnForCausalLM(Qwen3ForCausalLM):
    model_class = OwnModel


REJECTED: dict[str, dict[str, Any]] = {
    "method='draft_model'": {"speculative_config": {"method": "draft_model", "model": "{path}"}},
    "pipeline_parallel_size=2": {"pipeline_parallel_size": 2},
    "runner='generate'": {"runner": "pooling"},
    "runs through transformers": {"model_impl": "transformers"},
    "must be True or False": {"enable_prompt_embeds": "yes"},
}


@pytest.mark.parametrize("message", REJECTED)
def test_what_does_not_take_them_says_so(message: str, model: tuple[Path, Any]) -> None:
    folder, _ = model
    options = OPTIONS | REJECTED[message]
    if "speculative_config" in options:
        options["speculative_config"] = {"method": "draft_model", "model": str(folder)}
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **options)


def test_models_whose_forward_does_not_take_them(tmp_path: Path) -> None:
    register_model("OldForCausalLM", OwnForCausalLM)
    make_checkpoint(transformers.Qwen3ForCausalLM, tmp_path)
    overrides = {"architectures": ["OldForCausalLM"]}
    with pytest.raises(ValueError, match="OldForCausalLM: `forward` of its class must take"):
        LLM(str(tmp_path), **OPTIONS, hf_overrides=overrides)


def test_a_prefill_engine_is_sent_token_ids(model: tuple[Path, Any]) -> None:
    folder, _ = model
    transfer = {"kv_connector": "socket", "kv_role": "kv_producer"}
    with pytest.raises(ValueError, match="kv_connector='socket'"):
        LLM(str(folder), **OPTIONS, kv_transfer_config=transfer)


def test_a_router_of_replicas_has_the_engines_hashes(model: tuple[Path, Any]) -> None:
    folder, reference = model
    router = PrefixRouter(4, prefix_cache_seed=5)
    with LLM(str(folder), **OPTIONS, prefix_cache_seed=5) as llm:
        chains = []
        for prompt in mixed_prompts(reference):
            request = llm.engine.input_processor.process("r", prompt, greedy())
            (seq,) = request.sequences
            num_blocks = (len(seq.token_ids) - 1) // 4
            llm.engine.scheduler.block_manager.prefix_cache.hash_blocks(seq, num_blocks)
            own = seq.cache_key, seq.prompt_embeds
            chains.append(router.hashes(request.prompt_token_ids, *own))
            assert chains[-1] == seq.block_hashes and len(chains[-1]) == num_blocks
            # Requests travel to replicas in other processes.
            (copied,) = pickle.loads(pickle.dumps(request)).sequences
            assert router.hashes(copied.token_ids, (), copied.prompt_embeds) == chains[-1]
    assert chains[1][0] != chains[2][0] != chains[0]
