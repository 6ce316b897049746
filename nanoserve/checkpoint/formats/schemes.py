"""Parse `config_groups` of compressed-tensors, which has the quantization scheme of each module.

This module does not import torch: `config.json` is checked before anything is read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoserve.utils.checks import check_choice, check_int, check_list, is_int, require, shown

# (format, type) -> (bits of a value, strategies: the parts that may have their own scale).
_INTEGERS = ((4, 8), ("tensor", "channel", "group"))
_FLOATS = ((8,), ("tensor", "channel", "block"))
_KINDS = {
    ("int-quantized", "int"): _INTEGERS,
    ("pack-quantized", "int"): _INTEGERS,
    ("naive-quantized", "int"): _INTEGERS,
    ("float-quantized", "float"): _FLOATS,
    ("naive-quantized", "float"): _FLOATS,
    ("mxfp4-pack-quantized", "float"): ((4,), ("group",)),
}
FORMATS = tuple(dict.fromkeys(kind for kind, _ in _KINDS))
# "weight" (or "static") affects only how codes were computed; "group" (or "dynamic") permutes
# groups.
_ACTIVATION_ORDERS = (None, False, "weight", "static", "group", "dynamic")
_WEIGHT_FIELDS = {
    "num_bits", "type", "strategy", "symmetric", "group_size", "block_structure", "dynamic",
    "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip
# Patterns are untrusted, and Python's `re` may take exponential time on crafted patterns and names.
_MAX_PATTERN, _MAX_NAME, _MAX_REPEATS = 200, 250, 3
_CLASSES = ("Linear",)


@dataclass(frozen=True)
class Scheme:
    """The quantization scheme of a weight. Fields have the same names as in `config.json`."""

    format: str
    num_bits: int
    type: str  # "int" or "float"
    strategy: str  # "tensor", "channel", "group" or "block"
    symmetric: bool
    group_size: int  # -1: a row
    block: tuple[int, int] | None
    has_g_idx: bool


def read_schemes(config: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    """Return the targets and the scheme of each group.

    Raises `ValueError` for a scheme that is not supported.
    """
    groups: Any = config.get("config_groups")
    require(
        isinstance(groups, Mapping) and len(groups) > 0,
        f"config_groups={shown(groups)} must be an object of schemes",
    )
    _check_targets("ignore", config.get("ignore") or [])
    schemes = []
    for name, group in groups.items():
        where = f"config_groups[{shown(name)}]"
        require(
            isinstance(group, Mapping),
            f"{where}={shown(group)} must be an object: named presets are not supported; write "
            "out the fields of the preset",
        )
        _check_targets(f"{where}.targets", group.get("targets"))
        _check_activations(where, group)
        kind: Any = group.get("format") or config.get("format")
        check_choice(f"{where}: format", kind, FORMATS)
        schemes.append((group["targets"], _scheme(f"{where}.weights", group.get("weights"), kind)))
    return schemes


def scheme_of(module: str, config: Mapping[str, Any], schemes: list) -> Scheme:
    """Return the scheme of a quantized module. A name or pattern takes precedence over "Linear"."""
    if any(_matches(module, target) for target in config.get("ignore") or []):
        raise ValueError(f"{module:.199} is stored quantized, but `ignore` lists it as unquantized")
    for is_class in (False, True):
        for targets, scheme in schemes:
            if any(
                (t in _CLASSES) == is_class and (is_class or _matches(module, t)) for t in targets
            ):
                return scheme
    raise ValueError(f"{module:.199} is stored quantized, but matches no target in config_groups")


def _matches(module: str, target: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    require(len(module) <= _MAX_NAME, f"{module:.99}... is longer than {_MAX_NAME} characters")
    return re.match(target.removeprefix("re:"), module) is not None


def _check_targets(where: str, targets: Any) -> None:
    check_list(where, targets, lambda target: isinstance(target, str), "names, re:patterns")
    for target in targets:
        if target.startswith("re:"):
            pattern = target.removeprefix("re:")
            is_tame = len(pattern) <= _MAX_PATTERN and not re.search(r"\)[*+{]", pattern)
            is_tame = is_tame and len(re.findall(r"[*+{]", pattern)) <= _MAX_REPEATS
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError):
                is_tame = False
            require(
                is_tame,
                f"{where}: {shown(target)} must be a valid pattern of at most {_MAX_PATTERN} "
                f"characters and {_MAX_REPEATS} of * + {{, no repeated group; list names instead",
            )


def _check_activations(where: str, group: Mapping[str, Any]) -> None:
    """Accept dynamic activation scales, which do not affect weights; reject static scales."""
    known = {"targets", "weights", "input_activations", "output_activations", "format"}
    unknown = sorted(key for key in group.keys() - known if group[key] is not None)
    require(not unknown, f"{where}: {shown(unknown)} is not supported")
    outputs, inputs = group.get("output_activations"), group.get("input_activations")
    require(
        outputs is None, f"{where}.output_activations={shown(outputs)} is not supported: "
        "use a checkpoint without quantized outputs",
    )  # fmt: skip
    require(
        inputs is None or (isinstance(inputs, Mapping) and inputs.get("dynamic") is True),
        f"{where}.input_activations={shown(inputs)}: static activation quantization is not "
        "supported; use a checkpoint with dynamic activation scales",
    )


def _scheme(where: str, weights: Any, kind: str) -> Scheme:
    require(isinstance(weights, Mapping), f"{where}={shown(weights)} must be an object")
    unknown = sorted(key for key in weights.keys() - _WEIGHT_FIELDS if weights[key] is not None)
    require(not unknown, f"{where}: {shown(unknown)} is not supported")
    bits, type_ = weights.get("num_bits", 8), weights.get("type", "int")
    widths, strategies = _KINDS.get((kind, type_ if isinstance(type_, str) else ""), ((), ()))
    require(
        is_int(bits) and bits in widths,
        f"{where}: num_bits={shown(bits)}, type={shown(type_)} is not supported in {kind}; "
        f"supported are {_KINDS}",
    )
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    check_choice(f"{where}: strategy", strategy, strategies)
    check_choice(f"{where}: dynamic", weights.get("dynamic", False), (False, None))
    symmetric, actorder = weights.get("symmetric", True), weights.get("actorder")
    check_choice(f"{where}: symmetric", symmetric, (True, False) if type_ == "int" else (True,))
    check_choice(f"{where}: actorder", actorder, _ACTIVATION_ORDERS)
    return Scheme(
        format=kind, num_bits=bits, type=type_, strategy=strategy, symmetric=symmetric,
        group_size=_group_size(where, weights, strategy, kind),
        block=_block(where, weights) if strategy == "block" else None,
        has_g_idx=actorder in ("group", "dynamic"),
    )  # fmt: skip


def _group_size(where: str, weights: Mapping[str, Any], strategy: str, kind: str) -> int:
    if strategy != "group":
        return -1
    size = check_int(f"{where}: group_size", weights.get("group_size"), 1, 2**18)
    require("mxfp4" not in kind or size == 32, f"{where}: group_size={size} must be 32 for MXFP4")
    return size


def _block(where: str, weights: Mapping[str, Any]) -> tuple[int, int]:
    block: Any = weights.get("block_structure")
    check_list(f"{where}: block_structure", block, lambda n: is_int(n) and 0 < n < 2**18, "sizes")
    require(len(block) == 2, f"{where}: block_structure={shown(block)} must be two sizes")
    return int(block[0]), int(block[1])
