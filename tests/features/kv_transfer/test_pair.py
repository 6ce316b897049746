"""A prefill engine and a decode engine: the same tokens as one engine, whatever happens."""

from pathlib import Path
from typing import Any

import pytest
from engine_pair import (
    counter,
    decode_options,
    prefill_server,
    stats_of,
    wait_for_leases,
)
from kv_workload import OPTIONS, answers
from tiny_checkpoints import make_qwen3
from windowed_models import make_windowed

from nanoserve import LLM, SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PROMPT = [*range(61)]  # 15 full blocks, and the last token
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "torch": {"attention_backend": "torch"},
    "async": {"async_scheduling": True},
    "int8": {"kv_cache_dtype": "int8"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "host tier": {"kv_offloading_size": 0.002},
}


@pytest.mark.small(kind=["plain", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_one_engine(kind: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    options = {**OPTIONS, **KINDS[kind]}
    with LLM(tmp_path, **options) as llm:
        expected = answers(llm)
    with prefill_server(tmp_path, **options) as server:
        with LLM(tmp_path, **options, **decode_options(server)) as llm:
            assert answers(llm) == expected
            stats = stats_of(llm)
            assert stats.num_failed == stats.num_late == 0
            assert stats.hits > 50
            assert counter(llm, "kv_prefill_failed_requests") == 0
        wait_for_leases(server.llm)


@pytest.mark.small(name=["gemma2"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_groups_of_layers(name: str, tmp_path: Path) -> None:
    make_windowed(name, tmp_path)
    options = OPTIONS | {"num_kv_blocks": 130}
    with LLM(tmp_path, **options) as llm:
        expected = answers(llm)
    with prefill_server(tmp_path, **options) as server:
        with LLM(tmp_path, **options, **decode_options(server, patience=0.05)) as llm:
            assert answers(llm) == expected
            assert stats_of(llm).hits
        wait_for_leases(server.llm)


def test_the_decode_engine_computes_the_last_token_only(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    with prefill_server(tmp_path, **OPTIONS) as server:
        with LLM(tmp_path, **OPTIONS, **decode_options(server)) as llm:
            (output,) = llm.generate(PROMPT, ONE, use_tqdm=False)
            assert output.num_cached_tokens == 60 and llm.stats.num_computed_tokens == 1
        assert server.bodies == [{"prompt": PROMPT[:60], "max_tokens": 1, "temperature": 0}]
        wait_for_leases(server.llm)
        assert server.counter("kv_lease_confirmed") == 1
        assert server.counter("kv_lease_sent_blocks") == 15
