"""`MoEConfig` is the configuration of a mixture of experts. It does not import torch."""

from dataclasses import dataclass
from typing import NamedTuple

from nanoserve.checkpoint.config_json import ConfigFile
from nanoserve.utils.checks import (
    check_bool,
    check_choice,
    check_int,
    check_list,
    is_int,
    require,
    shown,
)

# How scores become experts, by `topk_method`: the `scoring_func` that belongs to it.
TOPK_METHODS = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}


@dataclass(frozen=True)
class RoutingConfig:
    """A router of DeepSeek V2 or V3, which may choose groups of experts first.

    topk_method: "greedy" takes the experts of the highest softmax; "group_limited_greedy" those in
    the `topk_group` of `num_groups` groups whose best experts have the highest. "noaux_tc" is the
    same with a sigmoid, to which the checkpoint adds a bias for each expert while experts are
    chosen, and with the two best experts of each group (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
    """

    topk_method: str
    num_groups: int = 1
    topk_group: int = 1
    scaling: float = 1.0  # of the weights of the chosen experts


class SwiGLU(NamedTuple):
    """The gate of an expert: gate x sigmoid(alpha x gate) x (up + offset).

    limit: clamps gate from above and up from both sides first; None: neither.
    """

    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0


PLAIN_SWIGLU = SwiGLU()


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts that replaces the feed-forward network, except in `dense_layers`."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # True if the weights of the chosen experts are normalised to sum to one
    dense_layers: frozenset[int] = frozenset()
    shared_expert_intermediate_size: int | None = None  # None: no expert is shared by all tokens
    routing: RoutingConfig | None = None  # None: the experts of the highest softmax
    swiglu: SwiGLU = PLAIN_SWIGLU

    def __post_init__(self) -> None:
        require(
            self.num_experts_per_tok <= self.num_experts,
            f"num_experts_per_tok={self.num_experts_per_tok} exceeds "
            f"num_experts={self.num_experts}",
        )

    @classmethod
    def from_hf(cls, file: ConfigFile) -> "MoEConfig":
        """Read the settings of Qwen2-MoE, Qwen3-MoE, Mixtral, gpt-oss or DeepSeek.

        The last two have fewer: no layer is dense, and the weights of the chosen experts sum to
        one.
        """
        if file.has("n_routed_experts"):
            return _deepseek(file)
        norm = file.get("norm_topk_prob") if file.has("norm_topk_prob") else True
        check_bool("norm_topk_prob", norm)
        every = file.size("decoder_sparse_step") if file.has("decoder_sparse_step") else 1
        dense = file.get("mlp_only_layers") or []
        check_list("mlp_only_layers", dense, is_int, "integers")
        dense = frozenset(dense)
        layers = range(file.size("num_hidden_layers"))
        shared = "shared_expert_intermediate_size"
        return cls(
            num_experts=_num_experts(file),
            num_experts_per_tok=file.size("num_experts_per_tok"),
            intermediate_size=file.size("moe_intermediate_size", "intermediate_size"),
            norm_topk_prob=norm,
            dense_layers=frozenset(i for i in layers if i in dense or (i + 1) % every),
            shared_expert_intermediate_size=file.size(shared) if file.has(shared) else None,
            swiglu=_swiglu(file),
        )


def _swiglu(file: ConfigFile) -> SwiGLU:
    """Return gpt-oss's gate for a file that has its settings, with an offset that has none."""
    if not file.has("swiglu_limit"):
        return PLAIN_SWIGLU
    return SwiGLU(file.positive("swiglu_alpha"), file.positive("swiglu_limit"), offset=1.0)


def _num_experts(file: ConfigFile) -> int:
    """Return the number of experts.

    transformers 4 writes "num_experts" for Qwen3-MoE; 5 reads either name for any model.
    """
    names = [name for name in ("num_experts", "num_local_experts") if name in file.raw]
    counts = {name: file.size(name) for name in names or ["num_experts"]}
    require(len(set(counts.values())) == 1, f"config.json contradicts itself: {counts}")
    return counts.popitem()[1]


def _deepseek(file: ConfigFile) -> MoEConfig:
    """Read the settings of DeepSeek V2 or V3."""
    num_dense = check_int("first_k_dense_replace", file.get("first_k_dense_replace"), 0)
    every = file.get("moe_layer_freq")
    require(every in (None, 1), f"moe_layer_freq={shown(every)} is not supported: it must be 1")
    has_shared = file.get("n_shared_experts") not in (None, 0)
    size = file.size("moe_intermediate_size")
    return MoEConfig(
        num_experts=file.size("n_routed_experts"),
        num_experts_per_tok=file.size("num_experts_per_tok"),
        intermediate_size=size,
        norm_topk_prob=file.flag("norm_topk_prob"),
        dense_layers=frozenset(range(min(num_dense, file.size("num_hidden_layers")))),
        shared_expert_intermediate_size=file.size("n_shared_experts") * size
        if has_shared
        else None,
        routing=_routing(file),
    )


def _routing(file: ConfigFile) -> RoutingConfig:
    method, scoring = file.get("topk_method"), file.get("scoring_func")
    check_choice("topk_method", method, tuple(TOPK_METHODS))
    wanted = TOPK_METHODS[method]
    require(
        scoring in (None, wanted),
        f"scoring_func={shown(scoring)} with topk_method={method!r} is not supported: it must be "
        f"{wanted!r}",
    )
    require(
        method == "noaux_tc" or not file.flag("norm_topk_prob"),
        f"norm_topk_prob=True with topk_method={method!r} is not supported: transformers does not "
        f"normalise these weights, DeepSeek's code does",
    )
    scaling = file.positive("routed_scaling_factor")
    if method == "greedy":
        return RoutingConfig(method, scaling=scaling)
    num_experts, top_k = file.size("n_routed_experts"), file.size("num_experts_per_tok")
    num_groups, topk_group = file.size("n_group"), file.size("topk_group")
    least = 2 if method == "noaux_tc" else 1  # experts that make a group's score
    in_group, rest = divmod(num_experts, num_groups)
    require(
        not rest and in_group >= least and topk_group <= num_groups,
        f"n_routed_experts={num_experts}, n_group={num_groups} and topk_group={topk_group}: groups "
        f"must be of one size, of {least} experts or more, and topk_group at most n_group",
    )
    require(
        top_k <= topk_group * in_group,
        f"num_experts_per_tok={top_k} exceeds the {topk_group * in_group} experts of "
        f"topk_group={topk_group} groups",
    )
    return RoutingConfig(method, num_groups, topk_group, scaling)
