"""Checkpoints that are fine, but not as nanoserve reads them: each is told what to do."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json
from transformers import AutoModelForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.errors import describe_mismatches

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 8, "max_num_seqs": 4}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1503300328\n"
Change = Callable[[Path], object]


@pytest.fixture
def odd(checkpoint: Path, tmp_path: Path) -> Path:
    """A good checkpoint, to be changed."""
    return shutil.copytree(checkpoint, tmp_path / "model")


def refusal(name: str | Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        LLM(name, **OPTIONS | options)
    message = str(caught.value)
    assert "\n" not in message and len(message.replace(str(name) or "''", "")) < 900
    return message


def greedy(path: Path) -> list[int]:
    with LLM(path, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    return output.outputs[0].token_ids


def rename_tensors(path: Path, rename: Callable[[str], str]) -> None:
    tensors = {rename(name): tensor for name, tensor in load_file(path / WEIGHTS).items()}
    save_file(tensors, path / WEIGHTS)


def pickle_weights(path: Path, file: str = "pytorch_model.bin") -> None:
    torch.save(load_file(path / WEIGHTS), path / file)
    (path / WEIGHTS).unlink()


def leave_adapter(path: Path, **entries: Any) -> None:
    """What peft saves, and nothing else."""
    for file in path.iterdir():
        file.unlink()
    entries = {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "peft_type": "LORA"} | entries
    (path / ADAPTER).write_text(json.dumps(entries))
    (path / "adapter_model.safetensors").write_text("not read")


# ---------------------------------------------------------------- files


def shard_pointer(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / "shard.safetensors").write_text(POINTER)
    (path / INDEX).write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (lambda path: (path / WEIGHTS).write_text(POINTER), WEIGHTS),
        (lambda path: (path / CONFIG).write_text(POINTER), CONFIG),
        (shard_pointer, "shard.safetensors"),
    ],
    ids=["weights", "config", "shard"],
)
def test_a_pointer_of_git_lfs(odd: Path, change: Change, file: str) -> None:
    change(odd)
    told = refusal(odd)
    assert f"{odd / file} is a git-lfs pointer" in told and f"run `git lfs pull` in {odd}" in told


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_a_pointer(tmp_path: Path, file: str) -> None:
    folder = shutil.copytree(bundled_checkpoint("tiny-qwen3"), tmp_path / "model")
    (folder / file).write_text(POINTER)
    told = refusal(folder, skip_tokenizer_init=False)
    assert f"{folder / file} is a git-lfs pointer" in told and "`git lfs pull`" in told


def test_weights_that_are_neither_safetensors_nor_a_pointer(odd: Path) -> None:
    (odd / WEIGHTS).write_text("<html>")
    assert f"{odd / WEIGHTS} is damaged or not a safetensors file: " in refusal(odd)


def adapter_and_config(path: Path) -> None:
    config = (path / CONFIG).read_text()
    leave_adapter(path)
    (path / CONFIG).write_text(config)


@pytest.mark.parametrize("change", [leave_adapter, adapter_and_config])
def test_an_adapter_alone(odd: Path, change: Change) -> None:
    change(odd)
    assert refusal(odd) == (
        f"{odd} is a LoRA adapter of 'Qwen/Qwen3-0.6B' (base_model_name_or_path): merge it into "
        f"its base with peft's merge_and_unload() and save the result"
    )


def test_an_adapter_of_another_kind_and_of_an_unknown_base(odd: Path) -> None:
    leave_adapter(odd, peft_type="IA3", base_model_name_or_path=None)
    assert f"{odd} is a peft adapter of None" in refusal(odd)


def test_an_adapter_beside_a_model_is_not_applied_and_that_is_said(
    odd: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (odd / ADAPTER).write_text("not read")
    with caplog.at_level(logging.WARNING):
        assert greedy(odd) == greedy(checkpoint)
    (record,) = [each for each in caplog.records if "adapter" in each.getMessage()]
    assert f"{odd} has an adapter_config.json next to the model" in record.getMessage()
    assert "not applied" in record.getMessage() and record.levelno == logging.WARNING


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickles(odd: Path, file: str) -> None:
    pickle_weights(odd, file)
    told = refusal(odd)
    assert f"{file} are pickles, which may execute code: convert them with transformers" in told


def test_pickles_saved_anew_as_told(odd: Path, checkpoint: Path) -> None:
    pickle_weights(odd)
    line = refusal(odd).split("`")[1]
    assert line.count(str(odd)) == 2
    eval(line, {"AutoModelForCausalLM": AutoModelForCausalLM})
    assert greedy(odd) == greedy(checkpoint)


@pytest.mark.parametrize("names", [["consolidated"], ["model.fp16", "model.fp32"]])
def test_safetensors_by_another_name(odd: Path, names: list[str]) -> None:
    for name in names:
        shutil.copy(odd / WEIGHTS, odd / f"{name}.safetensors")
    (odd / WEIGHTS).unlink()
    told = refusal(odd)
    assert "neither model.safetensors nor an index of shards, but " in told
    assert ", ".join(f"{name}.safetensors" for name in names) in told
    assert "rename it to model.safetensors" in told


# ---------------------------------------------------------------- names of tensors


@pytest.mark.parametrize(
    ("prefix", "why"),
    [
        ("module.", "saved from DistributedDataParallel"),
        ("_orig_mod.", "saved from torch.compile"),
        ("module._orig_mod.", "saved from DistributedDataParallel: saved from torch.compile"),
        ("language_model.", "the text part of a multimodal model"),
        ("policy.", None),
    ],
)
def test_names_with_a_prefix(odd: Path, prefix: str, why: str | None) -> None:
    rename_tensors(odd, lambda name: prefix + name)
    told = refusal(odd)
    reason = f": {why}" if why else ""
    assert f"all names begin with '{prefix}'{reason}; strip it, with safetensors.torch" in told
    assert "; missing: " in told


def test_a_prefix_stripped_as_told(odd: Path, checkpoint: Path) -> None:
    rename_tensors(odd, lambda name: f"module.{name}")
    line = refusal(odd).split("safetensors.torch: ")[1].split("; missing")[0]
    file = odd / WEIGHTS
    eval(line, {"load_file": load_file, "save_file": save_file, "FILE": file, "name": None})
    assert greedy(odd) == greedy(checkpoint)


def test_a_prefix_of_some_names(odd: Path) -> None:
    rename_tensors(odd, lambda name: f"language_model.{name}")
    save_file(load_file(odd / WEIGHTS) | {"vision.a": torch.zeros(1)}, odd / WEIGHTS)
    assert "many names begin with 'language_model.'" in refusal(odd)


def test_names_of_a_base_model(odd: Path) -> None:
    tensors = load_file(odd / WEIGHTS)
    tensors.pop("lm_head.weight")
    save_file(tensors, odd / WEIGHTS)
    rename_tensors(odd, lambda name: name.removeprefix("model."))
    told = refusal(odd)
    assert "the names lack 'model.', like the names of a base model without a head" in told
    assert "embedding model" in told and "; missing: " in told


def test_where_one_tensor_is_missing_nothing_is_guessed(odd: Path) -> None:
    tensors = load_file(odd / WEIGHTS)
    tensors["other.model.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, odd / WEIGHTS)
    assert "do not match the model: missing: model.layers.0.mlp.up_proj.weight;" in refusal(odd)


def test_a_hundred_thousand_names_take_no_time() -> None:
    expected = {f"model.layers.{i}.weight": (1,) for i in range(100_000)}
    stored = {f"module.{name}": (1,) for name in expected}
    assert describe_mismatches(expected, stored, ()).startswith("all names begin with 'module.'")
    stored = {f"x.{i}.weight": (1,) for i in range(100_000)}
    assert describe_mismatches(expected, stored, ()).startswith("missing: ")


# ---------------------------------------------------------------- architectures


@pytest.mark.parametrize(
    ("architecture", "advice"),
    [
        ("LLaMAForCausalLM", """did you mean "architectures": ["LlamaForCausalLM"] in"""),
        ("Qwen4ForCausalLM", "the nearest name is 'Qwen3ForCausalLM', a different model unless"),
        ("BloomForCausalLM", "it does not run through transformers: its class does not use"),
        ("GPT2DoubleHeadsModel", None),
        ("BertLMHeadModel", "it does not run through transformers: is_decoder is false"),
        ("Gemma3ForConditionalGeneration", "it is a multimodal model"),
        ("Qwen2AudioForConditionalGeneration", "it is a multimodal model"),
        ("T5ForConditionalGeneration", "it has an encoder and a decoder"),
        ("T5EncoderModel", "it has an encoder and a decoder"),
        ("BartForConditionalGeneration", "it has an encoder and a decoder"),
        ("PegasusXForConditionalGeneration", "it has an encoder and a decoder"),
        ("MarianMTModel", "it has an encoder and a decoder"),
        ("WhisperForConditionalGeneration", "it has an encoder and a decoder"),
        ("VisionEncoderDecoderModel", "it has an encoder and a decoder"),
        ("MambaForCausalLM", "it has recurrent layers"),
        ("JambaForCausalLM", "it has recurrent layers"),
        ("BertModel", "it is an encoder, which outputs"),
        ("XLMRobertaForSequenceClassification", "it is an encoder, which outputs"),
        ("UnheardOfForMaskedLM", "it is an encoder, which outputs"),
        ("ViTForImageClassification", "it is ...ForImageClassification, and nanoserve runs"),
        ("Qwen3ForSequenceClassification", "it is a classifier or a reward model"),
        ("Qwen3ForTokenClassification", "it is a classifier, which outputs labels"),
        ("Qwen2Model", "it has no LM head, like an embedding model"),
    ],
)
def test_architectures(odd: Path, architecture: str, advice: str | None) -> None:
    """Some of these could pool: see tests/features/pooling/test_pooling_checkpoints.py."""
    edit_json(odd / CONFIG, architectures=[architecture])
    told = refusal(odd, runner="generate")
    assert told.startswith(f"architecture '{architecture}' is not supported; {advice or 'suppo'}")
    assert "supported: ['DeepseekV2ForCausalLM', " in told
    assert told.endswith("see nanoserve.models.registry.register_model")


@pytest.mark.parametrize("architecture", ["OPTForCausalLM", "GPT2LMHeadModel"])
def test_an_architecture_that_runs_through_transformers(odd: Path, architecture: str) -> None:
    """The weights are those of a Qwen3."""
    edit_json(odd / CONFIG, architectures=[architecture])
    assert f"do not match {architecture}: " in refusal(odd)


def test_an_encoder_with_a_decoder(odd: Path) -> None:
    name = "T5ForConditionalGeneration"
    edit_json(odd / CONFIG, architectures=[name], is_encoder_decoder=True)
    assert "it has an encoder and a decoder" in refusal(odd)


def test_a_model_that_sees_whatever_its_name(odd: Path) -> None:
    edit_json(odd / CONFIG, architectures=["LlavaQwen3ForCausalLM"], vision_config={"depth": 3})
    assert "it is a multimodal model" in refusal(odd)


@pytest.mark.parametrize(
    ("model_type", "advice"),
    [
        ("qwen3_moe", """did you mean "architectures": ["Qwen3MoeForCausalLM"] in config.json?"""),
        ("bert", "it is an encoder"),
        ("switch_transformers", "it has an encoder and a decoder"),
        ("falcon_mamba", "it has recurrent layers"),
        (..., None),
    ],
)
def test_no_architecture(odd: Path, model_type: Any, advice: str | None) -> None:
    edit_json(odd / CONFIG, architectures=..., model_type=model_type)
    told = refusal(odd)
    shown = None if model_type is ... else model_type
    assert told.startswith(f"config.json has no 'architectures' (its model_type: {shown!r}); ")
    assert advice is None or advice in told


# ---------------------------------------------------------------- names of checkpoints


def test_a_tilde_is_the_home_folder(
    odd: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(odd.parent))
    assert greedy("~/model") == greedy(checkpoint)
    assert greedy(Path("~/model/")) == greedy(checkpoint)
    assert f"{odd.parent}/nowhere does not exist" in refusal("~/nowhere")


@pytest.mark.parametrize("name", ["./models/Qwen3", "../Qwen3", "/models/Qwen3", "./model.gguf"])
def test_a_path_that_does_not_exist(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = refusal(name)
    assert told.startswith(f"'{name}' is neither a folder nor a bundled checkpoint")
    assert f"{(tmp_path / name).resolve()} does not exist; for a model on the Hub, use" in told


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("tiny-qwen", "did you mean 'tiny-qwen3'?"),
        ("tiny_qwen3", "did you mean 'tiny-qwen3'?"),
        ("Tiny-Qwen3", "did you mean 'tiny-qwen3'?"),
        ("tiny_qwen3_draft", "did you mean 'tiny-qwen3-draft'?"),
        ("Qwen3-0.6B", "did you mean 'Qwen/Qwen3-0.6B'?"),
        ("Llama-3.2-1B", "did you mean 'meta-llama/Llama-3.2-1B'?"),
        ("gpt2", "bundled: tiny-qwen3, tiny-qwen3-draft"),
        ("", "it is empty"),
        ("org/m-GGUF:Q4_K_M", "pass the file, as in 'org/m-GGUF/model-Q4_K_M.gguf'"),
    ],
)
def test_a_name_that_is_almost_one(name: str, advice: str) -> None:
    told = refusal(name)
    assert "a Hub name, which is a str of the form 'organisation/model'" in told
    assert advice in told


def test_a_path_is_no_name_on_the_hub() -> None:
    told = refusal(Path("Qwen/Qwen3-0.6B"))
    assert told.startswith("'./Qwen/Qwen3-0.6B' is neither a folder nor a bundled checkpoint")
    assert "for a model on the Hub, use 'organisation/model'" in told


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "pass its Hub name, 'Qwen/Qwen3-0.6B'"),
        ("hf.co/Qwen/Qwen3-0.6B/tree/main?a=b", "pass its Hub name, 'Qwen/Qwen3-0.6B'"),
        (
            "https://huggingface.co/org/m-GGUF/resolve/main/m-Q8_0.gguf?download=true",
            "pass its Hub name, 'org/m-GGUF/m-Q8_0.gguf'",
        ),
        ("http://example.org/model", "download the model and pass its folder"),
    ],
)
def test_an_address(address: str, advice: str) -> None:
    told = refusal(address)
    assert told.startswith(f"'{address}' is an address, not a model: ") and advice in told


def test_a_file(odd: Path) -> None:
    told = refusal(odd / WEIGHTS)
    assert told.startswith(f"'{odd / WEIGHTS}' is a file, but a checkpoint is a folder")
    assert told.endswith(f"pass its folder, '{odd}'")


def test_a_file_in_gguf_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "sha256-4d7a").write_bytes(b"GGUF\3\0\0\0")
    assert "is in GGUF format, but its name must end in" in refusal(str(tmp_path / "sha256-4d7a"))
