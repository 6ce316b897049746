"""`nanoserve info` against real engines, transformers' own count and the files themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_checkpoints import SMOLLM3, edit_json, make_checkpoint, make_qwen3
from transformers import (
    Gemma3ForCausalLM,
    MixtralForCausalLM,
    Phi3ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)

import nanoserve.worker.cpu_device
from nanoserve import LLM
from nanoserve.cli.describe import describe
from nanoserve.cli.main import main

CPU = {"device": "cpu", "skip_tokenizer_init": True}


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["info", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def refusal(model: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        LLM(model, **options).close()
    return str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_model_len": 100, "max_num_seqs": 3},
        {"kv_cache_memory_bytes": 10**7, "kv_cache_dtype": "int8"},
        {"kv_cache_memory_bytes": 10**6, "dtype": "float32", "block_size": 4},
        {"num_kv_blocks": 9},
    ],
)
def test_the_pool_is_that_of_an_engine(options: dict[str, Any]) -> None:
    facts = describe("tiny-qwen3", **CPU, **options)
    assert facts["refused"] == []
    with LLM("tiny-qwen3", **CPU, attention_backend="torch", **options) as llm:
        executor = llm.engine.executor
        assert facts["num_kv_blocks"] == executor.num_kv_blocks
        assert facts["max_model_len"] == executor.max_model_len
        tensors = [x for one in executor.kv_caches for x in (one.values, one.scales)]
        # With block 0, which is never given out.
        pool_bytes = sum(x.nbytes for x in tensors if x is not None)
    assert facts["kv_block_bytes"] * (facts["num_kv_blocks"] + 1) == pool_bytes
    kind = options.get("kv_cache_dtype", "auto")
    assert facts["kv_bytes_per_token"][kind] * facts["block_size"] == facts["kv_block_bytes"]
    blocks_each = -(-facts["max_model_len"] // facts["block_size"])
    assert facts["num_full_sequences"] == facts["num_kv_blocks"] // blocks_each


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (Qwen3ForCausalLM, {"tie_word_embeddings": True}),
        (Gemma3ForCausalLM, {}),
        (Phi3ForCausalLM, {}),
        (MixtralForCausalLM, {"num_local_experts": 3}),
        (
            Qwen2MoeForCausalLM,
            {"num_experts": 3, "num_experts_per_tok": 2, "head_dim": 12}
            | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36},
        ),
    ],
)
def test_weights_are_counted_without_reading_them(
    model: Any, overrides: dict[str, Any], shard_size: str, tmp_path: Path
) -> None:
    theirs = make_checkpoint(model, tmp_path, **overrides)
    if shard_size != "1GB":
        (tmp_path / "model.safetensors").unlink()
        theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    facts = describe(str(tmp_path), **CPU)
    assert facts["refused"] == []
    assert facts["num_parameters"] == theirs.num_parameters()
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size != "1GB")
    tensors = [tensor for file in files for tensor in load_file(file).values()]
    assert facts["stored_bytes"] == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"quantization": "int8"}])
def test_what_is_kept_is_what_an_engine_makes_room_for(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "quantization" in options:
        pytest.importorskip("numba")
    kept = describe("tiny-qwen3", **CPU, **options)["kept_bytes"]
    device = nanoserve.worker.cpu_device.CpuDevice
    for room, fits in ((kept, True), (kept - 1, False)):
        monkeypatch.setattr(device, "memory_bytes", lambda self, tp, room=room: room)
        refused = describe("tiny-qwen3", **CPU, **options)["refused"]
        assert (refused == []) == fits
    assert [refusal("tiny-qwen3", **CPU, **options)] == refused


def test_text_and_its_ends(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, facts = asked(capsys, "tiny-qwen3")
    assert status == 0
    with LLM("tiny-qwen3", device="cpu") as llm:
        assert set(facts["eos_token_ids"]) == llm.engine.input_processor.eos_token_ids
        assert facts["tokenizer_size"] == llm.engine.tokenizer.backend.get_vocab_size()
    assert facts["chat_template"] is True and facts["tokenizer"] == "BPE"
    make_qwen3(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=7)
    status, facts = asked(capsys, str(tmp_path), "--tokenizer", "tiny-qwen3")
    assert status == 0 and facts["chat_template"] is True
    with LLM(tmp_path, device="cpu", tokenizer="tiny-qwen3") as llm:  # its own, and the tokenizer's
        expected = llm.engine.input_processor.eos_token_ids
    assert set(facts["eos_token_ids"]) == expected and 7 in expected and len(expected) == 2


def test_every_refusal_is_told_the_first_as_an_engine_tells_it(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    options = {"device": "cpu", "max_model_len": 10**6}
    weights = load_file(tmp_path / "model.safetensors")
    edit_json(tmp_path / "config.json", vocab_size=301)
    facts = describe(str(tmp_path), **options)
    tokenizer, length, shapes = facts["refused"]
    assert "tokenizer.json" in tokenizer and "max_model_len=1000000" in length
    assert "model.embed_tokens.weight" in shapes
    assert refusal(tmp_path, **options) == tokenizer
    assert refusal(tmp_path, skip_tokenizer_init=True, **options) == length
    assert refusal(tmp_path, **CPU) == shapes
    # What does not depend on it is told all the same.
    assert facts["stored_bytes"] == sum(tensor.nbytes for tensor in weights.values())
    assert facts["num_kv_blocks"] > 0 and "max_model_len" not in facts


@pytest.mark.parametrize(
    "options", [{"dtype": "float8"}, {"quantization": "gptq"}, {"block_size": 0}]
)
def test_bad_options_are_refusals(options: dict[str, Any]) -> None:
    assert describe("tiny-qwen3", **CPU, **options)["refused"] == [
        refusal("tiny-qwen3", **CPU, **options)
    ]


def test_an_unknown_architecture_still_has_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_qwen3(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["NobodysForCausalLM"])
    status, facts = asked(capsys, str(tmp_path), "--skip-tokenizer-init")
    assert status == 1 and facts["stored_bytes"] > 0 and "num_parameters" not in facts
    (refused,) = facts["refused"]
    assert "NobodysForCausalLM" in refused


def test_a_gguf_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="pip install 'nanoserve[gguf]'")
    from gguf_models import ModelWriter

    file = tmp_path / "model.gguf"
    model = make_qwen3(tmp_path / "plain", hidden_size=64, intermediate_size=64)
    ModelWriter(model, "qwen3", "Q8_0").write(file)
    facts = describe(str(file), **CPU)
    sizes = [int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors]
    assert facts["refused"] == [] and facts["quantization"] == "gguf"
    assert facts["stored_bytes"] == sum(sizes)
    assert facts["num_parameters"] == model.num_parameters()


def test_it_is_also_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "tiny-qwen3", "--max-model-len", "5000"]) == 1
    told = capsys.readouterr().out
    for line in (
        "parameters      2,681,664",
        "chat template   yes",
        "refused         max_model_len",
    ):
        assert line in told


def test_layers_without_rope_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_checkpoint(SmolLM3ForCausalLM, tmp_path, **SMOLLM3 | {"no_rope_layers": [0, 1, 0]})
    assert main(["info", str(tmp_path), "--skip-tokenizer-init"]) == 0
    assert "in layers 0, 2\n" in capsys.readouterr().out
