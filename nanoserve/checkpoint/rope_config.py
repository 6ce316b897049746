"""`RopeConfig` is the configuration of a rotary position embedding. It does not import torch.

transformers 5 writes one object, `rope_parameters`, with `rope_theta` and `rope_type` in it.
transformers 4 writes `rope_theta` next to an object `rope_scaling`, whose type is also called
"type". Types other than the default are read by `nanoserve.checkpoint.rope_types`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanoserve.checkpoint.rope_types import (
    check_head_dim,
    check_parameters,
    read_settings,
    reject_partial,
)
from nanoserve.utils.checks import check_int, is_number, require, shown


@dataclass(frozen=True)
class RopeConfig:
    """The settings of one rotary embedding. Parameters of other types stay at their defaults.

    Raises `ValueError`, with the name and the value, for a parameter that is missing, invalid or
    without effect.
    """

    rope_type: str = "default"
    theta: float = 10_000.0  # "rope_theta" in files
    factor: float | None = None  # extended context length / original context length
    original_max_position_embeddings: int | None = None  # original context length
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None  # None: computed from `factor`
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None  # one per pair of dimensions
    long_factor: tuple[float, ...] | None = None
    partial_rotary_factor: float = 1.0  # part of each head that is rotated

    def __post_init__(self) -> None:
        if any(
            getattr(self, field.name) != field.default
            for field in fields(self)
            if field.name != "theta"
        ):
            check_parameters(self)
        require(
            is_number(self.theta) and self.theta > 1 + 1e-6,  # else it is 1 in float32
            f"config.json: rope_theta={shown(self.theta)} must be a number above 1; set it in "
            f"rope_parameters, in rope_scaling or next to rope_scaling",
        )

    @classmethod
    def from_hf(
        cls,
        raw: Mapping[str, Any],
        head_dim: int,
        max_position_embeddings: int,
        *,
        may_be_partial: bool = False,
    ) -> "RopeConfig":
        """Read the settings from `config.json` (`raw`).

        `max_position_embeddings` is the value in that file, before any extension. may_be_partial:
        the model can rotate a part of each head.
        """
        settings = _settings(raw)
        is_default = settings.get("rope_type", settings.get("type", "default")) == "default"
        theta: Any = settings.get("rope_theta", raw.get("rope_theta"))
        is_plain = settings.keys() <= {"rope_theta", "rope_type", "type"} and is_number(theta)
        if is_default and is_plain and raw.get("partial_rotary_factor") is None:
            return cls(theta=theta)
        found = read_settings(raw, settings, max_position_embeddings)
        if not may_be_partial:
            reject_partial(found["partial_rotary_factor"])
        config = cls(**found)
        check_head_dim(config, config.rotary_dim(head_dim))
        return config

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many values of a head are rotated; raises `ValueError` for no whole pairs."""
        rotary_dim = int(head_dim * self.partial_rotary_factor)
        require(
            rotary_dim > 0 and rotary_dim % 2 == 0,
            f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={head_dim} is "
            f"{rotary_dim}, which must be even and above 0",
        )
        return rotary_dim

    def check_whole(self) -> None:
        """Raise `ValueError` unless the whole of each head is rotated."""
        require(
            self.partial_rotary_factor == 1,
            f"partial_rotary_factor={self.partial_rotary_factor} needs a model that uses "
            f"nanoserve.models.layers.partial_rotary.PartialRotaryEmbedding",
        )

    def num_positions(self, max_position_embeddings: int) -> int:
        """Return the longest sequence, in tokens; the argument is the value in `config.json`.

        Files of extended models mostly have the extended length there, and that is assumed for
        "linear", "llama3" and "longrope". "dynamic" is defined with the original length there. For
        "yarn" both are common (the model card of Qwen3 adds YaRN and leaves the length unchanged),
        and the longer of the two counts.
        """
        if self.rope_type in ("dynamic", "yarn"):
            extended = int(self.factor * self.original_max_position_embeddings)
            name = "factor x original_max_position_embeddings"
            return max(max_position_embeddings, check_int(name, extended, 1, 2**31 - 1))
        return max_position_embeddings


def _settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object that takes effect: in transformers, a non-empty `rope_scaling` wins."""
    for name in ("rope_parameters", "rope_scaling"):
        value = raw.get(name) or {}
        require(isinstance(value, dict), f"config.json: {name}={shown(value)} must be an object")
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    return {name: value for name, value in settings.items() if value is not None}
