"""The settings of linear attention in a GGUF file, of Qwen3-Next and Qwen3.5.

llama.cpp has names for them that come from Mamba: "ssm" is a state-space model.
"""

from typing import Any

from nanoserve.checkpoint.gguf.settings import Settings
from nanoserve.utils.checks import require, shown


def linear_settings(settings: Settings, num_layers: int) -> dict[str, Any]:
    """Return the entries of `config.json`.

    Raises `ValueError` for settings that are missing or contradict each other.
    """
    num_values, inner = settings.size("ssm.time_step_rank"), settings.size("ssm.inner_size")
    entry = settings.entry("ssm.inner_size", inner)
    require(inner % num_values == 0, f"{entry} must be a multiple of time_step_rank={num_values}")
    raw: dict[str, Any] = {
        "linear_num_key_heads": settings.size("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": settings.size("ssm.state_size"),
        "linear_value_head_dim": inner // num_values,
        "linear_conv_kernel_dim": settings.size("ssm.conv_kernel"),
    }
    every = settings.size("full_attention_interval", 4)
    flags = settings.left.pop("attention.recurrent_layers", None)
    if flags is None:
        return raw | {"full_attention_interval": every}
    is_list = isinstance(flags, list) and all(isinstance(flag, bool) for flag in flags)
    name = f"{settings.file.path}: {settings.name}.attention.recurrent_layers"
    require(
        is_list and len(flags) >= num_layers,
        f"{name}={shown(flags)} must be a list of true and false, one for each layer",
    )
    names = ("full_attention", "linear_attention")
    return raw | {"layer_types": [names[flag] for flag in flags[:num_layers]]}
