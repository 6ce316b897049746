"""Pooling on a GPU that runs nothing before somebody waits for it: see `late_cuda`."""

from pathlib import Path
from typing import Any

import late_engine
import numpy as np
import pytest
from late_cuda import LateCuda
from pooling_models import TYPES, hidden_states, make_prompts, normalized, pooled
from tiny_checkpoints import make_qwen3

from nanoserve import PoolingParams
from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.features.pooling.prepare import prepare_pooling
from nanoserve.features.pooling.requests import pooling_request
from nanoserve.models.registry import supported_architectures

MIXED = {"capture_mixed_steps": True}


@pytest.mark.small(ahead=[True], graphs=[MIXED])
@pytest.mark.parametrize("graphs", [{}, MIXED], ids=str)
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step ahead"])
def test_results_are_copied_before_they_are_read(
    ahead: bool, graphs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before a graph's next replay overwrites the hidden states that they are made of."""
    reference = make_qwen3(tmp_path)
    config = EngineConfig(str(tmp_path), runner="pooling")
    checkpoint = Checkpoint.open(str(tmp_path), config)
    found = checkpoint.model_config(config, supported_architectures())
    monkeypatch.setattr(ModelConfig, "from_checkpoint", lambda path: found)
    options = {"runner": "pooling", "async_scheduling": ahead} | graphs
    engine = late_engine.make_engine(tmp_path, LateCuda(), monkeypatch, **options)
    prepare_pooling(engine.config, found).add_to(engine)
    prompts = make_prompts((1, 5, 33, 40, 12, 1, 17, 1))
    kinds = [TYPES[index % len(TYPES)] for index in range(len(prompts))]
    for index, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
        engine.add(pooling_request(engine, str(index), prompt, PoolingParams(pooling_type=kind)))
    results: dict[str, np.ndarray] = {}
    while engine.has_unfinished_requests():
        results |= {output.request_id: output.pooled for output in engine.step()}
    for index, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True)):
        expected = normalized(pooled(hidden_states(reference, prompt), kind))
        np.testing.assert_allclose(results[str(index)], expected, atol=1e-5)
