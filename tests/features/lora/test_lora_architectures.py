"""Adapters of other architectures: equal to transformers' models with the adapters merged in."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from lora_models import ALL, ATTENTION, greedy, request_for, write_adapter
from tiny_checkpoints import DEEPSEEK_V3, DELTA, DELTA_MOE, GEMMA2, make_checkpoint
from torch import nn

from nanoserve import LLM, SamplingParams

NUM_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj")
# By architecture: its settings, and the linear layers with an adapter.
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "LlamaForCausalLM": ({}, ALL),
    "Gemma2ForCausalLM": (GEMMA2, ALL),
    "Phi3ForCausalLM": ({}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "Qwen3MoeForCausalLM": (MOE, ATTENTION),
    "DeepseekV3ForCausalLM": (DEEPSEEK_V3, LATENT),
    "Qwen3NextForCausalLM": (DELTA_MOE, ("in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION)),
    "Qwen3_5ForCausalLM": (
        DELTA,
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", *ATTENTION),
    ),
}


@pytest.mark.small(
    name=["Phi3ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_request_equals_the_merged_model(name: str, tmp_path: Path) -> None:
    settings, targets = MODELS[name]
    model = make_checkpoint(getattr(transformers, name), tmp_path, **settings)
    adapters = [tmp_path / "first", tmp_path / "second"]
    merged: list[nn.Module] = [
        write_adapter(model, folder, seed, targets, 4, size=0.2)
        for seed, folder in enumerate(adapters)
    ]
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_loras": 2}
    options |= {"attention_backend": "torch", "num_kv_blocks": 60, "max_model_len": 64}
    prompts = [[5, 6, 7, 250, 9, 11]] * 3
    with LLM(str(tmp_path), enable_lora=True, **options) as llm:
        requests = [None, *map(request_for, adapters)]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [greedy(each, prompts[0], NUM_TOKENS) for each in (model, *merged)]
    assert found[0] != found[1] != found[2]


def test_models_that_run_through_transformers_take_no_adapters(tmp_path: Path) -> None:
    make_checkpoint(transformers.LlamaForCausalLM, tmp_path)
    with pytest.raises(ValueError, match="runs through transformers, whose layers take no"):
        LLM(str(tmp_path), enable_lora=True, model_impl="transformers", skip_tokenizer_init=True)
