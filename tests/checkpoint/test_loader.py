"""Checkpoints that transformers wrote load as they are meant, or not at all."""

import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, make_qwen3, prompt_logits
from torch import nn
from tqdm import tqdm

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint import loader
from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.models.registry import model_class

IDS = [(7 * i * i + i) % 300 for i in range(37)]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"  # one part of a fused weight
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OPTIONS = {"skip_tokenizer_init": True, "num_kv_blocks": 8, "max_num_seqs": 4}


def load(
    path: Path,
    dtype: str = "auto",
    load_format: str = "auto",
    tp: TensorParallel | None = None,
    **options: Any,
) -> nn.Module:
    config = ModelConfig.from_checkpoint(path, dtype)
    parallel = ParallelContext(tp or TensorParallel())
    context = LayerContext(getattr(torch, config.dtype), parallel=parallel)
    model = model_class(config.architecture)(config, context)
    load_weights(model, path, load_format, **options)
    return model


def assert_same_parameters(a: nn.Module, b: nn.Module) -> None:
    a, b = dict(a.named_parameters()), dict(b.named_parameters())
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_logits_match(path: Path, reference: nn.Module) -> None:
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(prompt_logits(load(path), IDS), expected, rtol=1e-4, atol=1e-4)


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load(path)
    return str(caught.value)


def edit_weights(path: Path, **changes: Any) -> None:
    """Change tensors of model.safetensors; `...` removes one."""
    tensors = load_file(path / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not ...}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def single(tmp_path: Path) -> Path:
    make_qwen3(tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    model = make_qwen3(tmp_path / "unsharded")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


# ---------------------------------------------------------------- what loads


def test_a_single_file_and_shards_load_to_identical_parameters(single: Path, sharded: Path) -> None:
    assert_same_parameters(load(single), load(sharded))


@pytest.mark.small(piece_bytes=[1, 5000])
@pytest.mark.parametrize("piece_bytes", [1, 1000, 5000])
@pytest.mark.parametrize("tp", [TensorParallel(), TensorParallel(1, 2)], ids=["whole", "rank 1"])
def test_pieces_of_any_size_make_up_the_same_parameters(
    sharded: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, tp: TensorParallel
) -> None:
    """A row has 192 bytes or more; with 1 byte each row is a piece of its own."""
    expected = load(sharded, tp=tp)
    monkeypatch.setattr(loader, "_MAX_PIECE", piece_bytes)
    monkeypatch.setattr(loader, "_num_threads", lambda: 3)
    pieces: list[list[loader._Copy]] = []
    copy = loader._copy
    monkeypatch.setattr(loader, "_copy", lambda piece: pieces.append(piece) or copy(piece))
    assert_same_parameters(load(sharded, tp=tp), expected)
    sizes = [sum(part.num_bytes for part in piece) for piece in pieces]
    assert max(sizes) <= max(piece_bytes, 80 * 4)  # down_proj's rows, which rank 1 reads in part


def test_a_load_leaves_torchs_threads_as_they_were(single: Path) -> None:
    """Here and in threads that start later."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        load(single)
        with ThreadPoolExecutor() as pool:
            assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_progress_is_shown_in_bytes_once_a_load_takes_long(
    single: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(single)
    assert capsys.readouterr().err == ""
    bars = []

    def at_once(**settings: Any) -> tqdm:
        bars.append(tqdm(**settings | {"delay": 0}))
        return bars[-1]

    monkeypatch.setattr(loader, "tqdm", at_once)
    load(single, shows_progress=False)
    assert capsys.readouterr().err == ""
    load(single)
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown and "B/s" in shown
    num_bytes = sum(tensor.nbytes for tensor in load_file(single / "model.safetensors").values())
    assert bars[-1].n == bars[-1].total == num_bytes


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_logits_match_transformers(
    tmp_path: Path, num_key_value_heads: int, attention_bias: bool, tie_word_embeddings: bool
) -> None:
    reference = make_qwen3(
        tmp_path,
        num_key_value_heads=num_key_value_heads,
        attention_bias=attention_bias,
        tie_word_embeddings=tie_word_embeddings,
    )
    assert_logits_match(tmp_path, reference)


def test_a_tied_checkpoint_that_stores_its_head_as_well_loads(tmp_path: Path) -> None:
    reference = make_qwen3(tmp_path, tie_word_embeddings=True)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    edit_weights(tmp_path, **{HEAD: reference.lm_head.weight.detach().clone()})
    assert_logits_match(tmp_path, reference)
    edit_weights(tmp_path, **{HEAD: 2 * reference.lm_head.weight.detach()})
    assert "tie_word_embeddings" in refusal(tmp_path) and HEAD in refusal(tmp_path)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "auto"), ("float16", "auto")],
)
def test_stored_values_are_converted_to_the_wanted_dtype(
    tmp_path: Path, stored: str, wanted: str
) -> None:
    reference = make_qwen3(tmp_path, dtype=stored).state_dict()
    dtype = getattr(torch, stored if wanted == "auto" else wanted)
    model = load(tmp_path, wanted)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for name in (EMBED, HEAD, "model.norm.weight", "model.layers.1.mlp.down_proj.weight"):
        assert torch.equal(model.state_dict()[name], reference[name].to(dtype)), name


def test_a_dummy_load_needs_only_the_config(single: Path, tmp_path: Path) -> None:
    (tmp_path / "dummy").mkdir()
    shutil.copy(single / "config.json", tmp_path / "dummy")
    model = load(tmp_path / "dummy", load_format="dummy")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert 0.015 < parameter.std() < 0.025 and parameter.isfinite().all(), name
    assert_same_parameters(model, load(tmp_path / "dummy", load_format="dummy"))
    logits = prompt_logits(model, IDS)
    assert logits.isfinite().all() and (logits.std(dim=-1) > 0.05).all()
    with LLM(tmp_path / "dummy", load_format="dummy", **OPTIONS) as llm:
        (out,) = llm.generate(IDS, SamplingParams(max_tokens=5), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 5


# ---------------------------------------------------------------- what does not


@pytest.mark.parametrize("name", [K_PROJ, HEAD, EMBED, "model.norm.weight"])
def test_a_missing_tensor_is_named(single: Path, name: str) -> None:
    edit_weights(single, **{name: ...})
    assert f"missing: {name}" in refusal(single)


def test_an_unexpected_tensor_is_named(single: Path) -> None:
    edit_weights(single, **{"model.layers.2.mlp.up_proj.weight": torch.zeros(80, 48)})
    assert "unexpected: model.layers.2.mlp.up_proj.weight" in refusal(single)


def test_biases_that_the_config_does_not_mention_are_unexpected(tmp_path: Path) -> None:
    make_qwen3(tmp_path, attention_bias=True)
    edit_json(tmp_path / "config.json", attention_bias=False)
    message = refusal(tmp_path)
    for part in "qkvo":
        assert f"model.layers.0.self_attn.{part}_proj.bias" in message


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (K_PROJ, [16, 48], [32, 48]),  # would fit nowhere
        (K_PROJ, [64, 48], [32, 48]),  # has q_proj's shape
        ("model.layers.0.mlp.gate_proj.weight", [48, 80], [80, 48]),
        ("model.layers.0.self_attn.q_norm.weight", [1], [16]),  # would broadcast
        (EMBED, [301, 48], [300, 48]),
        (HEAD, [300, 48, 1], [300, 48]),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(
    single: Path, name: str, shape: list[int], expected: list[int]
) -> None:
    edit_weights(single, **{name: torch.zeros(shape)})
    assert f"{name} is {shape}, not {expected}" in refusal(single)


def test_all_problems_are_told_at_once(single: Path) -> None:
    edit_weights(single, **{K_PROJ: ..., HEAD: torch.zeros(1, 48), "stray": torch.zeros(1)})
    message = refusal(single)
    assert f"missing: {K_PROJ}" in message and "unexpected: stray" in message
    assert f"misshapen: {HEAD} is [1, 48]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantized_tensor_is_named(single: Path, dtype: torch.dtype) -> None:
    """Its values mean nothing without their scales, but they would convert without a word."""
    edit_weights(single, **{K_PROJ: torch.zeros(32, 48).to(dtype)})
    assert K_PROJ in refusal(single)


def test_a_tensor_in_two_shards_is_named(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second, metadata={"format": "pt"})
    message = refusal(sharded)
    assert name in message and first.name in message and second.name in message


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_a_truncated_file_is_named(single: Path, kept: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert str(file) in refusal(single)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    assert str(file) in refusal(sharded)


def test_an_absent_shard_is_named(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    message = refusal(sharded)
    assert file.name in message and "not exist" in message


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        "3",
        '{"weight_map": null}',
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
    ],
)
def test_a_broken_index_is_named(sharded: Path, content: str) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(content)
    assert str(index) in refusal(sharded)


def test_a_tensor_that_no_shard_holds_is_named_whatever_the_index_says(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    file = sharded / index["weight_map"][K_PROJ]
    tensors = load_file(file)
    del tensors[K_PROJ]
    save_file(tensors, file)
    assert f"missing: {K_PROJ}" in refusal(sharded)


def test_a_folder_without_weights_is_refused(single: Path) -> None:
    (single / "model.safetensors").unlink()
    message = refusal(single)
    assert str(single) in message and "model.safetensors" in message


# ---------------------------------------------------------------- the config's two dialects


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_v4_and_v5_forms_of_a_config_mean_the_same(tmp_path: Path, dtype: str) -> None:
    v5, v4 = tmp_path / "v5", tmp_path / "v4"
    rope = {"rope_type": "default", "rope_theta": 5e5}
    reference = make_qwen3(v5, dtype=dtype, rope_parameters=rope)
    shutil.copytree(v5, v4)
    edit_json(
        v4 / "config.json",
        rope_parameters=...,
        rope_theta=5e5,
        rope_scaling=None,
        dtype=...,
        torch_dtype=dtype,
    )
    config = ModelConfig.from_checkpoint(v5)
    assert config == ModelConfig.from_checkpoint(v4)
    assert config.rope_theta == 5e5 and config.dtype == dtype
    assert torch.equal(prompt_logits(load(v5), IDS), prompt_logits(load(v4), IDS))
    if dtype == "float32":
        assert_logits_match(v4, reference)


def test_a_rope_theta_in_rope_parameters_wins_as_in_transformers(single: Path) -> None:
    edit_json(single / "config.json", rope_theta=3.0)
    assert ModelConfig.from_checkpoint(single).rope_theta == 10000.0


# ---------------------------------------------------------------- end of sequence, defaults


@pytest.mark.parametrize("in_config", [5, [5, 6], None, ...])
@pytest.mark.parametrize("in_generation_config", [7, [6, 7], None, ...])
def test_eos_ids_of_both_files_are_united(
    single: Path, in_config: Any, in_generation_config: Any
) -> None:
    edit_json(single / "config.json", eos_token_id=in_config)
    edit_json(single / "generation_config.json", eos_token_id=in_generation_config)
    expected = {5: {5}, 7: {7}}.get
    ids: set[int] = set()
    for value in (in_config, in_generation_config):
        ids |= set(value) if isinstance(value, list) else expected(value, set())
    assert ModelConfig.from_checkpoint(single).eos_token_ids == ids


def test_any_of_the_eos_ids_ends_a_sequence_without_joining_it(single: Path) -> None:
    def generate(ignore_eos: bool = False) -> tuple[list[int], str | None, int | None]:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=ignore_eos)
        with LLM(single, **OPTIONS) as llm:
            (out,) = llm.generate([1, 2, 3], params, use_tqdm=False)
        return out.outputs[0].token_ids, out.outputs[0].finish_reason, out.outputs[0].stop_reason

    unended, _, _ = generate()
    assert len(set(unended)) == 6
    edit_json(single / "config.json", eos_token_id=unended[4])
    assert generate() == (unended[:4], "stop", None)
    edit_json(single / "generation_config.json", eos_token_id=[299, unended[2]])
    assert generate() == (unended[:2], "stop", None)
    assert generate(ignore_eos=True) == (unended, "length", None)


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
        ),
        ({"temperature": 0.6}, SamplingParams(temperature=0.6)),
        ({"min_p": 0.1, "max_new_tokens": 99}, SamplingParams(min_p=0.1, max_tokens=99)),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0)),
        ({"do_sample": False}, SamplingParams(temperature=0)),
        ({"temperature": None, "top_k": None}, SamplingParams()),
        ({}, SamplingParams()),
    ],
)
def test_generation_config_becomes_the_default_sampling_params(
    single: Path, recommended: dict[str, Any], expected: SamplingParams
) -> None:
    edit_json(single / "generation_config.json", **recommended)
    with LLM(single, **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == expected


def test_without_a_generation_config_the_defaults_are_nanoserves(single: Path) -> None:
    (single / "generation_config.json").unlink()
    with LLM(single, **OPTIONS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_generate_without_params_takes_the_recommended_ones(single: Path) -> None:
    edit_json(single / "generation_config.json", do_sample=False, max_new_tokens=9)
    with LLM(single, **OPTIONS) as llm:
        (by_default,) = llm.generate([1, 2, 3], use_tqdm=False)
        greedy = SamplingParams(temperature=0, max_tokens=9)
        (chosen,) = llm.generate([1, 2, 3], greedy, use_tqdm=False)
    assert by_default.outputs[0].token_ids == chosen.outputs[0].token_ids
    assert len(chosen.outputs[0].token_ids) == 9


def test_loading_logs_what_was_loaded(single: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nanoserve"), LLM(single, **OPTIONS):
        pass
    assert "Qwen3ForCausalLM, float32, 8 KV blocks of 16 tokens" in caplog.text
