"""Pooling with blocks from the host's memory and from the disk: the same results as without.

A request of which only the last token is pooled reads them; all others compute every token, as they
do with a prefix cache alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooling_models import TYPES, hidden_states, normalized, pooled
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, PoolingParams
from nanoserve.features.kv_transfer.host_tier import HostTier
from nanoserve.features.kv_transfer.loads import ConnectorLoads

OPTIONS: dict[str, Any] = {
    **{"runner": "pooling", "skip_tokenizer_init": True, "dtype": "float32", "block_size": 4},
    **{"num_kv_blocks": 36, "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 100},
}
SIZE = 0.002  # GiB: more than all blocks take


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("qwen3")
    yield folder, make_qwen3(folder)


def returning_prompts(num_rounds: int = 5) -> list[list[int]]:
    """Return prompts with five beginnings in turn, which the pool cannot hold together."""
    rng = np.random.default_rng(0)
    starts = [rng.integers(0, 64, 70).tolist() for _ in range(5)]
    return [start[: rng.integers(30, 70)] for _ in range(num_rounds) for start in starts]


def encode(llm: LLM, prompts: list[list[int]], kinds: tuple[str, ...] = TYPES) -> list[Any]:
    """Pool each prompt in another way than the one before."""
    params = [PoolingParams(pooling_type=kinds[i % len(kinds)]) for i in range(len(prompts))]
    outputs = llm.encode(prompts, params, use_tqdm=False)
    llm.engine.scheduler.check()
    return outputs


def hits_of(llm: LLM) -> dict[str, int]:
    kinds = {HostTier: "host", ConnectorLoads: "disk"}
    return {
        kinds[type(each)]: each.stats.hits
        for each in llm.engine.extensions
        if isinstance(each, HostTier | ConnectorLoads)
    }


TIERS: dict[str, dict[str, Any]] = {
    "host": {"kv_offloading_size": SIZE},
    "disk": {"kv_offloading_path": "blocks"},
    "both, ahead": {
        "kv_offloading_size": SIZE,
        "kv_offloading_path": "blocks",
        "async_scheduling": True,
    },
}


@pytest.mark.parametrize("name", TIERS)
def test_blocks_from_elsewhere_change_no_result(
    name: str, checkpoint: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = checkpoint
    monkeypatch.chdir(tmp_path)
    prompts = returning_prompts()
    with LLM(str(folder), **OPTIONS | TIERS[name]) as llm:
        encode(llm, prompts)  # the disk is asked when a request is added: it has these now
        outputs = encode(llm, prompts)
        hits = hits_of(llm)
    assert max(hits.values()) > 50, hits
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        kind = TYPES[index % len(TYPES)]
        expected = normalized(pooled(hidden_states(reference, prompt), kind))
        np.testing.assert_allclose(output.outputs.data.numpy(), expected, atol=1e-5)
        assert kind == "LAST" or output.num_cached_tokens == 0


@pytest.mark.parametrize("kind", ["MEAN", "CLS", "ALL"])
def test_requests_that_need_every_token_load_nothing(
    kind: str, checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, _ = checkpoint
    options = {"kv_offloading_size": SIZE, "kv_offloading_path": tmp_path / "blocks"}
    with LLM(str(folder), **OPTIONS, **options) as llm:
        outputs = encode(llm, returning_prompts(), (kind,))
        assert hits_of(llm) == {"host": 0, "disk": 0}
    assert [output.num_cached_tokens for output in outputs] == [0] * len(outputs)


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])
def test_an_engine_that_starts_again_finds_the_blocks_of_all_prompts(
    ahead: bool, checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    """Also those of the last step: its requests are still running when its results are read."""
    folder, reference = checkpoint
    options = OPTIONS | {"kv_offloading_path": tmp_path / "blocks", "async_scheduling": ahead}
    prompt = returning_prompts()[0][:24]  # one step, five full blocks before the last token
    for num_cached in (0, 20):
        with LLM(str(folder), **options) as llm:
            (output,) = encode(llm, [prompt])
        assert output.num_cached_tokens == num_cached
        expected = normalized(hidden_states(reference, prompt)[-1])
        np.testing.assert_allclose(output.outputs.data.numpy(), expected, atol=1e-5)
