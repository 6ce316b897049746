"""Decoders of transformers with nanoserve's attention (`model_impl="transformers"`)."""

import logging
from pathlib import Path
from typing import Any

import decoder_classes
import pytest
import torch
import transformers
from greedy_outputs import PARAMS, assert_like
from safetensors.torch import load_file, save_file
from smollm2 import require_smollm2
from tiny_checkpoints import edit_json, make_qwen3
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nanoserve import LLM, SamplingParams
from nanoserve.cli.describe import describe
from nanoserve.cli.info import as_text

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
# By transformers' class: settings in addition to small sizes.
CASES: dict[str, dict[str, Any]] = {
    "OlmoForCausalLM": {"clip_qkv": 0.3},
    "Cohere2ForCausalLM": {"layer_types": WINDOWS},
    "OlmoeForCausalLM": {},
    "GPT2LMHeadModel": {},  # learned positions
    "GemmaForCausalLM": {},
    "OPTForCausalLM": {},
    "GPTBigCodeForCausalLM": {},  # one KV head
    "Starcoder2ForCausalLM": {"sliding_window": 9},
    "GPTNeoXForCausalLM": {},
    "GraniteForCausalLM": {
        "logits_scaling": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 5.0,
    },
    "GraniteSWAForCausalLM": {"layer_types": WINDOWS},  # attention sinks
    "Gemma2ForCausalLM": {  # nanoserve has it, too
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": 4,
    "num_kv_blocks": 40,  # too few for all sequences: some are preempted
    "max_model_len": 80,
    "max_num_seqs": 8,
}


def make(name: str, path: Path, seed: int = 0, **settings: Any) -> PreTrainedModel:
    architecture = getattr(transformers, name)
    own = decoder_classes.SETTINGS.get(name, {}) | CASES.get(name, {}) | settings
    small = decoder_classes.small_settings(architecture.config_class, own)
    model = decoder_classes.random_model(architecture, small, seed)
    model.save_pretrained(path)
    return model


def prompts(count: int) -> list[list[int]]:
    """Ragged prompts, some of which begin alike."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(300, (40,), generator=generator).tolist()
    found = []
    for i in range(count):
        length = 1 + 17 * i % 67
        own = torch.randint(300, (length,), generator=generator).tolist()
        found.append((start[: 13 * (i % 3)] + own)[:length])
    return found


@pytest.mark.small(name=["Cohere2ForCausalLM", "OlmoeForCausalLM"])
@pytest.mark.parametrize("name", CASES)
def test_it_answers_as_transformers(name: str, tmp_path: Path, by_size: Any) -> None:
    model, count = make(name, tmp_path), by_size(12, 40, 100)
    for budget in by_size((16,), (8, 64), (8, 16, 64)):
        options = OPTIONS | {"max_num_batched_tokens": budget, "model_impl": "transformers"}
        with LLM(tmp_path, **options) as llm:
            assert_like(model, llm, prompts(count))


@pytest.mark.size("full")
@pytest.mark.parametrize("name", ["Cohere2ForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"attention_backend": "torch"},
        {"enable_prefix_caching": False},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
def test_with_other_options(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = make(name, tmp_path)
    with LLM(tmp_path, **OPTIONS | options) as llm:
        assert_like(model, llm, prompts(20))
        if "enable_prefix_caching" not in options:
            assert_like(model, llm, prompts(20))  # with prefix-cache hits


@pytest.mark.size("full")
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_an_8_bit_kv_cache_is_that_of_our_own_class(kv_cache_dtype: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    found = []
    for model_impl in ("nanoserve", "transformers"):
        options = {**OPTIONS, "kv_cache_dtype": kv_cache_dtype, "model_impl": model_impl}
        with LLM(tmp_path, **options) as llm:
            outputs = llm.generate(prompts(20), PARAMS, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.small(quantization=["int8"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_are_those_of_our_own_class(quantization: str, tmp_path: Path) -> None:
    """The linears have the same codes, whether or not they are fused."""
    make_qwen3(tmp_path, hidden_size=64, intermediate_size=96)
    found = []
    for model_impl in ("nanoserve", "transformers"):
        options = {**OPTIONS, "quantization": quantization, "model_impl": model_impl}
        options["quantization_activations"] = "none"  # 8 bits would enlarge differences in rounding
        with LLM(tmp_path, **options) as llm:
            outputs = llm.generate(prompts(8), PARAMS, use_tqdm=False)
            found.append([output.outputs[0] for output in outputs])
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_quantization_needs_linears(tmp_path: Path) -> None:
    """GPT-2's weights are stored in another kind of module."""
    make("GPT2LMHeadModel", tmp_path)
    with pytest.raises(ValueError, match=r"only the linears of GPT2LMHeadModel, .* omit the opt"):
        LLM(tmp_path, quantization="int8", **OPTIONS)


def test_16_bit_weights_are_accepted(tmp_path: Path) -> None:
    """The comparison at loading allows for their rounding."""
    make("OlmoForCausalLM", tmp_path)
    with LLM(tmp_path, dtype="bfloat16", **OPTIONS) as llm:
        (output,) = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8


def test_it_is_said_that_it_is_slower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make("GPT2LMHeadModel", tmp_path)
    with caplog.at_level(logging.WARNING), LLM(tmp_path, **OPTIONS):
        (line,) = [line for line in caplog.messages if "through transformers" in line]
        assert line.startswith("GPT2LMHeadModel runs through transformers") and "slower" in line
    facts = describe(str(tmp_path), **OPTIONS)
    assert not facts["refused"] and facts["model_impl"] == "transformers"
    assert facts["num_parameters"] > 0 and facts["kept_bytes"] == 4 * facts["num_parameters"]
    assert "GPT2LMHeadModel, through transformers" in as_text(facts)


def test_a_class_of_nanoserves_own_is_preferred(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    assert describe(str(tmp_path), **OPTIONS)["model_impl"] == "nanoserve"
    assert describe(str(tmp_path), **OPTIONS, model_impl="vllm")["model_impl"] == "nanoserve"
    facts = describe(str(tmp_path), **OPTIONS, model_impl="transformers")
    assert facts["model_impl"] == "transformers" and facts["architecture"] == "Qwen3ForCausalLM"


def test_model_impl_nanoserve_needs_a_class_of_its_own(tmp_path: Path) -> None:
    make("GPT2LMHeadModel", tmp_path)
    with pytest.raises(ValueError, match="architecture 'GPT2LMHeadModel' is not supported"):
        LLM(tmp_path, model_impl="nanoserve", **OPTIONS)


def test_an_override_names_a_class_of_nanoserves_own(tmp_path: Path) -> None:
    """Whatever the file says: a checkpoint may name a class that is a copy of another."""
    make_qwen3(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["MyForCausalLM"])
    with pytest.raises(ValueError, match="architecture 'MyForCausalLM' is not supported"):
        LLM(tmp_path, **OPTIONS)
    overrides = {"architectures": ["Qwen3ForCausalLM"]}
    assert describe(str(tmp_path), **OPTIONS, hf_overrides=overrides)["model_impl"] == "nanoserve"


@pytest.mark.parametrize("name", ["missing", "unexpected", "misshapen"])
def test_tensors_must_match(name: str, tmp_path: Path) -> None:
    make("OlmoForCausalLM", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    weight = "model.layers.1.mlp.up_proj.weight"
    if name == "missing":
        del tensors[weight]
    elif name == "unexpected":
        tensors["model.layers.1.mlp.other.weight"] = torch.ones(3)
    else:
        tensors[weight] = torch.ones(3)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"do not match OlmoForCausalLM: .*layers\.1\.mlp"):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.parametrize(
    "option",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"batch_invariant": True},
        {"enable_return_routed_experts": True},
    ],
    ids=str,
)
def test_options_of_our_own_classes_are_rejected(option: dict[str, Any], tmp_path: Path) -> None:
    make("OlmoeForCausalLM", tmp_path)
    (name,) = option
    with pytest.raises(ValueError, match=rf"through transformers .* does not support {name}="):
        LLM(tmp_path, **OPTIONS | option)


def test_hf_overrides(tmp_path: Path) -> None:
    make("OlmoForCausalLM", tmp_path)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    settings = AutoConfig.from_pretrained(tmp_path, **rope)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, config=settings)
    with LLM(tmp_path, **OPTIONS, hf_overrides=rope) as llm:
        assert_like(reference, llm, prompts(20))
    with pytest.raises(ValueError, match=r"the configuration of Olmo\w+ has no .*'rope_th'"):
        LLM(tmp_path, **OPTIONS, hf_overrides={"rope_th": 77.0})


REJECTED = {
    "MambaForCausalLM": "it has recurrent layers",
    "DeepseekV3ForCausalLM": r"kv_lora_rank=16",
    "RobertaForCausalLM": "its positions do not count from 0",
    "BloomForCausalLM": "does not use transformers' attention interface",
    "DiffLlamaForCausalLM": "layer 0 computes attention twice",
    "MoshiForCausalLM": "layer 0 has a window of None instead of 9",
    "Gemma4ForCausalLM": "its layers differ in head_dim",
}


@pytest.mark.small(name=["DeepseekV3ForCausalLM", "RobertaForCausalLM"])
@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_right_is_rejected(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    with pytest.raises(ValueError, match=REJECTED[name]):
        LLM(tmp_path, model_impl="transformers", **OPTIONS)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_batch_are_rejected(rope_type: str, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    rope |= factors if rope_type == "longrope" else {}
    rope |= {"original_max_position_embeddings": 256}
    make("OlmoForCausalLM", tmp_path)
    edit_json(tmp_path / "config.json", rope_parameters=rope)
    with pytest.raises(ValueError, match=f"'{rope_type}'.* longest sequence of a batch"):
        LLM(tmp_path, **OPTIONS)


def test_a_quantized_checkpoint_is_rejected(tmp_path: Path) -> None:
    make("OlmoForCausalLM", tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"does not support quantized checkpoints: .*fp8"):
        LLM(tmp_path, **OPTIONS)


def test_new_weights(tmp_path: Path) -> None:
    """From a folder, from a trainer's model, and after a sleep that dropped them."""
    make("OlmoeForCausalLM", tmp_path)
    new = make("OlmoeForCausalLM", tmp_path / "new", seed=1)
    edit_json(tmp_path / "new" / "config.json", transformers_version="5.99.0", dtype="bfloat16")
    with LLM(tmp_path, **OPTIONS) as llm:
        llm.update_weights(tmp_path / "new")
        assert_like(new, llm, prompts(6))
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.mul_(1.02)
        llm.update_weights(new)
        assert_like(new, llm, prompts(6))
        llm.sleep(level=1)
        llm.wake_up()
        assert_like(new, llm, prompts(6))


def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    """The whole model's logits, although nanoserve has no class for its text."""
    text = decoder_classes.small_settings(transformers.OlmoConfig, {}).to_dict()
    sees = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sees |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    settings = transformers.LlavaConfig(
        text_config=text, vision_config={**sees, "model_type": "clip_vision_model"}
    )
    model = decoder_classes.random_model(transformers.LlavaForConditionalGeneration, settings)
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert_like(model, llm, prompts(20))
    facts = describe(str(tmp_path), **OPTIONS)
    assert facts["multimodal_architecture"] == "LlavaForConditionalGeneration"
    assert facts["architecture"] == "OlmoForCausalLM" and facts["model_impl"] == "transformers"


def test_a_gguf_file_is_rejected() -> None:
    require_smollm2()
    with pytest.raises(ValueError, match=r"use model_impl='nanoserve' for a GGUF file"):
        LLM("smollm2", model_impl="transformers")


def test_the_bundled_model() -> None:
    """Trained weights, with their tokenizer: the text is that of our own class."""
    texts = []
    for model_impl in ("nanoserve", "transformers"):
        with LLM("tiny-qwen3", dtype="float32", model_impl=model_impl) as llm:
            params = SamplingParams(temperature=0, max_tokens=24)
            outputs = llm.generate(["Once upon a time", "The"], params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]


def test_random_weights(tmp_path: Path) -> None:
    make("OlmoForCausalLM", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with LLM(tmp_path, load_format="dummy", **OPTIONS) as llm:
        (output,) = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8


@pytest.mark.size("full")
def test_it_drafts_for_our_own_class(tmp_path: Path) -> None:
    """A draft model through transformers changes no token."""
    model = make_qwen3(tmp_path / "target")
    make("OlmoForCausalLM", tmp_path / "draft")
    drafts = {"method": "draft_model", "model": str(tmp_path / "draft")}
    with LLM(tmp_path / "target", **OPTIONS, speculative_config=drafts) as llm:
        assert_like(model, llm, prompts(20))


PAGE = decoder_classes.PAGE.read_text() if decoder_classes.PAGE.is_file() else ""
THROUGH = decoder_classes.classes_of_page(PAGE)[decoder_classes.THROUGH]


def test_the_counts_of_the_page() -> None:
    found = decoder_classes.classes_of_page(PAGE)
    own, through = len(found[decoder_classes.OWN]), len(found[decoder_classes.THROUGH])
    assert f"**{own + through} run**, {own} as classes" in PAGE
    assert own + through > 75


@pytest.mark.size("full")
@pytest.mark.parametrize("name", [name for name in THROUGH if hasattr(transformers, name)])
def test_a_class_of_the_page(name: str) -> None:
    assert decoder_classes.try_class(name).kind in (decoder_classes.THROUGH, decoder_classes.OWN)
