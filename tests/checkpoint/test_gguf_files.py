"""Files of GGUF: several parts, damage, and what is refused by name."""

import contextlib
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="pip install 'nanoserve[gguf]'")

from gguf_models import ModelWriter, add_setting, close, write_bundled  # noqa: E402
from tiny_checkpoints import make_checkpoint  # noqa: E402
from transformers import LlamaForCausalLM, Qwen3ForCausalLM  # noqa: E402

from nanoserve import LLM  # noqa: E402
from nanoserve.checkpoint.gguf.config import config_json  # noqa: E402
from nanoserve.checkpoint.gguf.container import GGUFFile  # noqa: E402
from nanoserve.checkpoint.gguf.source import GGUFSource  # noqa: E402
from nanoserve.checkpoint.gguf.tokenizer import _byte_level as byte_level  # noqa: E402
from nanoserve.checkpoint.model_config import ModelConfig  # noqa: E402

OPTIONS = {"skip_tokenizer_init": True, "device": "cpu", "num_kv_blocks": 8, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> ModelWriter:
    folder = tmp_path_factory.mktemp("llama")
    model = make_checkpoint(LlamaForCausalLM, folder, hidden_size=64, intermediate_size=96)
    return ModelWriter(model, "llama", "Q8_0")


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        LLM(path, **OPTIONS)
    message = str(caught.value)
    assert len(message.replace(str(path), "")) < 1000
    return message


# ---------------------------------------------------------------- the container


def test_settings_and_tensors_are_those_that_the_package_reads(
    writer: ModelWriter, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    more = {"a.list": [1, 2, 3], "a.text": "Grüße", "a.flag": True, "a.texts": ["x", "", "y"]}
    writer.write(path, absolute=more)
    ours, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.settings == {name: field.contents() for name, field in fields.items()}
    assert ours.settings.items() >= more.items()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (found.type, found.shape) == (tensor.tensor_type.name, tuple(tensor.shape[::-1]))
        expected = tensor.data.view(np.uint8).reshape(found.data().shape)
        np.testing.assert_array_equal(found.data(), expected)


def test_several_files_are_one_model(writer: ModelWriter, tmp_path: Path) -> None:
    writer.write(tmp_path / "one.gguf")
    writer.write(tmp_path / "model.gguf", split_max_tensors=8)
    first = tmp_path / "model-00001-of-00003.gguf"
    whole, parts = GGUFSource(tmp_path / "one.gguf"), GGUFSource(first)
    assert whole.shapes() == parts.shapes()
    for name in whole.shapes():
        ours, expected = parts.read(name), whole.read(name)
        if hasattr(ours, "dequantize"):
            ours, expected = ours.dequantize(), expected.dequantize()
        assert (ours == expected).all()
    LLM(first, **OPTIONS)
    assert "pass model-00001-of" in refusal(tmp_path / "model-00002-of-00003.gguf")
    renamed = tmp_path / "renamed.gguf"
    first.rename(renamed)
    assert "keep the original file names" in refusal(renamed)
    renamed.rename(first)
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    assert "model-00002-of-00003.gguf is not next to it" in refusal(first)


def test_a_file_that_ends_too_early_is_refused(writer: ModelWriter, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer.write(path)
    content = path.read_bytes()
    for length in [*range(0, 3000, 37), len(content) // 2, len(content) - 33]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.gguf"):
            GGUFFile.open(path)


def test_no_flipped_byte_of_a_header_does_more_than_a_refusal(
    writer: ModelWriter, tmp_path: Path, by_size: Callable[..., int]
) -> None:
    """Or nothing at all, where it hits a name or a number that may be another."""
    path, rng = tmp_path / "model.gguf", random.Random(0)
    writer.write(path, absolute={"tokenizer.ggml.eos_token_id": 2})
    content = path.read_bytes()
    end = min(tensor.start for tensor in GGUFFile.open(path).tensors.values())
    refused, num_runs = 0, by_size(100, 1000, 3000)
    for _ in range(num_runs):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 4])):
            damaged[rng.randrange(end)] = rng.choice([0, 1, 8, 9, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            ModelConfig.from_checkpoint(path)
            GGUFSource(path)
        except ValueError:
            refused += 1
    assert refused > num_runs / 3 - 1


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        (struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), "ends too early"),
        (struct.pack("<IQQ", 3, 0, 2**63), "ends too early"),
        (struct.pack("<IQQ", 3, 2**60, 0), "ends too early"),
        (
            struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 2**40),
            "ends within a list",
        ),
        (struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 9, 1), "list of the"),
        (struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (struct.pack("<IQQ", 1, 0, 0), "version 1"),
    ],
)
def test_counts_beyond_the_file_are_refused_at_once(tail: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + tail + bytes(4))
    assert told in refusal(path)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_XS", "TQ1_0", "Q8_K"])
def test_a_type_that_is_not_implemented_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = np.zeros((2, 256 // block * size), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    close(writer)
    message = refusal(tmp_path / "model.gguf")
    assert f"blk.0.attn_q.weight as {kind}, which is not supported" in message
    assert "llama-quantize" in message and "Q6_K" in message


@pytest.mark.parametrize(
    "value", ["text", True, [1], [2**70, "x"], 1.5, -1, 2**63, float("nan"), []]
)
def test_a_setting_of_any_type_is_read_or_refused(
    value: Any, writer: ModelWriter, tmp_path
) -> None:
    """`ValueError`, and nothing else."""
    path = tmp_path / "model.gguf"
    writer.write(path, {"vocab_size": None})
    write_bundled(tmp_path / "words.gguf")
    words = GGUFFile.open(tmp_path / "words.gguf").settings
    file = GGUFFile.open(path)
    settings = words | file.settings
    good = replace(file, settings=settings)
    assert ModelConfig.from_hf(config_json(good), {}) and byte_level(good).eos_token_id == 2
    more = ["eot_token_id", "bos_token_id", "add_bos_token", "merges"]
    more = [f"tokenizer.ggml.{name}" for name in more] + ["llama.expert_count"]
    for name in [*settings, *more]:
        other = replace(file, settings=settings | {name: value})
        with contextlib.suppress(ValueError):
            ModelConfig.from_hf(config_json(other), {})
        if other.settings["tokenizer.ggml.model"] == "gpt2":
            with contextlib.suppress(ValueError):
                byte_level(other)


# ---------------------------------------------------------------- what it says of its model


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"rope.dimension_count": 8}, "rope.dimension_count=8 is not supported: it must be 16"),
        ({"rope.scaling.type": "su"}, "rope.scaling.type='su' is not supported"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"rope.scaling.attn_factor": 1.5}, "attn_factor"),
        ({"attention.temperature_scale": 0.1}, "attention.temperature_scale"),
        ({"attention.sliding_window": 64}, "attention.sliding_window"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv=[2, 1] is not supported"),
        ({"attention.value_length": 8}, "value_length=8 must equal key_length=16"),
        ({"attention.head_count": "four"}, "head_count='four' must be an integer"),
        ({"block_count": None}, "has no llama.block_count"),
        ({"block_count": 3}, "missing: model.layers.2."),
        ({"block_count": 1}, "unexpected: model.layers.1."),
        ({"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)}, "does not support in a 'llama'"),
        (
            {"blk.0.ffn_gate_exps.weight": np.ones((8, 8), np.float32)},
            "experts must have 3 dimensions",
        ),
        ({"rope_freqs.weight": np.ones(7, np.float32)}, "7 numbers"),
        ({"rope_freqs.weight": np.ones((8, 1), np.float32)}, "not a list of F32"),
        (
            {"rope_freqs.weight": np.ones(8, np.float32), "rope.scaling.factor": 2.0},
            "together with",
        ),
        ({"context_length": 2**31}, "context_length"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "rms_epsilon=0.0"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    extra: dict[str, Any], told: str, writer: ModelWriter, tmp_path: Path
) -> None:
    writer.write(tmp_path / "model.gguf", extra)
    assert told in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "extra", [{"attention.head_count_kv": [2, 2]}, {"rope.scaling.factor": 0.0}]
)
def test_what_says_the_same_in_other_words_is_read(
    extra: dict[str, Any], writer: ModelWriter, tmp_path: Path
) -> None:
    writer.write(tmp_path / "plain.gguf")
    writer.write(tmp_path / "model.gguf", extra)
    plain = ModelConfig.from_checkpoint(tmp_path / "plain.gguf")
    assert ModelConfig.from_checkpoint(tmp_path / "model.gguf") == plain


def test_an_architecture_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    for arch in ("mamba", "mistral3", "gemma"):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
        add_setting(writer, f"{arch}.block_count", 1)
        close(writer)
        message = refusal(tmp_path / "model.gguf")
        assert f"general.architecture='{arch}'" in message and "qwen3moe" in message


def test_what_ends_an_answer_and_what_makers_recommend(writer: ModelWriter, tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 8,
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|endoftext|>", "<end_of_turn>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1],  # the last is a word like others
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    writer.write(tmp_path / "model.gguf", absolute=more)
    config = ModelConfig.from_checkpoint(tmp_path / "model.gguf")
    assert config.eos_token_ids == {7, 8, 1, 2}
    assert config.default_sampling == {"temperature": 0.5, "top_k": 20}


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_its_attention_by_another_size(
    arch: str, layers: int, tmp_path: Path
) -> None:
    """27B: query_pre_attn_scalar is 144 and 168 in their config.json, hidden_size / heads."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
    numbers = {"gemma2": (4608, 32, 144), "gemma3": (5376, 32, 168)}
    hidden, heads, scalar = numbers[arch]
    for name, value in {
        "context_length": 8192, "embedding_length": hidden, "block_count": layers,
        "feed_forward_length": 36864, "attention.head_count": heads,
        "attention.head_count_kv": 16, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": 128, "attention.value_length": 128,
        "attention.sliding_window": 1024,
    }.items():  # fmt: skip
        add_setting(writer, f"{arch}.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    close(writer)
    assert config_json(GGUFFile.open(tmp_path / "model.gguf"))["query_pre_attn_scalar"] == scalar
    config = ModelConfig.from_checkpoint(tmp_path / "model.gguf")
    assert config.attention_scale == scalar**-0.5


def test_a_folder_with_nothing_else_says_which_file_to_give(
    writer: ModelWriter, tmp_path: Path
) -> None:
    writer.write(tmp_path / "model-Q8_0.gguf")
    with pytest.raises(ValueError, match=r"no config.json; .*model-Q8_0.gguf"):
        LLM(tmp_path, **OPTIONS)
    with pytest.raises(ValueError, match="is on disk"):
        LLM(tmp_path / "model-Q8_0.gguf", revision="main", **OPTIONS)
    with pytest.raises(ValueError, match="nor a GGUF file"):
        LLM(tmp_path / "absent.gguf", **OPTIONS)


def test_random_weights_need_only_the_settings(writer: ModelWriter, tmp_path: Path) -> None:
    writer.write(tmp_path / "model.gguf")
    with LLM(tmp_path / "model.gguf", load_format="dummy", **OPTIONS) as llm:
        assert llm.engine.model_config.dtype == "bfloat16"


def test_names_are_those_of_the_package(tmp_path: Path) -> None:
    """Every tensor of a Qwen3, back and forth."""
    model = make_checkpoint(Qwen3ForCausalLM, tmp_path / "checkpoint", hidden_size=64)
    ModelWriter(model, "qwen3", "F32").write(tmp_path / "model.gguf")
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert GGUFSource(tmp_path / "model.gguf").shapes() == expected
