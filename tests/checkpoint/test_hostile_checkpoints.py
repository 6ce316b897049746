"""Checkpoints that somebody has damaged, or made to do damage: each is refused, shortly.

Shortly in both senses: before memory is taken, and in a message that one can read.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.registry import model_class
from nanoserve.text.tokenizer import Tokenizer
from nanoserve.worker.cpu_device import CpuDevice

OPTIONS = {"skip_tokenizer_init": True, "num_kv_blocks": 8, "max_num_seqs": 4}
CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Damage = Callable[[Path], None]


@pytest.fixture
def hostile(checkpoint: Path, tmp_path: Path) -> Path:
    """A good checkpoint, to be damaged."""
    return shutil.copytree(checkpoint, tmp_path / "model")


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        LLM(path, **OPTIONS | options)
    message = str(caught.value)
    assert len(message.replace(str(path), "")) < 1000
    return message


def with_index(path: Path, names: Any) -> None:
    """One shard, which the index says to be called `names`."""
    (path / WEIGHTS).rename(path / "shard.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": names}))


# ---------------------------------------------------------------- files


@pytest.mark.small(depth=[960, 100_000])
@pytest.mark.parametrize("depth", [300, 900, 930, 960, 990, 100_000])
@pytest.mark.parametrize("file", [CONFIG, GENERATION, INDEX])
def test_json_may_be_nested_as_deep_as_it_likes(hostile: Path, file: str, depth: int) -> None:
    with_index(hostile, {})
    nested = "[" * depth + "]" * depth
    entries = json.loads((hostile / file).read_text()) if file != GENERATION else {}
    for name in ("layer_types", "rope_scaling", "eos_token_id", "temperature", "weight_map"):
        (hostile / file).write_text(json.dumps(entries)[:-1] + f', "{name}": {nested}}}')
        refusal(hostile)


@pytest.mark.parametrize("file", [CONFIG, GENERATION, INDEX])
@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"{", b"\xff\xfe{}", b"[" * 10**6, b'{"a": %s}' % (b"9" * 5000)],
    ids=lambda content: repr(content)[:20],
)
def test_what_is_no_json_object_is_refused_with_its_file(
    hostile: Path, file: str, content: bytes
) -> None:
    if file == INDEX:
        (hostile / WEIGHTS).unlink()
    (hostile / file).write_bytes(content)
    assert str(hostile / file) in refusal(hostile)


@pytest.mark.parametrize("kind", ["pipe", "loop", "folder", "device", "huge"])
@pytest.mark.parametrize("file", [CONFIG, GENERATION, INDEX, WEIGHTS])
def test_what_is_no_file_is_not_waited_for(hostile: Path, file: str, kind: str) -> None:
    if file == INDEX:
        (hostile / WEIGHTS).unlink()
    (hostile / file).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(hostile / file)
    elif kind == "folder":
        (hostile / file).mkdir()
    elif kind == "huge":
        with open(hostile / file, "wb") as sparse:
            sparse.truncate(2**40)
    else:
        (hostile / file).symlink_to(file if kind == "loop" else "/dev/zero")
    refusal(hostile)


# ---------------------------------------------------------------- numbers


SIZES = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
]  # fmt: skip
HUGE = [10**12, 2**31, 2**63, 10**400, 10**4000]
NO_SIZES = [0, -1, 1.5, "8", True, [1], {}, math.nan, math.inf, None]


@pytest.mark.small(value=[10**12, 10**4000, "8", None, True])
@pytest.mark.parametrize("value", HUGE + NO_SIZES, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_no_model_has_is_refused(hostile: Path, name: str, value: Any) -> None:
    edit_json(hostile / CONFIG, layer_types=..., **{name: value})
    if value is None and name in ("num_key_value_heads", "head_dim"):  # follows from others
        refusal(hostile)
    else:
        assert f"{name}=" in refusal(hostile) or f"no {name!r}" in refusal(hostile)


def test_a_vocabulary_that_is_not_in_the_file_is_refused(hostile: Path) -> None:
    edit_json(hostile / CONFIG, vocab_size=10**9)
    assert "embed_tokens.weight is [300, 48], not [1000000000, 48]" in refusal(hostile)


@pytest.mark.small(size=[2**18])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("size", [10**5, 2**18], ids=str)
@pytest.mark.parametrize("name", [*SIZES[:-1], "all"])
def test_sizes_that_a_model_might_have_are_refused_before_memory_is_taken(
    hostile: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_size: Callable[..., int],
    name: str,
    size: int,
    load_format: str,
) -> None:
    monkeypatch.setattr(CpuDevice, "memory_bytes", lambda self, tp: 10**6)
    taken = record_devices(monkeypatch)
    names = SIZES[:-1] if name == "all" else [name]
    num_layers = by_size(100, 100, 1000)
    sizes = {name: num_layers if name == "num_hidden_layers" else size for name in names}
    edit_json(hostile / CONFIG, layer_types=..., **sizes)
    refusal(hostile, load_format=load_format, num_kv_blocks=None, kv_cache_memory_bytes=2**33)
    assert taken <= {"meta"}


def record_devices(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Where parameters are made from now on."""
    devices, empty = set(), LayerContext.empty

    def recorded(self: LayerContext, *shape: int) -> torch.nn.Parameter:
        devices.add(self.device.type)
        return empty(self, *shape)

    monkeypatch.setattr(LayerContext, "empty", recorded)
    return devices


def test_weights_that_have_no_room_are_refused_with_both_numbers(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "memory_bytes", lambda self, tp: 100_000)
    taken = record_devices(monkeypatch)
    num_bytes = sum(tensor.nbytes for tensor in load_file(hostile / WEIGHTS).values())
    message = refusal(hostile)
    assert f"{num_bytes} bytes" in message and "100000" in message and taken == {"meta"}


def test_more_heads_than_hidden_size_leave_none_a_dimension(hostile: Path) -> None:
    edit_json(hostile / CONFIG, architectures=["LlamaForCausalLM"], head_dim=..., rope_theta=1e4)
    edit_json(hostile / CONFIG, num_attention_heads=100, num_key_value_heads=100)
    assert "head_dim" in refusal(hostile)


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4} | parameters}


ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
LONGROPE = {"short_factor": [1] * 8, "long_factor": [1] * 8}
NUMBERS: dict[str, dict[str, Any]] = {
    **{
        f"{name}={str(value)[:12]}": {name: value}
        for name in ("rms_norm_eps", "rope_theta")
        for value in (10**400, 10**4000, math.nan, math.inf, 0, -1, "x", [1], True)
    },
    "theta=10^400": rope("default", rope_theta=10**400),
    "theta is 1 in float32": rope("yarn", rope_theta=1 + 1e-16, factor=4),
    "linear, 10^400": rope("linear", factor=10**400),
    "dynamic, 1e300": rope("dynamic", factor=1e300),
    "dynamic, 1e30": rope("dynamic", factor=1e30),
    "yarn, 1e308": rope("yarn", factor=1e308),
    "yarn, 1e18": rope("yarn", factor=1e18, **{ORIGINAL: 512}),
    "yarn, 2^31": rope("yarn", factor=2, **{ORIGINAL: 2**30}),
    "yarn, no turns": rope("yarn", factor=2, beta_fast=1e-320, beta_slow=1e-322),
    "original 10^300": rope("llama3", **LLAMA3, **{ORIGINAL: 10**300}),
    "original 10^400": rope("yarn", factor=2, **{ORIGINAL: 10**400}),
    "longrope, original 10^400": rope("longrope", **LONGROPE, **{ORIGINAL: 10**400}),
    "longrope, a factor of none": rope("longrope", short_factor=[1e-300] * 8, long_factor=[1] * 8),
    "sliding_window=10^400": {"use_sliding_window": True, "sliding_window": 10**400},
    "sliding_window=2^31": {"use_sliding_window": True, "sliding_window": 2**31},
    "max_window_layers": {"use_sliding_window": True, "max_window_layers": -(10**4000)},
    **{f"eos={str(v)[:12]}": {"eos_token_id": v} for v in (2**31, 10**30, 10**400, -1, [1, 1.5])},
}


@pytest.mark.parametrize("changes", NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_cannot_be_computed_with_is_refused(
    hostile: Path, changes: dict[str, Any]
) -> None:
    if "rope_theta" in changes:
        changes = changes | {"rope_parameters": None}
    edit_json(hostile / CONFIG, layer_types=..., **changes)
    refusal(hostile)


EDGES = {
    "linear": rope("linear", factor=1e38),
    "llama3": rope("llama3", **LLAMA3 | {"factor": 1e38}, **{ORIGINAL: 2**31 - 1}),
    "yarn": rope("yarn", factor=1.5, beta_fast=1e38, beta_slow=1e-37, **{ORIGINAL: 2**30}),
    "yarn, small theta": rope("yarn", factor=2, rope_theta=1.00001, beta_slow=1e-37),
    "dynamic": rope("dynamic", factor=1000),
    "longrope": rope("longrope", short_factor=[1e38] * 8, long_factor=[1e-37] * 8),
    "theta": {"rope_theta": 1e38, "rope_parameters": None},
    "eps": {"rms_norm_eps": 1e38},
    "eos": {"eos_token_id": [5, 2**31 - 1]},  # some real checkpoints have ids of no token
}


@pytest.mark.parametrize("changes", EDGES.values(), ids=EDGES)
def test_up_to_its_bound_everything_runs(hostile: Path, changes: dict[str, Any]) -> None:
    edit_json(hostile / CONFIG, **changes)
    with LLM(hostile, **OPTIONS, max_model_len=64) as llm:
        params = SamplingParams(max_tokens=3, min_tokens=2, temperature=0)
        assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].finished


@pytest.mark.parametrize(("max_model_len", "num_positions"), [(64, 64), (None, 128)])
def test_positions_that_no_sequence_has_cost_nothing(
    hostile: Path, max_model_len: int | None, num_positions: int
) -> None:
    edit_json(hostile / CONFIG, max_position_embeddings=10**9)
    with LLM(hostile, **OPTIONS, max_model_len=max_model_len) as llm:
        rotary = llm.engine.executor.model.model.layers[0].self_attn.rotary
        assert len(rotary.cos) == len(rotary.sin) == num_positions
        (output,) = llm.generate([[5] * (num_positions - 2)], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


# ---------------------------------------------------------------- types


TYPES: dict[str, dict[str, Any]] = {
    **{
        f"{name}={value}": {name: value}
        for name in ("tie_word_embeddings", "attention_bias", "use_sliding_window")
        for value in ("false", 1, [], {"a": 1}, math.nan)
    },
    **{
        f"{name}={str(value)[:20]}": {name: value}
        for name in ("rope_parameters", "rope_scaling", "hidden_act", "quantization_config")
        for value in ("x" * 10**5, 5, [[1]], {"rope_type": {}}, {"rope_type": ["yarn"]})
    },
    **{
        f"layer_types={value}"[:60]: {"layer_types": value}
        for value in ([["x"], {}], [{}], 5, "full_attention", ["x" * 10**5] * 2, [None, None])
    },
    **{f"architectures={v}"[:40]: {"architectures": v} for v in ([], [5], {"a": 1}, "x" * 10**5)},
    **{f"dtype={v}"[:40]: {"dtype": v} for v in (5, ["float32"], {"a": 1}, "x" * 10**5)},
    **{f"eos={v}": {"eos_token_id": v} for v in ("2", [[1]], {}, True, [None], 1.0)},
}


@pytest.mark.parametrize("changes", TYPES.values(), ids=TYPES)
def test_a_setting_of_another_type_is_refused(hostile: Path, changes: dict[str, Any]) -> None:
    edit_json(hostile / CONFIG, **changes)
    refusal(hostile)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 10**9},
        {"num_experts": 1000, "num_experts_per_tok": 10**400},
        {"decoder_sparse_step": 10**400},
        {"mlp_only_layers": [["x"]]},
        {"mlp_only_layers": [10**4000] * 100, "num_experts": 0},
        {"norm_topk_prob": "yes"},
        {"moe_intermediate_size": 2**63},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_so_are_those_of_experts(hostile: Path, changes: dict[str, Any]) -> None:
    edit_json(hostile / CONFIG, architectures=["Qwen3MoeForCausalLM"], layer_types=...)
    edit_json(hostile / CONFIG, **changes)
    refusal(hostile)


@pytest.mark.parametrize(
    "changes",
    [
        {"query_pre_attn_scalar": 10**400},
        {"attn_logit_softcapping": [1]},
        {"final_logit_softcapping": math.inf},
        {"sliding_window": None},
        {"sliding_window": "x" * 10**5},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_so_are_those_of_gemma(hostile: Path, changes: dict[str, Any]) -> None:
    edit_json(hostile / CONFIG, architectures=["Gemma2ForCausalLM"], layer_types=..., **changes)
    refusal(hostile)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": 10**400},
        {"top_p": [1]},
        {"repetition_penalty": 0},
        {"max_new_tokens": "x" * 10**5},
        {"eos_token_id": 10**30},
        {"do_sample": "no"},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_recommendation_that_makes_no_sense_is_refused(
    hostile: Path, changes: dict[str, Any]
) -> None:
    (hostile / GENERATION).write_text(json.dumps(changes))
    refusal(hostile)


# ---------------------------------------------------------------- weights


ELSEWHERE = [
    "/etc/passwd", "/dev/zero", "../model/shard.safetensors", "..", ".", "", "a/b.safetensors",
    "a\0b", "\ud800", "x" * 100_000, "*", "a?", ".hidden", "~", "a\\b", "a\n", 5, None, True, [1],
    {"a": 1}, 1.5,
]  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE, ids=lambda name: repr(name)[:20])
def test_an_index_names_files_of_its_own_folder_only(
    hostile: Path, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(hostile / WEIGHTS)
    with_index(hostile, dict.fromkeys(tensors, name))
    opened: list[Path] = []
    monkeypatch.setattr("nanoserve.checkpoint.weight_files.safe_open", lambda file, **_: opened)
    assert "which is not a file in the same folder" in refusal(hostile)
    assert not opened


def test_weights_outside_of_the_folder_are_not_loaded_though_they_fit(hostile: Path) -> None:
    names = load_file(hostile / WEIGHTS).keys()
    elsewhere = hostile.parent / "elsewhere.safetensors"
    shutil.copy(hostile / WEIGHTS, elsewhere)
    with_index(hostile, dict.fromkeys(names, str(elsewhere)))
    assert "which is not a file in the same folder" in refusal(hostile)


def test_a_file_of_the_folder_may_be_a_link_as_in_the_hubs_cache(hostile: Path) -> None:
    names = load_file(hostile / WEIGHTS).keys()
    with_index(hostile, dict.fromkeys(names, "shard.safetensors"))
    blob = hostile.parent / "blob"
    (hostile / "shard.safetensors").rename(blob)
    (hostile / "shard.safetensors").symlink_to(blob)
    LLM(hostile, **OPTIONS).close()


def test_an_index_of_thousands_of_absent_files_is_refused_in_a_line(hostile: Path) -> None:
    with_index(hostile, {f"t{i}": f"absent-{i}.safetensors" for i in range(10_000)})
    assert "absent-0.safetensors" in refusal(hostile)


@pytest.mark.parametrize(
    "tensors",
    [
        {f"layer.{i}": torch.zeros(1) for i in range(3000)},
        {"x" * 10**5: torch.zeros(1)},
        {"lm_head.weight": torch.zeros([1] * 500)},
        {"y" * 10**5: torch.zeros(1, dtype=torch.int8)},
    ],
    ids=["many", "a long name", "many dimensions", "a long name of integers"],
)
def test_what_does_not_fit_is_told_shortly(hostile: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(load_file(hostile / WEIGHTS) | tensors, hostile / WEIGHTS)
    refusal(hostile)


def test_a_file_that_is_damaged_after_its_header_was_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a head is stored beside the embedding that it is tied to, both are read again."""
    make_qwen3(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
              tmp_path / WEIGHTS)  # fmt: skip
    config = ModelConfig.from_checkpoint(tmp_path)
    model = model_class(config.architecture)(config, LayerContext())
    num_opened = 0

    def open_once(file: Path, framework: str) -> Any:
        nonlocal num_opened
        num_opened += 1
        if num_opened == 2:
            file.write_bytes(b"")
        return safe_open(file, framework)

    monkeypatch.setattr("nanoserve.checkpoint.weight_files.safe_open", open_once)
    with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
        load_weights(model, tmp_path)


# ---------------------------------------------------------------- tokenizers


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """The bundled model's tokenizer, to be damaged."""
    for file in bundled_checkpoint("tiny-qwen3").glob("*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"[" * 10**5, b"\xff\xfe", b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"],
    ids=lambda content: repr(content)[:12],
)
def test_a_damaged_tokenizer_is_refused_with_its_file(
    words: Path, file: str, content: bytes
) -> None:
    (words / file).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        Tokenizer(words)
    assert file in str(caught.value) and len(str(caught.value)) < 1000


def test_a_vocabulary_of_nonsense_is_refused_with_its_file(words: Path) -> None:
    text = (words / "tokenizer.json").read_text()
    (words / "tokenizer.json").write_text(text.replace(": 5,", ": -5,", 1))
    with pytest.raises(ValueError, match=r"tokenizer\.json: invalid value: integer `-5`"):
        Tokenizer(words)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("kind", ["pipe", "loop"])
def test_a_tokenizer_is_not_waited_for(words: Path, file: str, kind: str) -> None:
    (words / file).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(words / file)
    else:
        (words / file).symlink_to(file)
    with pytest.raises(ValueError, match=file):
        Tokenizer(words)
