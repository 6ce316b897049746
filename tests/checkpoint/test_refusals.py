"""What no reader reads is refused by name, before any weight is read, and with a way out."""

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dequantized_models import open_checkpoint, read_all
from quantized_checkpoints import (
    CASES,
    make_quantized,
    split_into_shards,
    write_awq,
    write_fp8,
    write_gptq,
    write_nf4,
)
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, make_qwen3

from nanoserve.checkpoint.formats.fields import check_quantization_config
from nanoserve.checkpoint.formats.registry import FORMATS
from nanoserve.checkpoint.formats.source import open_quantized
from nanoserve.checkpoint.model_config import ModelConfig

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 48]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SCHEME = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": SCHEME},
}
MODULE = "model.layers.0.self_attn.q_proj"


def with_scheme(**changes: Any) -> dict:
    return PACKED | {"config_groups": {"group_0": SCHEME | changes}}


def with_weights(**changes: Any) -> dict:
    return with_scheme(weights=SCHEME["weights"] | changes)


STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
# The config, and what the message must name.
CONFIGS: dict[str, tuple[Any, list[str]]] = {
    "another method": ({"quant_method": "hqq"}, ["quant_method='hqq'", *FORMATS.names()]),
    "gpt-oss's of groups": (
        {"quant_method": "mxfp4", "group_size": 32},
        ["mxfp4", "group_size"],
    ),
    "no method": ({"bits": 4}, ["quant_method=None"]),
    "no object": ([1], ["quantization_config=[1]"]),
    "a method of another type": ({"quant_method": ["gptq"]}, ["['gptq']"]),
    "gptq of 3 bits": (GPTQ | {"bits": 3}, ["'bits'=3", "4-bit or 8-bit"]),
    "gptq of no bits": ({"quant_method": "gptq"}, ["'bits'=None"]),
    "gptq of true bits": (GPTQ | {"bits": 4.0}, ["'bits'=4.0"]),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, ["'marlin'", "as gptq"]),
    "two labels": (
        GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"},
        ["checkpoint_format='gptq' and format='gptq_v2'", "delete"],
    ),
    "overrides": (
        GPTQ | {"dynamic": {"-:.*head": {}, "+:.*up": {"bits": 8}}},
        ["dynamic=['+:.*up']"],
    ),
    "rotation": (GPTQ | {"rotation": "hadamard"}, ["'rotation'='hadamard'"]),
    "an adapter": (GPTQ | {"adapter": {"name": "lora"}}, ["'adapter'", "merge"]),
    "a field nobody knows": (GPTQ | {"zero_shift": 1}, ["'zero_shift'=1", "delete it"]),
    "gptq groups of 0": (GPTQ | {"group_size": 0}, ["group_size=0"]),
    "awq gemv": (AWQ | {"version": "gemv"}, ["'version'='gemv'", "gemm"]),
    "awq of 8 bits": (AWQ | {"bits": 8}, ["'bits'=8"]),
    "static fp8": (FP8 | {"activation_scheme": "static"}, ["'activation_scheme'='static'"]),
    "e5m2": (FP8 | {"fmt": "e5m2"}, ["'fmt'='e5m2'"]),
    "blocks of 0": (FP8 | {"weight_block_size": [0, 128]}, ["weight_block_size=[0, 128]"]),
    "fp4 experts": (FP8 | {"expert_dtype": "fp4"}, ["'expert_dtype'='fp4'"]),
    "quantized embedding": (FP8 | {"modules_to_convert": ["embed_tokens"]}, ["modules_to_convert"]),
    "16-bit weights": (BNB | {"llm_int8_has_fp16_weight": True}, ["llm_int8_has_fp16_weight"]),
    "both bits": (BNB | {"load_in_8bit": True}, ["load_in_4bit", "load_in_8bit"]),
    "quantized K and V": (PACKED | {"kv_cache_scheme": STATIC}, ["'kv_cache_scheme'", "delete it"]),
    "sparse": (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config"]),
    "transforms": (
        PACKED | {"transform_config": {"config_groups": {"u": 1}}},
        ["transform_config"],
    ),
    "not compressed": (PACKED | {"quantization_status": "frozen"}, ["'frozen'"]),
    "no groups": (PACKED | {"config_groups": {}}, ["config_groups={}"]),
    "a preset": (PACKED | {"config_groups": {"W8A8": ["Linear"]}}, ["['Linear']", "presets"]),
    "nvfp4": (with_scheme(format="nvfp4-pack-quantized"), ["'nvfp4-pack-quantized'"]),
    "static activations": (with_scheme(input_activations=STATIC), ["input_activations", "dynamic"]),
    "outputs": (with_scheme(output_activations=STATIC), ["output_activations"]),
    "3 bits": (with_weights(num_bits=3), ["num_bits=3"]),
    "floats packed": (with_weights(type="float"), ["type='float'"]),
    "blocks packed": (with_weights(strategy="block"), ["strategy='block'"]),
    "another order": (with_weights(actorder="random"), ["actorder='random'"]),
    "no group size": (with_weights(group_size=None), ["group_size=None"]),
    "dynamic weights": (with_weights(dynamic=True), ["dynamic=True"]),
    "a weight field": (with_weights(clip=0.9), ["['clip']"]),
    "targets": (with_scheme(targets="Linear"), ["targets='Linear'"]),
    "an endless pattern": (with_scheme(targets=["re:(a+)+$"]), ["re:(a+)+$", "names instead"]),
    "no pattern": (PACKED | {"ignore": ["re:("]}, ["ignore: 're:('"]),
}


@pytest.mark.parametrize(("config", "told"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_is_refused_by_name(config: Any, told: list[str], tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nobody reads this")
    edit_json(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_checkpoint(tmp_path)
    assert all(part in str(caught.value) for part in told), caught.value
    assert len(str(caught.value)) < 700


HARMLESS = (
    GPTQ | {"damp_percent": 0.1, "true_sequential": True, "static_groups": False, "meta": {"a": 1}},
    GPTQ | {"desc_act": True, "checkpoint_format": "gptq", "pack_dtype": "int32", "lm_head": False},
    GPTQ | {"dynamic": {"-:.*mlp.gate": {}}, "model_file_base_name": "m", "quantizer": "optimum:1"},
    AWQ | {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["lm_head"]},
    FP8 | {"activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]},
    BNB | {"bnb_4bit_compute_dtype": "bfloat16", "llm_int8_threshold": 6.0, "_load_in_4bit": True},
    PACKED | {"ignore": ["lm_head", "re:.*gate$"], "kv_cache_scheme": None, "version": "0.9"},
    PACKED | {"sparsity_config": {"format": "dense"}, "global_compression_ratio": 1.5},
    with_scheme(input_activations=STATIC | {"dynamic": True, "strategy": "token"}),
)


@pytest.mark.parametrize("config", HARMLESS)
def test_what_changes_no_numbers_is_accepted_and_kept(config: dict) -> None:
    assert check_quantization_config(json.loads(json.dumps(config))) == config


def test_transformers_own_configs_are_accepted() -> None:
    """With every field that it writes."""
    from transformers import AwqConfig, BitsAndBytesConfig, FineGrainedFP8Config, GPTQConfig

    for config in (
        GPTQConfig(bits=4, dataset="c4", sym=False, desc_act=True),
        AwqConfig(bits=4),
        FineGrainedFP8Config(),
        BitsAndBytesConfig(load_in_8bit=True),
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    ):
        check_quantization_config(json.loads(config.to_json_string(use_diff=False)))


# ---------------------------------------------------------------- files


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Of MODULE's parts; None removes one."""
    stored = load_file(path / "model.safetensors")
    for part, tensor in tensors.items():
        name = f"{MODULE}.{part}"
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, path / "model.safetensors")


@pytest.mark.parametrize("part", ["qzeros", "scales", "qweight"])
def test_a_missing_part_is_named(part: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, write_awq, AWQ)
    change(tmp_path, **{part: None})
    with pytest.raises(ValueError) as caught:
        open_checkpoint(tmp_path)
    told = f"{MODULE}.{part} is missing"
    if part == "qweight":  # then nothing says that it is quantized
        told = f"lacks other parts: {MODULE}.qzeros (I32), {MODULE}.scales (F16)"
    assert told in str(caught.value)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    make_quantized(tmp_path, write_awq, AWQ)
    split_into_shards(tmp_path)
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    with pytest.raises(ValueError, match=r"is both in .*00001.* and in .*00002"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("part", "tensor", "told"),
    [
        (
            "qzeros",
            torch.zeros(3, 8, dtype=torch.int32),
            r"qzeros has shape \[3, 8\]; expected \[4, 8\]",
        ),
        ("qzeros", torch.zeros(4, 8), "qzeros is F32"),
        ("scales", torch.ones(4, 64, dtype=torch.int8), "scales is I8"),
        (
            "qweight",
            torch.zeros(64, dtype=torch.int32),
            r"qweight has shape \[64\]; expected a non-empty 2-D tensor",
        ),
        ("g_idx", torch.zeros(64, dtype=torch.int32), "g_idx .I32."),
        ("weight", torch.zeros(64, 64), "weight .F32."),
        ("input_scale", torch.zeros(()), "input_scale .F32."),
        ("extra", torch.zeros(2, dtype=torch.int64), "extra .I64."),
    ],
)
def test_a_strange_part_is_named(
    part: str, tensor: torch.Tensor, told: str, tmp_path: Path
) -> None:
    make_quantized(tmp_path, write_awq, AWQ)
    change(tmp_path, **{part: tensor})
    with pytest.raises(ValueError, match=told):
        open_checkpoint(tmp_path)


def test_integers_without_scales_are_refused(tmp_path: Path) -> None:
    make_quantized(tmp_path, write_fp8, FP8)
    change(tmp_path, weight_scale_inv=None)
    with pytest.raises(ValueError, match=re.escape(f"{MODULE}.weight (F8_E4M3)")):
        open_checkpoint(tmp_path)
    change(tmp_path, weight_scale_inv=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\[2, 3\].*blocks of \[32, 48\].*\[2, 2\]"):
        open_checkpoint(tmp_path)


def test_a_weight_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    """Once packed and once plain, or with two scales: nobody can tell which is meant."""
    parts, _ = write_fp8(torch.randn(64, 96))
    parts["weight_scale"] = torch.ones(())
    save_file(
        {f"m.{part}": tensor for part, tensor in parts.items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"m has \['weight_scale'\], which contradict"):
        open_quantized(tmp_path, FP8)
    packed = {
        "m.weight": torch.zeros(8, 16),
        "m.weight_packed": torch.zeros(8, 2, dtype=torch.int32),
        "m.weight_scale": torch.ones(8, 1),
        "m.weight_shape": torch.tensor([8, 16]),
        "m.weight_zero_point": torch.ones(8, 1, dtype=torch.int8),
    }
    save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"m has \['weight'\], which contradict"):
        open_quantized(tmp_path, PACKED)
    del packed["m.weight"]
    save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="weight_zero_point is not 0, but the config has symm"):
        open_quantized(tmp_path, PACKED).read("m.weight")


def test_codes_that_need_more_bits_are_refused(tmp_path: Path) -> None:
    """A product of 4 bits would cut them off."""
    config = with_scheme(format="int-quantized")
    tensors = {
        "m.weight": torch.full((8, 16), 7, dtype=torch.int8),
        "m.weight_scale": torch.ones(8, 1),
    }
    tensors["m.weight"][3, 4] = -8
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_quantized(tmp_path, config).read("m.weight").bits == 4
    tensors["m.weight"][3, 4] = -9
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"m\.weight has codes with more than 4 bits"):
        open_quantized(tmp_path, config).read("m.weight")


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_wrong_label_of_a_symmetric_file_is_found_out(is_v2: bool, tmp_path: Path) -> None:
    """Its zero points would be 7 or 9, and all weights off by a whole scale."""
    right, wrong = ("gptq_v2", "gptq") if is_v2 else ("gptq", "gptq_v2")
    config = GPTQ | {"sym": True, "checkpoint_format": wrong}

    def write(weight: torch.Tensor) -> Any:
        return write_gptq(weight, is_v2=is_v2, symmetric=True)

    make_quantized(tmp_path, write, config)
    with pytest.raises(ValueError, match=f"set checkpoint_format to '{right}'"):
        read_all(open_checkpoint(tmp_path))


def test_groups_that_are_not_there_are_refused(tmp_path: Path) -> None:
    make_quantized(tmp_path, write_gptq, GPTQ)
    change(tmp_path, g_idx=torch.full((64,), 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="g_idx has groups 4 to 4, but must have 0 to 3"):
        read_all(open_checkpoint(tmp_path))
    change(tmp_path, g_idx=None)
    edit_json(tmp_path / "config.json", quantization_config=GPTQ | {"desc_act": True})
    with pytest.raises(ValueError, match="g_idx is missing"):
        open_checkpoint(tmp_path)


STATES: dict[str, Any] = {
    "no shape": {"blocksize": 64},
    "a huge shape": {"shape": [2**30, 2**30], "blocksize": 64},
    "another shape": {"shape": [64, 60], "blocksize": 64},
    "three sizes": {"shape": [4, 16, 64], "blocksize": 64},
    "blocks of 0": {"shape": [64, 64], "blocksize": 0},
    "blocks of text": {"shape": [64, 64], "blocksize": "64"},
    "nested, in no file": {"shape": [64, 64], "blocksize": 64, "nested_blocksize": 256},
    "a list": [1],
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_quant_state_that_contradicts_its_file_is_refused(state: Any, tmp_path: Path) -> None:
    make_quantized(tmp_path, write_nf4, BNB)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    change(tmp_path, **{"weight.quant_state.bitsandbytes__nf4": text})
    with pytest.raises(ValueError, match="q_proj"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("module", ["fields", "schemes"])
def test_a_config_is_checked_without_torch(module: str) -> None:
    code = f"import sys, nanoserve.checkpoint.formats.{module}; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_patterns_end_soon(tmp_path: Path) -> None:
    """The slowest that are accepted, on the longest name, which they nearly match."""
    from nanoserve.checkpoint.formats.schemes import read_schemes, scheme_of

    config = with_scheme(targets=["re:.*a.*a.*b", "Linear"])
    schemes = read_schemes(config)
    start = time.perf_counter()
    assert scheme_of("a" * 250, config, schemes).num_bits == 4
    assert time.perf_counter() - start < 5
    with pytest.raises(ValueError, match="longer than 250"):
        scheme_of("a" * 251, config, schemes)


def test_ignored_modules_must_not_be_quantized(tmp_path: Path) -> None:
    from nanoserve.checkpoint.formats.schemes import read_schemes, scheme_of

    config = PACKED | {"ignore": ["re:.*q_proj"]}
    with pytest.raises(ValueError, match="`ignore` lists it as unquantized"):
        scheme_of(MODULE, config, read_schemes(config))
    config = with_scheme(targets=["re:.*mlp"])
    with pytest.raises(ValueError, match="matches no target in config_groups"):
        scheme_of(MODULE, config, read_schemes(config))


@pytest.mark.parametrize(
    "name", ["gptq, act order", "awq", "fp8, blocks", "bitsandbytes NF4, nested"]
)
def test_a_damaged_file_is_refused_or_read(name: str, tmp_path: Path) -> None:
    """Never another exception, and never a weight of another shape than was told."""
    write, config = CASES[name]
    rng, refused = random.Random(0), 0
    parts, _ = write(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)))
    for _ in range(40):
        tensors = {f"m.{part}": tensor.contiguous() for part, tensor in parts.items()}
        damaged = rng.choice(sorted(tensors))
        shape = [rng.choice((0, 1, 2, 64, 96)) for _ in range(rng.randint(0, 3))]
        dtype = rng.choice((torch.float32, torch.int32, torch.uint8, torch.int64, torch.bool))
        old = tensors[damaged]
        new = rng.choice((torch.ones(shape, dtype=dtype), torch.ones(shape), old.to(dtype)))
        tensors[damaged] = new
        save_file(tensors, tmp_path / "model.safetensors")
        try:
            read_all(open_quantized(tmp_path, config))
        except ValueError:
            refused += 1
    assert refused > 20
