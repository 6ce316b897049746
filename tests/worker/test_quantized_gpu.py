"""Engines with a GPU's quantized linears, their kernels interpreted: what they compute, and when.

What they must compute is known without them: the plain model's answers, with the values that the
codes stand for as its weights.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import CASES, make_quantized
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_checkpoint, make_qwen3
from transformers import Qwen3MoeForCausalLM

pytest.importorskip("triton")

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.models.quantization.gpu_method import QuantizedLinearMethod
from nanoserve.models.quantization.linear_methods import choose_linear_method
from nanoserve.models.quantization.online import quantize_fp8, quantize_int4, quantize_int8

PROMPTS = [[5, 7, 11], [(7 * i * i + i) % 300 for i in range(14)]]
# Kernels are interpreted: answers are a step with both prompts, of 17 rows, and a decode step; and
# a second layer would do what the first does.
NUM_TOKENS = 2
ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES = {"hidden_size": 64, "intermediate_size": 96, **ONE_LAYER}
COMMON = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "num_kv_blocks": 8}
NUM_LOGPROBS = 4
Found = tuple[list[list[int]], torch.Tensor]


def answers(path: Path, **options: Any) -> Found:
    """Greedy tokens of each prompt, and the largest logprobs of each token [tokens, likeliest].

    With a GPU's kernels, interpreted; what they are compared with may come from a CPU's, much
    sooner.
    """
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=NUM_LOGPROBS)
    with LLM(path, **COMMON | {"attention_backend": "triton"} | options) as llm:
        outputs = [o.outputs[0] for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    values = [
        sorted((each.logprob for each in likeliest.values()), reverse=True)[:NUM_LOGPROBS]
        for output in outputs
        for likeliest in output.logprobs
    ]
    return [output.token_ids for output in outputs], torch.tensor(values)


def cpu_answers(path: Path, **options: Any) -> Found:
    return answers(path, attention_backend="torch", **options)


def assert_same(found: Found, wanted: Found, tolerance: float) -> None:
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=tolerance)


def replace_weights(path: Path, to: Path, make: Any) -> None:
    """A copy of a plain checkpoint, its linears' weights, LM head included, as `make` has them."""
    to.mkdir()
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if "_proj.weight" in name or name == "lm_head.weight":
            weights[name] = make(name, weight)
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text((path / "config.json").read_text())


FLOATS = {"quantization_activations": "none"}
WEIGHT_ONLY: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8": (quantize_int8, {"quantization": "int8"}),
    "int4, 32": (lambda w: quantize_int4(w, 32), {"quantization": "int4"}),
    "int4, 64": (
        lambda w: quantize_int4(w, 64),
        {"quantization": "int4", "quantization_group_size": 64},
    ),
    "fp8": (quantize_fp8, {"quantization": "fp8"} | FLOATS),
}


@pytest.mark.small(kind=["int8", "fp8"])
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_weights_are_what_their_codes_stand_for(tmp_path: Path, kind: str) -> None:
    """And activations floats: of fp8, if it is asked for."""
    make, options = WEIGHT_ONLY[kind]
    make_qwen3(tmp_path / "plain", **SIZES)
    replace_weights(
        tmp_path / "plain", tmp_path / "rounded", lambda name, weight: make(weight).dequantize()
    )
    assert_same(answers(tmp_path / "plain", **options), cpu_answers(tmp_path / "rounded"), 1e-4)


def test_int8_activations_are_the_cpus_if_they_are_asked_for(tmp_path: Path) -> None:
    """Both multiply the same integers and add up the same groups."""
    make_qwen3(tmp_path, **SIZES)
    options = {"quantization": "int8", "quantization_activations": "int8"}
    wanted = cpu_answers(tmp_path, **options)
    assert_same(answers(tmp_path, **options), wanted, 1e-4)
    floats = answers(tmp_path, quantization="int8")
    assert 1e-3 < (wanted[1] - floats[1])[[0, NUM_TOKENS]].abs().max() < 0.1


def test_fp8_is_near_the_plain_model(tmp_path: Path) -> None:
    make_qwen3(tmp_path, **SIZES)
    plain = cpu_answers(tmp_path)
    difference = (answers(tmp_path, quantization="fp8")[1] - plain[1])[[0, NUM_TOKENS]].abs()
    assert 1e-3 < difference.max() < 0.6  # of the first tokens, which follow the same prompts
    with pytest.raises(ValueError, match="needs a GPU; on a CPU, use quantization='int8'"):
        LLM(tmp_path, **COMMON, attention_backend="torch", quantization="fp8")


def test_experts_are_int8_and_their_activations_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The attention's weights are int4, so that a plain model can say what is right."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    make_checkpoint(Qwen3MoeForCausalLM, tmp_path / "plain", **SIZES | moe)

    def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
        weight = quantize_int4(weight, 32).dequantize()
        return quantize_int8(weight).dequantize() if "expert" in name else weight

    replace_weights(tmp_path / "plain", tmp_path / "rounded", rounded)
    wanted = cpu_answers(tmp_path / "rounded")
    with caplog.at_level(logging.WARNING):
        assert_same(answers(tmp_path / "plain", quantization="int4"), wanted, 1e-4)
    assert "experts have int8 weights on a GPU, not int4" in caplog.text


@pytest.mark.small(name=["gptq, act order"])
@pytest.mark.parametrize("name", ["gptq, act order", "awq"])
def test_a_checkpoints_own_integers_are_kept_if_they_are_asked_for(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else they become floats, which has been run on GPUs; what is computed is the same."""
    write, config = CASES[name]
    make_quantized(tmp_path, write, config, **ONE_LAYER)
    with caplog.at_level(logging.WARNING):
        wanted = answers(tmp_path)
    assert "is dequantized" in caplog.text
    assert_same(answers(tmp_path, quantization=config["quant_method"]), wanted, 1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_what_is_chosen_on_a_gpu(
    tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path, **SIZES)
    model_config, device = ModelConfig.from_checkpoint(tmp_path), torch.device("cuda", 0)
    plain = EngineConfig(model=str(tmp_path))
    assert choose_linear_method(plain, model_config, device, 1) is None
    config = EngineConfig(model=str(tmp_path), quantization=quantization)
    for capability, has_fp8 in (((8, 0), False), ((8, 9), True), ((12, 0), True), ((7, 5), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        if has_fp8 or (quantization != "fp8" and has_fp8 is not None):
            method = choose_linear_method(config, model_config, device, 1)
            assert isinstance(method, QuantizedLinearMethod)
            continue
        least = "8.9" if quantization == "fp8" else "8.0"
        with pytest.raises(ValueError, match=f"compute capability {least} .*{capability[0]}"):
            choose_linear_method(config, model_config, device, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    floats = replace(config, quantization_activations="none")
    assert isinstance(choose_linear_method(floats, model_config, device, 1), QuantizedLinearMethod)
    integers = replace(config, quantization_activations="int8")
    if quantization == "int8":
        method = choose_linear_method(integers, model_config, device, 1)
        assert isinstance(method, QuantizedLinearMethod)
        return
    with pytest.raises(ValueError, match=f"'int8' on a GPU .*quantization='{quantization}' has"):
        choose_linear_method(integers, model_config, device, 1)


def test_a_tied_head_has_codes_and_the_embedding_has_not(tmp_path: Path) -> None:
    make_qwen3(tmp_path, tie_word_embeddings=True, **SIZES)
    options = COMMON | {"attention_backend": "triton", "quantization": "int8"}
    with LLM(tmp_path, **options) as llm:
        model = llm.engine.executor.model
        codes = model.lm_head.form.weight.codes
        assert codes.dtype == torch.int8 and model.lm_head.weight is None
        assert codes.shape == (300, 64)
        assert model.model.embed_tokens.weight.dtype == torch.float32
        layer = model.model.layers[0]
        assert all(p.dtype == torch.float32 and p.dim() == 1 for p in layer.parameters())


def tensors_of(found: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield what a module reaches: its parameters and buffers, and whatever it has otherwise."""
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, partial):
        yield from tensors_of([found.func, found.args, found.keywords], seen)
    elif isinstance(found, (dict, list, tuple)):
        for each in found.values() if isinstance(found, dict) else found:
            yield from tensors_of(each, seen)
    elif type(found).__module__.startswith("nanoserve") or isinstance(found, torch.nn.Module):
        yield from tensors_of(vars(found), seen)


MOVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"quantization": "int8"},
    "int8 by int8": {"quantization": "int8", "quantization_activations": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "fp8 by floats": {"quantization": "fp8"} | FLOATS,
    "gptq, act order": {"quantization": "gptq"},
    "experts": {"quantization": "int8"},
}


@pytest.mark.parametrize("kind", MOVED)
def test_weights_in_fewer_bits_move_when_their_model_does(tmp_path: Path, kind: str) -> None:
    """To sleep, a model goes to the host's memory: a GPU keeps nothing of it."""
    if kind in CASES:
        write, config = CASES[kind]
        make_quantized(tmp_path, write, config, **ONE_LAYER)
    elif kind == "experts":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        make_checkpoint(Qwen3MoeForCausalLM, tmp_path, **SIZES | moe)
    else:
        make_qwen3(tmp_path, **SIZES)
    with LLM(tmp_path, **COMMON | {"attention_backend": "triton"} | MOVED[kind]) as llm:
        model = llm.engine.executor.model
        before = [*tensors_of(model, set())]
        num_codes = sum(tensor.numel() for tensor in before if tensor.itemsize == 1)
        assert (num_codes > 12_000) is (kind != "plain")
        model.to("meta")
        after = [*tensors_of(model, set())]
        assert [(t.shape, t.dtype) for t in after] == [(t.shape, t.dtype) for t in before]
        assert all(tensor.is_meta for tensor in after)
