"""`MLAConfig` is the configuration of multi-head latent attention. It does not import torch."""

import math
from dataclasses import dataclass

from nanoserve.checkpoint.config_json import ConfigFile
from nanoserve.checkpoint.kv_formats import KVHeads
from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.utils.checks import require, shown


@dataclass(frozen=True)
class MLAConfig:
    """The sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A query or key head has `qk_nope_head_dim` numbers without a position, computed from the latent
    vector if it is a key, and `qk_rope_head_dim` rotated ones, which all key heads share.
    """

    kv_lora_rank: int  # of the latent vector from which keys and values are computed
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries are computed from the hidden state directly
    rope_interleave: bool = True  # pairs to rotate are (0, 1), (2, 3), ..., not halves

    @classmethod
    def from_hf(cls, file: ConfigFile) -> "MLAConfig":
        """Read the settings of DeepSeek V2 and V3.

        Raises `ValueError` for a number of KV heads that is not the number of heads: the cache has
        one latent vector for all heads, whatever it is.
        """
        heads, kv_heads = file.size("num_attention_heads"), file.get("num_key_value_heads")
        require(
            kv_heads in (None, heads),
            f"num_key_value_heads={shown(kv_heads)} must be num_attention_heads={heads}: in "
            f"multi-head latent attention, each head has keys and values of its own",
        )
        rope_dim = file.size("qk_rope_head_dim")
        require(rope_dim % 2 == 0, f"qk_rope_head_dim={rope_dim} must be even, for RoPE")
        has_q_lora = file.get("q_lora_rank") is not None
        return cls(
            kv_lora_rank=file.size("kv_lora_rank"),
            qk_nope_head_dim=file.size("qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=file.size("v_head_dim"),
            q_lora_rank=file.size("q_lora_rank") if has_q_lora else None,
            rope_interleave=not file.has("rope_interleave") or file.flag("rope_interleave"),
        )

    @property
    def head_dim(self) -> int:
        """Size of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_heads(self) -> KVHeads:
        """The one key for all heads, of which the latent vector is also their value."""
        return KVHeads(1, self.kv_lora_rank + self.qk_rope_head_dim, num_stored=1)

    def attention_scale(self, rope: RopeConfig) -> float:
        """Return the factor of attention scores: 1 / sqrt(head_dim), with YaRN's factor squared.

        YaRN enlarges cos and sin, and so the scores, in a longer context. Here that would reach the
        rotated numbers of a head only. So files set `mscale_all_dim`, by which cos and sin are
        divided and whole queries and keys multiplied.
        """
        if rope.mscale_all_dim is None or rope.factor is None:
            return self.head_dim**-0.5
        return self.head_dim**-0.5 * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
