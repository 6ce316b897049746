"""Prompt embeddings on a GPU whose graphs are functions: no graph computes given embeddings."""

from pathlib import Path
from typing import Any

import pytest
from count_replays import choices, count_replays, decode_graphs
from embedded_prompts import expected_tokens, greedy, mixed_prompts, random_rows
from fake_cuda import FakeCuda
from tiny_checkpoints import make_qwen3

from nanoserve.attention.torch import TorchAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.prompt_embeds import PromptEmbedsInput
from nanoserve.models.layers.context import LayerContext
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner

SIZES: dict[str, Any] = {
    **{"num_kv_blocks": 120, "max_num_seqs": 4, "max_model_len": 120, "block_size": 4},
    **{"dtype": "float32", "enable_prompt_embeds": True, "max_num_batched_tokens": 20},
}


def make_engine(path: Path, **options: Any) -> GuardedEngine:
    config = EngineConfig(str(path), **SIZES, **options).for_device("cuda")
    model_config = ModelConfig.from_checkpoint(path)
    context = LayerContext(attention=TorchAttention())
    device = CudaDevice(config, FakeCuda(), is_capturable=True)
    runner = ModelRunner.load(config, model_config, path, context, device)
    engine = GuardedEngine(config, model_config, runner, tokenizer=None)
    engine.add_extension(PromptEmbedsInput())
    return engine


def run(engine: GuardedEngine, prompts: list[Any]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, greedy())
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [found[str(number)] for number in range(len(prompts))]


@pytest.mark.small(options=[{"async_scheduling": True}, {"capture_sampling": True}])
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"async_scheduling": False},
        {"capture_sampling": True},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_graphs_are_replayed_behind_embeddings(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDevice, "_run_worst_case", lambda device, runner: None)
    reference = make_qwen3(tmp_path)
    # Of 21 rows, the last is a step of its own: a decode row, for which there is a graph.
    prompts = [*mixed_prompts(reference), {"prompt_embeds": random_rows(reference, 21, 5)}]
    engine = make_engine(tmp_path, **options)
    replays: list[int] = []
    if "enforce_eager" not in options:
        device = engine.executor.device
        graphs = choices if "capture_sampling" in options else decode_graphs
        replays = count_replays(graphs(device))
    found = [run(engine, [prompt])[0] for prompt in prompts[::-1]][::-1]
    assert found == run(engine, prompts)
    assert found == [expected_tokens(reference, prompt) for prompt in prompts]
    assert bool(replays) != ("enforce_eager" in options)
    engine.executor.close()
