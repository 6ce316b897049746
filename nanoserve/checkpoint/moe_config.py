"""`MoEConfig` is the configuration of a mixture of experts. It does not import torch."""

from dataclasses import dataclass
from typing import NamedTuple

from nanoserve.checkpoint.config_json import ConfigFile
from nanoserve.utils.checks import check_bool, check_list, is_int, require


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
    swiglu: SwiGLU = PLAIN_SWIGLU

    def __post_init__(self) -> None:
        require(
            self.num_experts_per_tok <= self.num_experts,
            f"num_experts_per_tok={self.num_experts_per_tok} exceeds "
            f"num_experts={self.num_experts}",
        )

    @classmethod
    def from_hf(cls, file: ConfigFile) -> "MoEConfig":
        """Read the settings of Qwen3-MoE, Mixtral or gpt-oss.

        The last two have fewer: no layer is dense, and the weights of the chosen experts sum to
        one.
        """
        norm = file.get("norm_topk_prob") if file.has("norm_topk_prob") else True
        check_bool("norm_topk_prob", norm)
        every = file.size("decoder_sparse_step") if file.has("decoder_sparse_step") else 1
        dense = file.get("mlp_only_layers") or []
        check_list("mlp_only_layers", dense, is_int, "integers")
        dense = frozenset(dense)
        layers = range(file.size("num_hidden_layers"))
        return cls(
            num_experts=_num_experts(file),
            num_experts_per_tok=file.size("num_experts_per_tok"),
            intermediate_size=file.size("moe_intermediate_size", "intermediate_size"),
            norm_topk_prob=norm,
            dense_layers=frozenset(i for i in layers if i in dense or (i + 1) % every),
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
