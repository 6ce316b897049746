"""RoPE types against transformers: frequencies, tables, whole models, and what is refused."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_recorder import LogitsRecorder
from tiny_checkpoints import edit_json, make_qwen3
from transformers import AutoConfig, LlamaConfig, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.config import EngineConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.rope_scaling import inverse_frequencies
from nanoserve.models.layers.rotary import RotaryEmbedding

ORIGINAL = "original_max_position_embeddings"
HEAD_DIM, THETA = 64, 500_000.0


def searched(head_dim: int, last: float) -> list[float]:
    """Factors that grow from pair to pair, as the search of LongRoPE finds them."""
    return [1 + (last - 1) * i / (head_dim // 2 - 1) for i in range(head_dim // 2)]


def types(head_dim: int, original: int) -> dict[str, tuple[dict[str, Any], int]]:
    """Each type's parameters and the `max_position_embeddings` beside them in a v5 file."""
    before = {ORIGINAL: original}
    long = {"short_factor": searched(head_dim, 1.5), "long_factor": searched(head_dim, 30.0)}
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 4.0} | before
    mscales = {"mscale": 0.7, "mscale_all_dim": 1.1}
    return {
        "default": ({"rope_type": "default"}, original),
        "linear": ({"rope_type": "linear", "factor": 4.0}, 4 * original),
        "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, original),
        "llama3": ({"rope_type": "llama3"} | llama3 | before, 8 * original),
        "yarn": (yarn, 4 * original),
        "yarn, length left alone": (yarn, original + original // 4),
        "yarn, mscale": (yarn | mscales | {"truncate": False}, 4 * original),
        "yarn, betas": (
            yarn | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.8},
            4 * original,
        ),
        "longrope": ({"rope_type": "longrope"} | long | before, 4 * original),
        "longrope, factors": (
            {"rope_type": "longrope", "factor": 8.0} | long | before,
            4 * original,
        ),
        "longrope, short": (
            {"rope_type": "longrope", "attention_factor": 1.3} | long | before,
            original,
        ),
    }


TYPES = types(HEAD_DIM, 2048)


def read(path: Path | None = None, **raw: Any) -> ModelConfig:
    """The config of a file, or of entries beside those that every file has."""
    common = {"architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 256}
    common |= {"intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 4, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-6}
    common |= {"max_position_embeddings": 2048}
    return ModelConfig.from_hf(common | (json.loads(path.read_text()) if path else {}) | raw, {})


def v5(settings: dict[str, Any], length: int, **raw: Any) -> ModelConfig:
    rope = {"rope_theta": THETA} | settings
    return read(rope_parameters=rope, max_position_embeddings=length, **raw)


def table(config: ModelConfig) -> torch.Tensor:
    length = config.max_position_embeddings
    rotary = RotaryEmbedding(config.rope, config.head_dim, length, LayerContext())
    return torch.stack((rotary.cos, rotary.sin))


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(("settings", "length"), TYPES.values(), ids=TYPES)
def test_frequencies_and_tables_equal_transformers_over_the_whole_context(
    tmp_path: Path, settings: dict[str, Any], length: int
) -> None:
    rope = {"rope_theta": THETA} | settings
    theirs = LlamaConfig(
        head_dim=HEAD_DIM, hidden_size=256, max_position_embeddings=length, rope_parameters=rope
    )
    theirs.save_pretrained(tmp_path)
    config = read(tmp_path / "config.json")
    num_positions = config.max_position_embeddings
    rotary = LlamaRotaryEmbedding(theirs)
    positions = torch.arange(num_positions).unsqueeze(0)
    cos, sin = rotary(torch.empty(0, dtype=torch.float32), positions)  # the whole context at once

    frequencies, scale = inverse_frequencies(config.rope, HEAD_DIM, num_positions)
    assert frequencies.dtype == torch.float32 and frequencies.shape == (HEAD_DIM // 2,)
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(rotary.attention_scaling, rel=1e-12)
    expected = torch.stack((cos, sin))[:, 0, :, : HEAD_DIM // 2]
    # A frequency that is off by a rounding is off by that times the position, in angle.
    rounding = ((frequencies - rotary.inv_freq).abs() * num_positions).max().item()
    assert rounding < num_positions * 2e-7
    torch.testing.assert_close(table(config), expected, rtol=0, atol=1e-5 + scale * rounding)


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "default": 2048,
        "linear": 8192,
        "dynamic": 8192,
        "llama3": 16384,
        "yarn": 8192,
        "yarn, length left alone": 8192,
        "longrope": 8192,
        "longrope, short": 2048,
    }.items(),
)
def test_the_limit_of_a_sequence_includes_what_the_type_adds(name: str, expected: int) -> None:
    assert v5(*TYPES[name]).max_position_embeddings == expected


def test_dynamic_stretches_the_slowest_pair_by_the_factor_that_the_context_grew() -> None:
    rope = RopeConfig("dynamic", theta=1e4, factor=1.0, original_max_position_embeddings=100)
    plain, _ = inverse_frequencies(RopeConfig(theta=1e4), 64, 100)
    ours, _ = inverse_frequencies(rope, 64, 500)
    assert ours[0] == 1 and plain[-1] / ours[-1] == pytest.approx(5, rel=1e-5)
    assert torch.equal(inverse_frequencies(rope, 64, 100)[0], plain)


def test_dynamic_needs_two_pairs() -> None:
    rope = RopeConfig("dynamic", factor=2.0, original_max_position_embeddings=100)
    with pytest.raises(ValueError, match="head_dim=2"):
        inverse_frequencies(rope, 2, 200)


# ---------------------------------------------------------------- every parameter counts


def flips() -> dict[str, tuple[str, dict[str, Any]]]:
    long = [2 * factor for factor in searched(HEAD_DIM, 30.0)]
    short = [2 * factor for factor in searched(HEAD_DIM, 1.5)]
    changes = [
        ("default", {"rope_theta": 1e4}),
        ("linear", {"rope_theta": 1e4}),
        ("linear", {"factor": 2.0}),
        ("dynamic", {"rope_theta": 1e4}),
        ("dynamic", {"factor": 2.0}),
        ("llama3", {"rope_theta": 1e4}),
        ("llama3", {"factor": 2.0}),
        ("llama3", {ORIGINAL: 1024}),
        ("llama3", {"low_freq_factor": 2.0}),
        ("llama3", {"high_freq_factor": 8.0}),
        ("yarn", {"rope_theta": 1e4}),
        ("yarn", {"factor": 2.0}),
        ("yarn", {ORIGINAL: 512}),
        ("yarn", {"beta_fast": 8.0}),
        ("yarn", {"beta_slow": 8.0}),
        ("yarn", {"truncate": False}),
        ("yarn", {"attention_factor": 1.0}),
        ("yarn, mscale", {"mscale": 1.0}),
        ("yarn, mscale", {"mscale_all_dim": 0.9}),
        ("longrope", {"rope_theta": 1e4}),
        ("longrope", {"factor": 2.0}),
        ("longrope", {ORIGINAL: 1024}),
        ("longrope", {"attention_factor": 1.0}),
        ("longrope", {"long_factor": long}),
        ("longrope, short", {"short_factor": short}),
    ]
    return {f"{name}: {next(iter(change))}": (name, change) for name, change in changes}


@pytest.mark.parametrize(("name", "change"), flips().values(), ids=flips())
def test_every_parameter_changes_the_table(name: str, change: dict[str, Any]) -> None:
    settings, length = TYPES[name]
    before, after = table(v5(settings, length)), table(v5(settings | change, length))
    shared = min(before.shape[1], after.shape[1])
    assert (before[:, :shared] - after[:, :shared]).abs().max() > 1e-3


NUMBER, SIZE = "must be a number, finite and > 0", "must be an integer in [2, 2147483647]"
BAD_VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("default", {"rope_theta": 1.0}, "rope_theta=1.0"),
    ("default", {"rope_theta": "1e4"}, "rope_theta='1e4'"),
    ("default", {"rope_theta": math.inf}, "rope_theta=inf"),
    ("default", {"rope_theta": True}, "rope_theta=True"),
    ("default", {"factor": 2.0}, "'factor': 2.0"),
    ("default", {"mrope_section": [8, 12, 12]}, "'mrope_section': [8, 12, 12]"),
    ("linear", {"factor": None}, "factor=None"),
    ("linear", {"factor": 0.5}, "factor=0.5 must be a number, finite and >= 1"),
    ("linear", {"factor": "4"}, "factor='4'"),
    ("linear", {"factor": math.nan}, "factor=nan"),
    ("linear", {"beta_fast": 8.0}, "'beta_fast': 8.0"),
    ("dynamic", {"factor": 0}, "factor=0"),
    ("dynamic", {"alpha": 1000.0}, "'alpha': 1000.0"),
    ("dynamic", {ORIGINAL: 1024}, f"'{ORIGINAL}': 1024"),
    ("llama3", {"factor": True}, "factor=True"),
    ("llama3", {"low_freq_factor": None}, f"low_freq_factor=None {NUMBER}"),
    ("llama3", {"low_freq_factor": 0}, f"low_freq_factor=0 {NUMBER}"),
    ("llama3", {"high_freq_factor": "4"}, f"high_freq_factor='4' {NUMBER}"),
    ("llama3", {"high_freq_factor": 1.0}, "high_freq_factor=1.0 must be above low_freq_factor=1.0"),
    ("llama3", {ORIGINAL: 8192.0}, f"{ORIGINAL}=8192.0 {SIZE}"),
    ("yarn", {ORIGINAL: 1}, f"{ORIGINAL}=1 {SIZE}"),
    ("yarn", {"factor": None}, "factor=None"),
    ("yarn", {"beta_fast": 0.5}, "beta_fast=0.5 must not be below beta_slow=1.0"),
    ("yarn", {"beta_slow": -1.0}, f"beta_slow=-1.0 {NUMBER}"),
    ("yarn", {"truncate": 1}, "truncate=1"),
    ("yarn", {"attention_factor": 0.0}, f"attention_factor=0.0 {NUMBER}"),
    ("yarn", {"mscale": 0.7}, "mscale=0.7 and mscale_all_dim=None"),
    ("yarn", {"mscale_all_dim": 0.7}, "mscale=None and mscale_all_dim=0.7"),
    ("yarn, mscale", {"mscale_all_dim": 0}, f"mscale_all_dim=0 {NUMBER}"),
    ("yarn, mscale", {"attention_factor": 1.0}, "attention_factor=1.0 and mscale=0.7"),
    ("yarn", {"llama_4_scaling_beta": 0.1}, "'llama_4_scaling_beta': 0.1"),
    ("longrope", {"long_factor": [1.0]}, "has 1 numbers; head_dim=64 needs 32"),
    ("longrope", {"short_factor": None}, "short_factor=None must be a list of positive numbers"),
    ("longrope", {"short_factor": [0.0] * 32}, "short_factor=(0.0,"),
    ("longrope", {"long_factor": 4.0}, "long_factor=4.0"),
    ("longrope", {ORIGINAL: "4096"}, f"{ORIGINAL}='4096' {SIZE}"),
    ("longrope", {"attention_factor": "1"}, "attention_factor='1'"),
    ("longrope", {"short_mscale": 1.1}, "'short_mscale': 1.1"),
    ("yarn", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ("yarn", {"rope_type": "proportional"}, "rope_type='proportional' is not supported"),
    ("yarn", {"rope_type": ["yarn"]}, "['yarn']"),
]


@pytest.mark.parametrize(("name", "change", "told"), BAD_VALUES, ids=lambda value: str(value)[:60])
def test_a_bad_value_is_refused_by_name(name: str, change: dict[str, Any], told: str) -> None:
    settings, length = TYPES[name]
    with pytest.raises(ValueError) as caught:
        v5(settings | change, length)
    assert told in str(caught.value)


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError) as caught:
        v5({"rope_type": "mrope", "mrope_section": [1, 2]}, 2048)
    for name in ("default", "linear", "dynamic", "llama3", "yarn", "longrope"):
        assert repr(name) in str(caught.value)


def test_parameters_of_another_type_are_refused_without_a_file_too() -> None:
    with pytest.raises(ValueError, match=r"factor=2\.0 is not a parameter"):
        RopeConfig(factor=2.0)
    with pytest.raises(ValueError, match="truncate=False is not a parameter"):
        RopeConfig("linear", factor=2.0, truncate=False)


def test_parameters_per_type_of_layer_are_refused() -> None:
    local = {"rope_type": "default", "rope_theta": 1e4}
    with pytest.raises(ValueError) as caught:
        read(rope_parameters={"full_attention": local, "sliding_attention": local})
    assert "['full_attention', 'sliding_attention']" in str(caught.value)
    assert "not supported" in str(caught.value)


# ---------------------------------------------------------------- two dialects


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize(("settings", "length"), TYPES.values(), ids=TYPES)
def test_the_v4_and_v5_forms_mean_the_same(settings: dict[str, Any], length: int, key: str) -> None:
    scaling = {key: settings["rope_type"]} | {k: v for k, v in settings.items() if k != "rope_type"}
    v4 = read(rope_theta=THETA, rope_scaling=scaling, max_position_embeddings=length)
    assert v4.rope == v5(settings, length).rope
    assert v4.max_position_embeddings == v5(settings, length).max_position_embeddings
    assert v4.rope.rope_type == settings["rope_type"] and v4.rope_theta == THETA


def test_su_with_the_original_context_beside_it_is_longrope_as_phi_3_wrote_it() -> None:
    settings, length = TYPES["longrope"]
    factors = {name: settings[name] for name in ("short_factor", "long_factor")}
    old = read(
        rope_theta=THETA,
        rope_scaling={"type": "su"} | factors,
        max_position_embeddings=length,
        **{ORIGINAL: 2048},
    )
    assert old.rope == v5(settings, length).rope
    assert old.rope.factor == 4.0


@pytest.mark.parametrize("name", ["llama3", "yarn", "longrope"])
def test_an_original_context_beside_the_object_wins_as_in_transformers(name: str) -> None:
    settings, length = TYPES[name]
    config = v5(settings, length, **{ORIGINAL: 1024})
    assert config.rope == v5(settings | {ORIGINAL: 1024}, length).rope


def test_an_original_context_that_is_nowhere_is_the_context() -> None:
    settings = {"rope_type": "yarn", "factor": 4.0}
    assert v5(settings, 2048).rope == v5(settings | {ORIGINAL: 2048}, 2048).rope


def test_a_rope_scaling_wins_but_the_base_is_not_guessed() -> None:
    """transformers loses the `rope_theta` of the other object, and goes on with 10,000."""
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    both |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(ValueError, match="rope_theta=None"):
        read(**both)
    assert read(**both, rope_theta=5e5).rope == RopeConfig("linear", theta=5e5, factor=2.0)


SILENT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "null": {"rope_scaling": None},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, v5": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 512}},
    "default": {"rope_parameters": {"rope_type": "default"}},
    "default, v4": {"rope_scaling": {"type": "default"}},
}
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma2ForCausalLM": "gemma2",
}


@pytest.mark.parametrize("architecture", MODEL_TYPES)
@pytest.mark.parametrize("settings", SILENT.values(), ids=SILENT)
def test_a_base_that_is_nowhere_is_the_one_of_transformers(
    settings: dict[str, Any], architecture: str
) -> None:
    theirs = AutoConfig.for_model(
        MODEL_TYPES[architecture], max_position_embeddings=2048, **copy.deepcopy(settings)
    )
    ours = read(architectures=[architecture], **settings).rope
    assert ours.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope_type == theirs.rope_parameters["rope_type"]


def test_a_base_that_is_null_is_refused() -> None:
    """In transformers, too, whose tables then have no numbers."""
    for settings in (
        {"rope_theta": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": None}},
    ):
        with pytest.raises(ValueError, match="rope_theta=None"):
            read(**settings)


def test_a_scaling_may_be_given_for_a_file_without_a_base(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    edit_json(tmp_path / "config.json", rope_parameters=...)
    scaling = {"type": "linear", "factor": 4.0}
    config = EngineConfig("m", hf_overrides={"rope_scaling": scaling})
    checkpoint = Checkpoint(tmp_path, tmp_path)
    found = checkpoint.model_config(config, ["Qwen3ForCausalLM"])
    assert found.rope == RopeConfig("linear", theta=1e4, factor=4.0)
    config = EngineConfig("m", hf_overrides={"rope_scaling": scaling, "rope_theta": 5e5})
    assert checkpoint.model_config(config, ["Qwen3ForCausalLM"]).rope.theta == 5e5


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("yarn", {"finetuned": True}),
        ("yarn", {"finetuned": False, "attn_factor": 1, "extrapolation_factor": 1.0}),
        ("linear", {"finetuned": True}),
        ("linear", {ORIGINAL: 512}),
        ("default", {"factor": 1.0}),
    ],
)
def test_what_transformers_does_not_read_has_no_effect(name: str, more: dict[str, Any]) -> None:
    settings, length = TYPES[name]
    assert v5(settings | more, length).rope == v5(settings, length).rope


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("yarn", {"finetuned": "yes"}),
        ("yarn", {"attn_factor": 0.5}),
        ("yarn", {"extrapolation_factor": 2}),
        ("dynamic", {"alpha": 1000.0}),
        ("linear", {ORIGINAL: "512"}),
        ("default", {"factor": 4.0}),
    ],
)
def test_what_would_have_an_effect_elsewhere_is_refused(name: str, more: dict[str, Any]) -> None:
    settings, length = TYPES[name]
    with pytest.raises(ValueError, match=f"{next(iter(more))}.* not supported"):
        v5(settings | more, length)


@pytest.mark.parametrize("share", [1, 1.0, None])
def test_a_rotation_of_the_whole_head_may_be_spelt_out(share: float | None) -> None:
    assert read(rope_theta=THETA, partial_rotary_factor=share).rope == RopeConfig(theta=THETA)


def test_a_rotation_of_part_of_the_head_is_refused_beside_the_object_too() -> None:
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.75 is not supported"):
        read(rope_theta=THETA, partial_rotary_factor=0.75)


# ---------------------------------------------------------------- whole models


TINY = types(16, 64)
OUTPUT = 8


def complete(
    path: Path, prompts: list[list[int]], **options: Any
) -> list[tuple[list[int], torch.Tensor]]:
    """Each prompt with its greedy continuation, and the logits of all but the last token."""
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "num_kv_blocks": 64} | options
    with LLM(path, skip_tokenizer_init=True, enable_prefix_caching=False, **options) as llm:
        recorder = LogitsRecorder(llm)
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=OUTPUT), use_tqdm=False
        )
    results = []
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = recorder.logits[output.request_id]
        tokens = prompt + output.outputs[0].token_ids
        assert sorted(logits) == list(range(len(tokens) - 1)) and len(tokens) > len(prompt)
        results.append((tokens, torch.stack([logits[i] for i in sorted(logits)])))
    return results


@torch.inference_mode()
def check_against(
    reference: Qwen3ForCausalLM, results: list[tuple[list[int], torch.Tensor]]
) -> None:
    for tokens, ours in results:
        theirs = reference(torch.tensor([tokens])).logits[0, :-1]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        assert theirs[-OUTPUT:].argmax(-1).tolist() == tokens[-OUTPUT:]


def make_tiny(folder: Path, name: str, **changes: Any) -> Qwen3ForCausalLM:
    """A checkpoint with these positions, and transformers' model of it."""
    settings, length = TINY[name]
    rope = {"rope_theta": 1e4} | settings | changes
    return make_qwen3(folder, max_position_embeddings=length, rope_parameters=rope)


def prompts_of(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(300, (n,), generator=generator).tolist() for n in lengths]


ALWAYS_EQUAL = [name for name in TINY if name not in ("dynamic", "longrope", "longrope, factors")]


@pytest.mark.parametrize("name", ALWAYS_EQUAL)
def test_a_model_equals_transformers_within_and_beyond_the_original_context(
    tmp_path: Path, name: str
) -> None:
    reference = make_tiny(tmp_path, name)
    longest = ModelConfig.from_checkpoint(tmp_path).max_position_embeddings
    lengths = [1, 17, 40, longest // 2, longest - OUTPUT]
    check_against(reference, complete(tmp_path, prompts_of(lengths)))


@pytest.mark.parametrize("name", ["longrope", "longrope, factors"])
def test_longrope_equals_transformers_beyond_the_original_context(
    tmp_path: Path, name: str
) -> None:
    reference = make_tiny(tmp_path, name)
    # In one pass of more than 64 tokens, transformers uses the long factors throughout.
    lengths = [65 - OUTPUT, 64, 100, TINY[name][1] - OUTPUT]
    check_against(reference, complete(tmp_path, prompts_of(lengths)))


def test_longrope_within_the_original_context_has_the_long_factors_all_the_same(
    tmp_path: Path,
) -> None:
    make_tiny(tmp_path / "ours", "longrope")
    long_factor = TINY["longrope"][0]["long_factor"]
    reference = make_tiny(tmp_path / "long", "longrope", short_factor=long_factor)
    check_against(reference, complete(tmp_path / "ours", prompts_of([1, 17, 40])))


@pytest.mark.parametrize("name", ["dynamic", "longrope", "longrope, factors"])
def test_a_max_model_len_within_the_original_context_is_as_in_transformers(
    tmp_path: Path, name: str
) -> None:
    reference = make_tiny(tmp_path, name)
    prompts = prompts_of([1, 17, 40, 64 - OUTPUT])
    check_against(reference, complete(tmp_path, prompts, max_model_len=64))


def test_dynamic_equals_transformers_at_a_chosen_length(tmp_path: Path) -> None:
    reference = make_tiny(tmp_path, "dynamic")
    check_against(reference, complete(tmp_path, prompts_of([150 - OUTPUT]), max_model_len=150))


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_size_of_the_pool_does_not_change_the_frequencies(tmp_path: Path, name: str) -> None:
    make_tiny(tmp_path, name)
    (small,) = complete(tmp_path, prompts_of([40]), num_kv_blocks=3)
    (large,) = complete(tmp_path, prompts_of([40]), num_kv_blocks=64)
    assert small[0] == large[0]
    torch.testing.assert_close(small[1], large[1], rtol=0, atol=1e-5)


def test_dynamic_equals_transformers_at_the_full_context(tmp_path: Path) -> None:
    reference = make_tiny(tmp_path, "dynamic")
    # Prompt and output are 256 tokens, 4 times the original context, in one pass of transformers.
    check_against(reference, complete(tmp_path, prompts_of([4 * TINY["dynamic"][1] - OUTPUT])))


def test_dynamic_below_the_full_context_is_a_larger_theta_at_every_length(tmp_path: Path) -> None:
    make_tiny(tmp_path / "ours", "dynamic")
    # n = 4 times the context and factor 4: 4 x 4 - 3 = 13; heads have 16 dimensions.
    larger = {"rope_type": "default", "rope_theta": 1e4 * 13 ** (16 / 14)}
    length = 4 * TINY["dynamic"][1]
    folder = tmp_path / "larger"
    reference = make_qwen3(folder, max_position_embeddings=length, rope_parameters=larger)
    check_against(reference, complete(tmp_path / "ours", prompts_of([1, 17, 40, 100, 200])))


def test_the_model_card_of_qwen3_extends_the_limit(tmp_path: Path) -> None:
    """YaRN beside the theta of a v4 file, `max_position_embeddings` as the model was trained."""
    make_qwen3(tmp_path, max_position_embeddings=80)
    scaling = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
    edit_json(tmp_path / "config.json", rope_parameters=..., rope_theta=1e4, rope_scaling=scaling)
    with LLM(tmp_path, skip_tokenizer_init=True) as llm:
        assert llm.engine.executor.max_model_len == 256
        (output,) = llm.generate([list(range(250))], SamplingParams(max_tokens=9), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
