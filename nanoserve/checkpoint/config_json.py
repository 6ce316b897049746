"""Read a checkpoint's `config.json` as transformers' class for its architecture reads it.

Only this module and `nanoserve.checkpoint.rope_config` handle the differences between the files
that transformers 4 and 5 write. Neither torch nor transformers is imported.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.architecture_defaults import OTHER_SETTINGS
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.utils.checks import (
    check_bool,
    check_choice,
    check_int,
    check_number,
    json_object,
    require,
)

# The settings that transformers reads, with its defaults for files that omit them (None: there is
# no default, or it follows from other settings). A setting that is not listed for an architecture
# has no effect on it in transformers, and therefore none here.
_COMMON: dict[str, Any] = {
    "vocab_size": None, "hidden_size": None, "intermediate_size": None, "head_dim": None,
    "num_hidden_layers": None, "num_attention_heads": None, "num_key_value_heads": None,
    "max_position_embeddings": None, "rms_norm_eps": None, "hidden_act": "silu",
    "tie_word_embeddings": False, "rope_theta": None,
}  # fmt: skip
_QWEN_WINDOWS = {
    "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_SETTINGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False, "rope_theta": 10_000.0},
    "Qwen2ForCausalLM": {"rope_theta": 10_000.0, **_QWEN_WINDOWS},
    "Qwen3ForCausalLM": {
        "attention_bias": False,
        "head_dim": 128,
        "rope_theta": 10_000.0,
        **_QWEN_WINDOWS,
    },
}
_MAX_JSON_BYTES = 2**27  # the index of the largest models has about ten million bytes
# Keeps the product of two sizes, in bytes, far below 2^63: torch counts in 64 bits.
_LARGEST_SIZE = 2**18
_LARGEST = {"vocab_size": 2**31 - 1, "max_position_embeddings": 2**31 - 1}  # int32 in batches
_LARGEST |= {"num_hidden_layers": 2**10, "num_experts": 2**10, "num_local_experts": 2**10}


class ConfigFile:
    """A `config.json`, completed with its architecture's defaults (`_SETTINGS` and others)."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw, self.architecture = raw, architecture_of(raw)
        self.implied = _COMMON | (_SETTINGS.get(self.architecture) or _others(self.architecture))

    def get(self, name: str) -> Any:
        """Return a setting; None if the architecture has no such setting or the file has null."""
        return self.raw.get(name, self.implied[name]) if name in self.implied else None

    def has(self, name: str) -> bool:
        """Return True if the file sets a value or the architecture implies a value."""
        return self.get(name) is not None or self.implied.get(name) is not None

    def size(self, name: str, default: str | None = None) -> int:
        if default is not None and self.get(name) is None:
            name = default
        require(self.get(name) is not None, f"config.json has no {name!r}")
        return check_int(name, self.get(name), 1, _LARGEST.get(name, _LARGEST_SIZE))

    def flag(self, name: str) -> bool:
        if self.get(name) is not None:
            check_bool(f"config.json: {name}", self.get(name))
        return self.get(name) is True

    def positive(self, name: str) -> float:
        return float(check_number(f"config.json: {name}", self.get(name), 0, excludes_low=True))

    def head_dim(self) -> int:
        if self.has("head_dim"):
            return self.size("head_dim")
        head_dim = self.size("hidden_size") // self.size("num_attention_heads")
        return check_int("head_dim = hidden_size / num_attention_heads", head_dim, 1)

    def activation(self) -> str:
        """Return the name of the activation function.

        Gemma has it in `hidden_activation`; its `hidden_act` has no effect.
        """
        name = "hidden_activation" if self.has("hidden_activation") else "hidden_act"
        check_choice(name, self.get(name), ("silu", "gelu_pytorch_tanh"))
        return self.get(name)

    def is_full_attention(self) -> bool:
        """Return True if no layer has a sliding window; False also if the file does not say so."""
        if "sliding_window" not in self.implied:
            return True
        is_off = "use_sliding_window" in self.implied and not self.flag("use_sliding_window")
        types = ["full_attention"] * self.size("num_hidden_layers")
        has_one_rope = not self.has("rope_local_base_freq")
        return is_off and has_one_rope and self.get("layer_types") == types

    def rope(self, head_dim: int, max_positions: int) -> RopeConfig:
        """Return the RoPE settings of all layers; theta defaults to the architecture's."""
        objects = (self.raw.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
        is_given = any(isinstance(one, dict) and "rope_theta" in one for one in objects)
        name = "partial_rotary_factor"
        implied = {"rope_theta": None if is_given else self.implied["rope_theta"]}
        implied[name] = self.implied.get(name)
        raw = {**implied, **self.raw}
        if "mrope_section" in self.implied:  # of images' positions: text has one coordinate
            raw |= {
                key: {k: v for k, v in raw[key].items() if not k.startswith("mrope_")}
                for key in ("rope_parameters", "rope_scaling")
                if isinstance(raw.get(key), dict)
            }
        if not any(raw.get(name) for name in ("rope_parameters", "rope_scaling")):
            raw["rope_parameters"] = self.implied.get("rope_parameters")
        may_be_partial = name in self.implied
        return RopeConfig.from_hf(raw, head_dim, max_positions, may_be_partial=may_be_partial)


def _others(architecture: str) -> dict[str, Any]:
    # A user's own model may read any setting of the known models, without defaults.
    known = {n for settings in (_SETTINGS | OTHER_SETTINGS).values() for n in settings}
    return OTHER_SETTINGS.get(architecture, dict.fromkeys(known - _COMMON.keys()))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises `ValueError`, with the file's name, if it is missing, larger than 128 MiB, or invalid.
    """
    is_small = path.is_file() and path.stat().st_size <= _MAX_JSON_BYTES
    # The check of is_file() also rejects a pipe, which would block.
    require(is_small, f"{path} must be a file of at most {_MAX_JSON_BYTES} bytes")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if content.startswith(b"version https://git-lfs"):
        raise ValueError(describe_lfs_pointer(path))
    return json_object(content, str(path))


def architecture_of(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or [None]
    return str(names[0] if isinstance(names, list) else names)


def describe_lfs_pointer(file: Path) -> str:
    """Describe a git-lfs pointer found in place of a file."""
    return (
        f"{file} is a git-lfs pointer, not the file itself: git cloned the repository without its "
        f"large files; run `git lfs pull` in {file.parent}"
    )


def describe_damage(file: Path, error: Exception) -> str:
    """Describe a file that could not be opened as safetensors, and the reason."""
    with suppress(OSError), file.open("rb") as content:  # an OSError may be the reason itself
        if content.read(23) == b"version https://git-lfs":
            return describe_lfs_pointer(file)
    return f"{file} is damaged or not a safetensors file: {error}"
