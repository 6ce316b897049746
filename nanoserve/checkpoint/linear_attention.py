"""`LinearAttentionConfig` describes layers with linear attention. It does not import torch.

Such a layer replaces the K and V of all earlier tokens by a matrix of fixed size for each head
(`nanoserve.models.layers.delta_rule`). Usually every fourth layer keeps full attention.
"""

from dataclasses import dataclass

from nanoserve.checkpoint.config_json import ConfigFile
from nanoserve.utils.checks import require, shown

_TYPES = ("full_attention", "linear_attention")


@dataclass(frozen=True)
class LinearAttentionConfig:
    """The gated delta rule of Qwen3-Next and Qwen3.5.

    layers: indices of the layers that have it; the others have full attention.
    num_key_heads, num_value_heads: consecutive value heads share a key head, as in GQA.
    conv_kernel_dim: number of tokens that the causal convolution before it sees.

    Raises `ValueError`, with the name in `config.json`, for sizes that do not fit together.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    def __post_init__(self) -> None:
        require(
            self.num_value_heads % self.num_key_heads == 0,
            f"linear_num_value_heads={self.num_value_heads} must be a multiple of "
            f"linear_num_key_heads={self.num_key_heads}",
        )
        require(
            self.conv_kernel_dim > 1,
            f"linear_conv_kernel_dim={self.conv_kernel_dim} must be at least 2",
        )

    @classmethod
    def from_hf(cls, file: ConfigFile) -> "LinearAttentionConfig":
        """Read the settings `linear_...`, and `layer_types` or `full_attention_interval`."""
        gate = file.get("attn_output_gate")
        require(gate in (None, True), f"attn_output_gate={shown(gate)} is not supported")
        return cls(
            layers=_linear_layers(file),
            num_key_heads=file.size("linear_num_key_heads"),
            num_value_heads=file.size("linear_num_value_heads"),
            key_head_dim=file.size("linear_key_head_dim"),
            value_head_dim=file.size("linear_value_head_dim"),
            conv_kernel_dim=file.size("linear_conv_kernel_dim"),
        )


def _linear_layers(file: ConfigFile) -> frozenset[int]:
    num_layers, types = file.size("num_hidden_layers"), file.get("layer_types")
    if types is None:
        interval = file.size("full_attention_interval")
        types = [_TYPES[(layer + 1) % interval > 0] for layer in range(num_layers)]
    require(
        isinstance(types, list)
        and len(types) == num_layers
        and all(name in _TYPES for name in types),
        f"layer_types={shown(types)} must be a list of {_TYPES} for each of "
        f"num_hidden_layers={num_layers} layers: other types are not supported",
    )
    require(
        _TYPES[0] in types,
        f"layer_types={shown(types)} has no layer with full attention, which is not supported",
    )
    return frozenset(layer for layer, name in enumerate(types) if name == _TYPES[1])
