"""Gemma 2 and 3: norms, embeddings and rounding, and every field in both forms of config.json."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from same_or_refused import TOKEN_IDS, check
from tiny_checkpoints import GEMMA2, GEMMA3, edit_json, make_checkpoint, prompt_logits
from torch import nn
from transformers import Gemma2ForCausalLM, Gemma3ForCausalLM, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.models.gemma2 import GemmaRMSNorm
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.triton_ops import TritonOps
from nanoserve.models.registry import model_class

MODELS = {"gemma2": (Gemma2ForCausalLM, GEMMA2), "gemma3": (Gemma3ForCausalLM, GEMMA3)}
MODEL = pytest.mark.parametrize("name", MODELS)
FULL, LOCAL = "full_attention", "sliding_attention"


def load(path: Path, **context: Any) -> nn.Module:
    config = ModelConfig.from_checkpoint(path)
    dtype = getattr(torch, config.dtype)
    model = model_class(config.architecture)(config, LayerContext(dtype=dtype, **context))
    load_weights(model, path)
    return model


def rewrite_as_v4(file: Path) -> None:
    """What transformers 4 wrote for the same model; it left out what is true of most models."""
    raw = json.loads(file.read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"torch_dtype": raw.pop("dtype"), "layer_types": ...}
    if raw["tie_word_embeddings"]:
        raw["tie_word_embeddings"] = ...
    if FULL in rope:
        local, scaling = rope[LOCAL], rope[FULL]
        raw |= {"sliding_window_pattern": 2, "rope_theta": scaling.pop("rope_theta")}
        raw |= {"rope_local_base_freq": local["rope_theta"], "rope_scaling": scaling}
    else:
        raw |= {"rope_theta": rope["rope_theta"], "hidden_act": "gelu_pytorch_tanh"}
    edit_json(file, **raw, rope_parameters=...)


# ---------------------------------------------------------------- norms, embeddings, rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_is_that_of_transformers_with_small_weights_too(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = Gemma2RMSNorm(64, eps=1e-6)
    nn.init.normal_(theirs.weight, std=0.003)  # 1 + this is 1 in bfloat16
    theirs.to(dtype)
    ours = GemmaRMSNorm(64, 1e-6, LayerContext(dtype=dtype))
    ours.weight.copy_(theirs.weight)
    ours.process_after_loading()
    x, residual = (10 * torch.randn(2, 300, 64)).to(dtype)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x), **tolerance)
        normed, total = ours.add(x, residual)
        assert torch.equal(total, x + residual)
        torch.testing.assert_close(normed, theirs(total), **tolerance)


@MODEL
@torch.inference_mode()
def test_in_bfloat16_we_round_where_transformers_does(name: str, tmp_path: Path) -> None:
    architecture, settings = MODELS[name]
    make_checkpoint(architecture, tmp_path, **settings, dtype="bfloat16")
    token_ids = [(i * i + i // 7) % 300 for i in range(400)]
    errors, ours = {}, load(tmp_path)
    exact = architecture.from_pretrained(tmp_path, dtype=torch.float32)
    expected = exact(torch.tensor([token_ids])).logits[0]
    theirs = architecture.from_pretrained(tmp_path, dtype=torch.bfloat16)
    embedded = ours.model.embed(torch.tensor(token_ids))
    assert torch.equal(embedded, theirs.model.embed_tokens(torch.tensor(token_ids)))
    logits = {"theirs": theirs(torch.tensor([token_ids])).logits[0]}
    logits["ours"] = prompt_logits(ours, token_ids)
    for who, rounded in logits.items():
        errors[who] = float((rounded.float() - expected).square().mean().sqrt())
    print(errors)
    assert errors["ours"] < 1.05 * errors["theirs"] < 0.1 * float(expected.std())
    # The test can tell: norms whose sum of one and weight is rounded, too, are further off.
    for module in ours.modules():
        if isinstance(module, GemmaRMSNorm):
            module.weight.copy_(module.weight.bfloat16())
    worse = (prompt_logits(ours, token_ids).float() - expected).square().mean().sqrt()
    assert worse > 1.05 * errors["theirs"]


def test_layers_with_a_window_share_a_rotary_embedding(tmp_path: Path) -> None:
    make_checkpoint(Gemma3ForCausalLM, tmp_path, **GEMMA3)
    first, second, third = (layer.self_attn.rotary for layer in load(tmp_path).model.layers)
    assert first is third and first is not second


# At small size, test_models.py has an engine with interpreted kernels, and tests/kernels has these.
@pytest.mark.size("full")
@MODEL
@torch.inference_mode()
def test_the_small_kernels_give_the_logits_of_transformers(
    name: str, tmp_path: Path, by_size: Callable[..., int]
) -> None:
    model = make_checkpoint(MODELS[name][0], tmp_path, **MODELS[name][1])
    token_ids = TOKEN_IDS[: by_size(20, 20, 45)]  # more than the window has
    ours = prompt_logits(load(tmp_path, ops=TritonOps()), token_ids)
    assert (ours - model(torch.tensor([token_ids])).logits[0]).abs().max() < 1e-4


@MODEL
def test_random_weights_give_random_logits(name: str, tmp_path: Path) -> None:
    make_checkpoint(MODELS[name][0], tmp_path, **MODELS[name][1])
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    with LLM(tmp_path, load_format="dummy", skip_tokenizer_init=True, device="cpu") as llm:
        (output,) = llm.generate([TOKEN_IDS], params, use_tqdm=False)
    for entries in output.outputs[0].logprobs:
        best, second = sorted((entry.logprob for entry in entries.values()), reverse=True)[:2]
        assert second < best < 0


# ---------------------------------------------------------------- config.json


def linear(factor: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": factor, **more}


def by_type(full: Any, local: Any, **beside: Any) -> dict[str, Any]:
    return {"rope_parameters": {FULL: full, LOCAL: local}, **beside}


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
NO_FREQUENCY = {"rope_theta": None, "rope_type": "default"}
SLOW, FAST = GEMMA3["rope_parameters"][FULL], GEMMA3["rope_parameters"][LOCAL]
# Changes of a file (`...`: left out), and what they do to the logits, ours and transformers'.
ALWAYS: list[tuple[dict[str, Any], str]] = [
    ({"query_pre_attn_scalar": 64}, "changed"),
    ({"query_pre_attn_scalar": ...}, "changed"),
    ({"query_pre_attn_scalar": None}, "refused"),
    ({"final_logit_softcapping": 2.0}, "changed"),
    ({"final_logit_softcapping": 0.0}, "refused"),
    ({"sliding_window": 5}, "changed"),
    ({"sliding_window": ...}, "changed"),
    ({"sliding_window": None}, "refused"),
    ({"sliding_window": None, "layer_types": [FULL] * 3}, "refused"),
    ({"layer_types": [FULL, FULL, LOCAL]}, "changed"),
    ({"layer_types": [FULL] * 3}, "changed"),
    ({"layer_types": [LOCAL] * 3}, "changed"),
    ({"layer_types": [FULL] * 2}, "refused"),
    ({"layer_types": ["chunked_attention"] * 3}, "refused"),
    ({"hidden_activation": "silu"}, "changed"),
    ({"hidden_activation": "gelu"}, "refused"),
    ({"hidden_activation": None}, "refused"),
    ({"hidden_activation": ...}, "same"),
    ({"hidden_act": "relu"}, "same"),
    ({"use_bidirectional_attention": True}, "refused"),
    ({"use_bidirectional_attention": ...}, "same"),
    ({"head_dim": None}, "refused"),
    ({"head_dim": ...}, "refused"),  # it is 256 then
    ({"num_key_value_heads": ...}, "refused"),
    ({"rms_norm_eps": 0.1}, "changed"),
    ({"rms_norm_eps": ...}, "refused"),
    ({"attention_bias": True}, "refused"),  # the checkpoint has none
    ({"tie_word_embeddings": False}, "refused"),  # the checkpoint has no other head
    ({"tie_word_embeddings": ...}, "same"),
    ({"partial_rotary_factor": 0.5}, "refused"),
]
CHANGES: dict[tuple[str, str], list[tuple[dict[str, Any], str]]] = {
    ("gemma2", "v4"): [
        ({"rope_theta": 100.0}, "changed"),
        ({"rope_theta": ...}, "same"),
        ({"rope_theta": None}, "refused"),
        ({"rope_scaling": linear(3.0)}, "changed"),
        ({"rope_scaling": {"type": "linear", "factor": 3.0}}, "changed"),
        ({"rope_scaling": LLAMA3}, "changed"),
        ({"rope_scaling": YARN}, "changed"),
    ],
    ("gemma2", "v5"): [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, "changed"),
        ({"rope_parameters": ...}, "same"),
        ({"rope_parameters": linear(3.0, rope_theta=1e4)}, "changed"),
        ({"rope_parameters": linear(3.0), "rope_theta": 100.0}, "changed"),
        (by_type({"rope_theta": 1e4}, {"rope_theta": 1e4}), "refused"),
    ],
    ("gemma3", "v4"): [
        ({"rope_theta": 100.0}, "changed"),
        ({"rope_theta": ...}, "changed"),
        ({"rope_theta": None}, "refused"),
        ({"rope_local_base_freq": 100.0}, "changed"),
        ({"rope_local_base_freq": ...}, "changed"),
        ({"rope_local_base_freq": None}, "refused"),
        ({"rope_scaling": None}, "changed"),
        ({"rope_scaling": linear(3.0)}, "changed"),
        ({"rope_scaling": linear(4.0, type="linear")}, "same"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "refused"),
        ({"rope_scaling": "linear"}, "refused"),
        ({"rope_scaling": LLAMA3}, "changed"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 64}, "changed"),
        ({"sliding_window_pattern": 1}, "changed"),
        ({"sliding_window_pattern": 3}, "changed"),
        ({"sliding_window_pattern": ...}, "changed"),
        ({"sliding_window_pattern": None}, "refused"),
        ({"sliding_window_pattern": 0}, "refused"),
        ({"sliding_window_pattern": 3, "layer_types": [LOCAL, FULL, LOCAL]}, "same"),
    ],
    ("gemma3", "v5"): [
        ({"rope_parameters": ...}, "changed"),
        ({"rope_parameters": [1]}, "refused"),
        (by_type(None, FAST), "changed"),
        (by_type(SLOW, None), "changed"),
        (by_type(linear(3.0), FAST), "changed"),
        (by_type(SLOW, linear(2.0)), "changed"),
        (by_type({"type": "linear", "factor": 4.0, "rope_theta": 1e5}, FAST), "same"),
        (by_type(LLAMA3, FAST), "changed"),
        (by_type(SLOW, YARN, original_max_position_embeddings=64), "changed"),
        (by_type(SLOW, FAST, rope_theta=7.0, rope_local_base_freq=8.0), "same"),
        (by_type(SLOW, FAST, rope_scaling=linear(2.0)), "changed"),
        (by_type(SLOW, NO_FREQUENCY, rope_theta=7.0), "refused"),
        (by_type(SLOW | {"partial_rotary_factor": 0.5}, FAST), "refused"),
        (by_type(SLOW, 1000.0), "refused"),
    ],
}
FULL_SIZE = (pytest.mark.size("full"),)
for _form in ("v4", "v5"):
    CHANGES["gemma2", _form] += [
        *(({"attn_logit_softcapping": value}, "changed") for value in (1.0, None, ...)),
        *(({"final_logit_softcapping": value}, "changed") for value in (None, ...)),
    ]
    CHANGES["gemma3", _form] += [
        *(({"attn_logit_softcapping": value}, "same") for value in (1.0, None, ...)),
        *(({"final_logit_softcapping": value}, "same") for value in (None, ...)),
    ]
CASES = [
    pytest.param(name, form, change, outcome, id=f"{name} {form} {change}"[:90], marks=marks)
    for (name, form), changes in CHANGES.items()
    for change, outcome, marks in [
        # Whatever model and form, these do the same: at small size, one of each four shows it.
        *((*pair, () if (name, form) == ("gemma3", "v4") else FULL_SIZE) for pair in ALWAYS),
        *((*pair, ()) for pair in changes),
    ]
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """A checkpoint of each model, with either form of config.json."""
    paths = {}
    for name, (architecture, settings) in MODELS.items():
        v5, v4 = (tmp_path_factory.mktemp(name + form) for form in ("v5", "v4"))
        make_checkpoint(architecture, v5, **settings)
        shutil.copytree(v5, v4, dirs_exist_ok=True)
        rewrite_as_v4(v4 / "config.json")
        paths |= {(name, "v5"): v5, (name, "v4"): v4}
    return paths


@pytest.fixture(scope="module")
def unchanged(written: dict[tuple[str, str], Path]) -> dict[str, torch.Tensor]:
    """The logits of each model before any change, whichever form it has."""
    logits = {}
    for name in MODELS:
        v4, v5 = (prompt_logits(load(written[name, form]), TOKEN_IDS) for form in ("v4", "v5"))
        assert torch.equal(v4, v5)
        logits[name] = v5
    return logits


@pytest.fixture(scope="module")
def weights(written: dict[tuple[str, str], Path]) -> dict[str, dict[str, torch.Tensor]]:
    models = {name: MODELS[name][0].from_pretrained(written[name, "v5"]) for name in MODELS}
    return {name: model.state_dict() for name, model in models.items()}


def from_config(name: str, path: Path, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """What `from_pretrained` returns, in a third of the time: only config.json is read."""
    architecture = MODELS[name][0]
    model = architecture(architecture.config_class.from_pretrained(path))
    model.load_state_dict(weights)
    return model.eval()


@MODEL
def test_the_v4_and_v5_forms_mean_the_same(name: str, written: dict) -> None:
    v4, v5 = (
        json.loads((written[name, form] / "config.json").read_text()) for form in ("v4", "v5")
    )
    assert "rope_parameters" not in v4 and "layer_types" not in v4 and "rope_theta" not in v5
    assert ModelConfig.from_hf(v4, {}) == ModelConfig.from_hf(v5, {})


@pytest.mark.small(name=["gemma3"], form=["v5"])
@pytest.mark.parametrize(("name", "form", "change", "outcome"), CASES)
@torch.inference_mode()
def test_every_field_is_as_in_transformers_or_refused(
    name: str,
    form: str,
    change: dict[str, Any],
    outcome: str,
    written: dict[tuple[str, str], Path],
    unchanged: dict[str, torch.Tensor],
    weights: dict[str, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    shutil.copytree(written[name, form], tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", **change)
    if outcome == "refused":
        with pytest.raises(ValueError):
            load(tmp_path)
        return
    theirs = from_config(name, tmp_path, weights[name])
    assert check(theirs, tmp_path) == "same"
    after = theirs(torch.tensor([TOKEN_IDS])).logits[0]  # and ours, but for a 100th of what follows
    assert ((unchanged[name] - after).abs().max() > 1e-2) == (outcome == "changed")


@pytest.mark.small(form=["v5"])
@MODEL
@pytest.mark.parametrize("form", ["v4", "v5"])
@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"tie_word_embeddings": False},
        {"head_dim": 32},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "num_hidden_layers": 2},
        {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 333},
    ],
    ids=str,
)
def test_so_are_those_that_shape_the_weights(
    name: str, form: str, change: dict[str, Any], tmp_path: Path
) -> None:
    architecture, settings = MODELS[name]
    model = make_checkpoint(architecture, tmp_path, **settings | change)
    if form == "v4":
        rewrite_as_v4(tmp_path / "config.json")
    assert check(model, tmp_path) == "same"


def test_the_file_of_the_real_gemma_3_1b() -> None:
    raw = {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "head_dim": 256,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_scaling": None,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "rms_norm_eps": 1e-06,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "vocab_size": 262144,
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
    }  # fmt: skip
    config = ModelConfig.from_hf(raw, {})
    assert config.sliding_windows == (*(*[512] * 5, None) * 4, 512, 512)
    assert config.rope == RopeConfig(theta=1000000)
    assert config.local_rope == RopeConfig(theta=10000)
    assert config.tie_word_embeddings and config.hidden_act == "gelu_pytorch_tanh"
    assert config.attention_scale == 1 / 16 and config.attention_soft_cap is None
