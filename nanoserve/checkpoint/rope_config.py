"""What a checkpoint says of its rotary position embedding (`RopeConfig`), without torch.

transformers 5 writes one object, `rope_parameters`, with `rope_theta` and `rope_type` in it.
transformers 4 writes `rope_theta` beside an object `rope_scaling`, whose type is also called
"type". What each type means is told in `nanoserve.layers.rope_scaling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanoserve.checks import check_bool, check_int, check_list, check_number, is_number, require

PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "short_factor",
        "long_factor",
        "attention_factor",
    ),
}
_OLD_NAMES = {"su": "longrope"}
_OPTIONAL = {"attention_factor", "mscale", "mscale_all_dim"}


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding. Parameters that the type does not have stay at their defaults.

    Raises `ValueError` with the name and the value of a parameter that is missing, makes no
    sense or would have no effect.
    """

    rope_type: str = "default"
    theta: float = 10_000.0  # "rope_theta" in files
    factor: float | None = None  # how many times longer the context has become
    original_max_position_embeddings: int | None = None  # the context before that
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

    def __post_init__(self) -> None:
        require(
            self.rope_type in PARAMETERS,
            f"rope_type={self.rope_type!r} is not implemented; implemented are {list(PARAMETERS)}",
        )
        require(
            is_number(self.theta) and self.theta > 1,
            f"config.json: rope_theta={self.theta!r} must be a number above 1; its place is in "
            f"rope_parameters, or in or beside rope_scaling",
        )
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if field.name in PARAMETERS[self.rope_type]:
                self._check_parameter(field.name, value)
            else:
                self._check(value == field.default, field.name, "is no parameter of this type")
        self._check_pairs()

    def _check(self, condition: bool, name: str, rule: str) -> None:
        value = getattr(self, name)
        require(condition, f"rope_type={self.rope_type!r}: {name}={value!r} {rule}")

    def _check_parameter(self, name: str, value: Any) -> None:
        told = f"rope_type={self.rope_type!r}: {name}"
        if value is None and name in _OPTIONAL:
            return
        if name == "original_max_position_embeddings":
            check_int(told, value, 2)
        elif name == "truncate":
            check_bool(told, value)
        elif name in ("short_factor", "long_factor"):
            check_list(told, value, _is_positive, "positive numbers")
        elif name == "factor":
            check_number(told, value, 1)
        else:
            check_number(told, value, 0, excludes_low=True)

    def _check_pairs(self) -> None:
        """What two parameters must agree on."""
        if self.rope_type == "llama3":
            rule = f"must be above low_freq_factor={self.low_freq_factor!r}"
            self._check(self.high_freq_factor > self.low_freq_factor, "high_freq_factor", rule)
        rule = f"must not be below beta_slow={self.beta_slow!r}"
        self._check(self.beta_fast >= self.beta_slow, "beta_fast", rule)
        rule = f"and mscale_all_dim={self.mscale_all_dim!r} need each other"
        self._check((self.mscale is None) == (self.mscale_all_dim is None), "mscale", rule)
        rule = f"and mscale={self.mscale!r} both set the same: give one"
        exclusive = self.attention_factor is None or self.mscale is None
        self._check(exclusive, "attention_factor", rule)

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], head_dim: int, max_position_embeddings: int
    ) -> "RopeConfig":
        """`raw` is `config.json`; `max_position_embeddings` is as it stands there."""
        settings = _settings(raw)
        old_name = settings.pop("type", "default")
        rope_type = str(settings.pop("rope_type", old_name))
        rope_type = _OLD_NAMES.get(rope_type, rope_type)
        theta = settings.pop("rope_theta", raw.get("rope_theta"))
        _refuse_partial(settings.pop("partial_rotary_factor", raw.get("partial_rotary_factor")))
        if rope_type not in PARAMETERS:
            settings = {}  # the type is the news, not what comes with it
        _refuse_unknown(rope_type, settings)
        _add_implied(rope_type, settings, raw, max_position_embeddings)
        config = cls(rope_type, theta, **settings)
        for name in ("short_factor", "long_factor") if rope_type == "longrope" else ():
            count = len(getattr(config, name))
            rule = f"has {count} numbers; head_dim={head_dim} needs {head_dim // 2}"
            config._check(count == head_dim // 2, name, rule)
        return config

    def num_positions(self, max_position_embeddings: int) -> int:
        """How long a sequence may be, in tokens; the argument is as `config.json` has it.

        Files of extended models mostly say the extended length there, and for "linear", "llama3"
        and "longrope" it is taken so. "dynamic" is defined by the original length there. For
        "yarn" both are common (the model card of Qwen3 adds YaRN and leaves the length alone), and
        the longer of the two counts.
        """
        extended = 0
        if self.rope_type in ("dynamic", "yarn"):
            extended = int(self.factor * self.original_max_position_embeddings)
        return max(max_position_embeddings, extended)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The object that counts: transformers lets a `rope_scaling` that says anything win."""
    for name in ("rope_parameters", "rope_scaling"):
        value = raw.get(name) or {}
        require(isinstance(value, dict), f"config.json: {name}={value!r} must be an object")
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    nested = sorted(name for name, value in settings.items() if isinstance(value, dict))
    require(
        not nested, f"config.json: RoPE parameters per type of layer, {nested}, are not implemented"
    )
    return {name: value for name, value in settings.items() if value is not None}


def _refuse_partial(share: Any) -> None:
    require(
        share is None or (is_number(share) and share == 1),
        f"partial_rotary_factor={share!r} is not implemented, only 1",
    )


def _refuse_unknown(rope_type: str, settings: Mapping[str, Any]) -> None:
    """What would change the frequencies, the attention factor or attention itself elsewhere."""
    known = set(PARAMETERS.get(rope_type, ()))
    if rope_type == "dynamic":  # measures from max_position_embeddings, so a file has no other
        known.remove("original_max_position_embeddings")
    unknown = {name: settings[name] for name in sorted(settings.keys() - known)}
    require(
        not unknown,
        f"rope_type={rope_type!r}: {unknown} not implemented; parameters are {sorted(known)}",
    )


def _add_implied(
    rope_type: str, settings: dict[str, Any], raw: Mapping[str, Any], max_position_embeddings: int
) -> None:
    """Add to `settings` what transformers takes from other entries of the file."""
    for name in ("short_factor", "long_factor"):
        if isinstance(settings.get(name), list):
            settings[name] = tuple(settings[name])
    if "original_max_position_embeddings" not in PARAMETERS.get(rope_type, ()):
        return
    original = settings.get("original_max_position_embeddings", max_position_embeddings)
    if rope_type != "dynamic":  # Phi-3 has it beside the object, where it wins
        original = raw.get("original_max_position_embeddings") or original
    settings["original_max_position_embeddings"] = original
    if rope_type == "longrope":
        is_size = is_number(original) and original > 0
        factor = max(1.0, max_position_embeddings / original) if is_size else 1.0
        settings.setdefault("factor", factor)
