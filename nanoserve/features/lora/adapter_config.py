"""Reads adapter_config.json, and rejects by name what an adapter may not have here."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

from nanoserve.utils.checks import is_int, is_number, json_object, require, shown

MOST_BYTES = 2**20  # of adapter_config.json
_MOST_PATTERNS = 2_000
# Entries that change nothing about the products, or that the tensors themselves answer.
_WITHOUT_EFFECT = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "lora_dropout", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "eva_config", "corda_config", "lora_ga_config"),
    *(
        "loftq_config",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
    ),
    *(
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "bias",
    ),
}
_MERGE = "merge it into its base (peft: merge_and_unload) and load that"
_REFUSED = {
    "use_dora": f"DoRA scales whole columns of the weights; {_MERGE}",
    "modules_to_save": f"whole layers of its own, such as an embedding; {_MERGE}",
    "trainable_token_indices": f"embeddings of its own; {_MERGE}",
    "target_parameters": f"parameters without a linear layer, such as those of experts; {_MERGE}",
    "layer_replication": f"a model of other layers; {_MERGE}",
    "fan_in_fan_out": "transposed weights, which no model here has",
    "lora_bias": f"biases of its own; {_MERGE}",
    "use_qalora": f"pooled inputs (QA-LoRA); {_MERGE}",
    "alora_invocation_tokens": "a start inside of the prompt (activated LoRA)",
}
# Others, such as PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA, change the base's weights, too, so the
# files hold only half of the difference.
_KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class AdapterConfig:
    """The entries of adapter_config.json that determine the products.

    rank, alpha: of modules that no pattern names. Patterns: by a regular expression for a module's
    whole name. base_model: the name of the model that was adapted, if known.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: dict[re.Pattern[str], int]
    alpha_pattern: dict[re.Pattern[str], float]
    base_model: str | None = None

    @classmethod
    def of(cls, content: bytes, where: str) -> "AdapterConfig":
        """Read the file. Raises `ValueError`, which begins with `where`, if it is unusable."""
        entries = json_object(content, where)
        kind = entries.get("peft_type") or "LORA"
        require(kind == "LORA", f"{where}: peft_type={shown(kind)} must be 'LORA'")
        for name, reason in _REFUSED.items():
            value = entries.get(name)
            require(not value, f"{where}: {name}={shown(value)} is not supported: {reason}")
        bias = entries.get("bias")
        require(bias in (None, "none"), f"{where}: bias={shown(bias)} is not supported; {_MERGE}")
        initial = entries.get("init_lora_weights", True)
        require(
            initial in _KEEPS_BASE,
            f"{where}: init_lora_weights={shown(initial)} changes the base's weights, too, or is "
            f"unknown; convert the adapter (peft: save_pretrained with "
            f"path_initial_model_for_weight_conversion)",
        )
        for name, value in entries.items():
            is_known = name in _WITHOUT_EFFECT or name in _REFUSED
            require(is_known or not value, f"{where}: {name:.80}={shown(value)} is not supported")
        return cls._checked(entries, where)

    @classmethod
    def _checked(cls, entries: dict[str, Any], where: str) -> "AdapterConfig":
        rank, alpha = entries.get("r", 8), entries.get("lora_alpha", 8)
        require(
            is_int(rank) and rank >= 1, f"{where}: r={shown(rank)} must be an integer, 1 or more"
        )
        require(is_number(alpha), f"{where}: lora_alpha={shown(alpha)} must be a finite number")
        rslora, base = entries.get("use_rslora") or False, entries.get("base_model_name_or_path")
        require(isinstance(rslora, bool), f"{where}: use_rslora={shown(rslora)} must be a boolean")
        ranks = _patterns(entries, "rank_pattern", lambda one: is_int(one) and one >= 1, where)
        alphas = _patterns(entries, "alpha_pattern", is_number, where)
        own = base if isinstance(base, str) else None
        return cls(int(rank), float(alpha), rslora, ranks, alphas, base_model=own)

    def rank_of(self, module: str) -> int:
        return int(_of_module(self.rank_pattern, module, self.rank))

    def scaling_of(self, module: str) -> float:
        """Return the factor of B A x: alpha / rank, or alpha / sqrt(rank) for rsLoRA.

        rsLoRA: Kalajdzievski 2023, arXiv 2312.03732.
        """
        alpha = _of_module(self.alpha_pattern, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / (sqrt(rank) if self.use_rslora else rank)


def _patterns(
    entries: dict[str, Any], name: str, is_right: Callable[[Any], bool], where: str
) -> dict[re.Pattern[str], Any]:
    """Return the values of rank_pattern or alpha_pattern."""
    pattern = entries.get(name) or {}
    is_object = isinstance(pattern, dict) and len(pattern) <= _MOST_PATTERNS
    require(is_object, f"{where}: {name}={shown(pattern)} must be an object")
    values = {}
    for key, value in pattern.items():
        compiled = _compiled(key, f"{where}: {name}")
        require(
            is_right(value),
            f"{where}: {name}[{shown(key)}]={shown(value)} must be a number, 1 or more",
        )
        values[compiled] = value
    return values


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Return the expression for names that a pattern matches, whole or after a dot.

    Raises `ValueError` for expressions that could take for ever to match, and for invalid ones.
    Without repetitions, groups of alternatives could: each one doubles the ways to match.
    """
    is_simple = 0 < len(pattern) <= 500 and not set(pattern) & set("*+?{}()")
    require(
        is_simple,
        f"{where}: the pattern {shown(pattern)} must name modules, such as "
        f"'layers.0.self_attn.q_proj': repetitions (* + ? {{}}) and groups are not supported",
    )
    try:
        return re.compile(rf"(.*\.)?({pattern})")
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}: the pattern {shown(pattern)} is invalid: {error}") from None


def _of_module(patterns: dict[re.Pattern[str], Any], module: str, default: float) -> Any:
    """Return the value of the first pattern that matches a module's name."""
    return next((value for own, value in patterns.items() if own.fullmatch(module)), default)
