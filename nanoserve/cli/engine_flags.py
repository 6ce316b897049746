"""Add the fields of `EngineConfig` to the command line, as flags under vLLM's names.

The help of a flag is the comment above its field in `nanoserve/config.py` (vLLM takes it from the
docstrings below its fields), so that there is no second description that could differ.
"""

import re
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from functools import cache
from inspect import getsource
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from nanoserve.cli.parser import (
    Words,
    from_json,
    json_or_text,
    length_or_auto,
    whole_number,
)
from nanoserve.compat.options import FOREIGN, RENAMED
from nanoserve.config import EngineConfig
from nanoserve.text.chat_template import load_chat_template

_SWITCHES = ("enable_", "disable_", "use_", "skip_", "calculate_", "fully_", "worker_use_")
_MORE_SWITCHES = {
    *("aggregate_engine_logging", "allow_deprecated_quantization", "cudagraph_metrics"),
    *("data_parallel_external_lb", "data_parallel_hybrid_lb", "dcp_q_replicate"),
    *("data_parallel_multi_port_external_lb", "eplb_log_balancedness", "engine_use_ray"),
    *("fail_on_environ_validation", "interleave_mm_strings", "jit_monitor_verbose"),
    *("kv_cache_metrics", "kv_sharing_fast_prefill", "language_model_only", "mm_encoder_only"),
    *("long_prefill_token_threshold_adaptive", "mm_device_do_normalize", "numa_bind"),
    *("ray_workers_use_nsight", "return_sampling_mask", "scheduler_reserve_full_isl"),
    *("sleep_mode_offload_cudagraph", "specialize_active_lora", "swa_bounded_replay"),
    *("tokens_only", "calculate_kv_scales"),
}
# Fields without a flag of their type: the model is positional, and processors are given by name.
_IN_PROGRAMS_ONLY = ("model", "logits_processors")
# vLLM's short flags.
_SHORT = {
    "quantization": "-q", "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp",
    "speculative_config": "-sc", "enable_expert_parallel": "-ep", "nnodes": "-n", "node_rank": "-r",
    "decode_context_parallel_size": "-dcp", "prefill_context_parallel_size": "-pcp",
    "data_parallel_size": "-dp", "data_parallel_rank": "-dpn", "data_parallel_start_rank": "-dpr",
    "data_parallel_size_local": "-dpl", "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp", "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph", "data_parallel_external_lb": "-dpe",
    "data_parallel_multi_port_external_lb": "-dpm", "compilation_config": "-cc",
    "attention_config": "-ac", "diffusion_config": "-dc", "optimization_level": "-O",
}  # fmt: skip
_NAME = re.compile(r"    ([a-z_]+): ")
_IN_BACKTICKS = re.compile(r"`([^`]+)`")
# Integers that may have a unit, as 1k, 1K or 2.5m, like in vLLM (`human_readable_int` in
# vllm/engine/arg_utils.py). So may max_model_len, which may also be "auto".
_WITH_UNITS = {
    *("max_num_batched_tokens", "kv_cache_memory_bytes", "max_num_scheduled_tokens"),
    *("max_num_queued_tokens", "safetensors_prefetch_block_size"),
}
_AS_JSON = (
    *("speculative_config", "structured_outputs_config", "kv_events_config"),
    *("kv_transfer_config", "kernel_config", "override_generation_config", "hf_overrides"),
    "pooler_config",
)


def add_engine_flags(parser: ArgumentParser, but: Collection[str] = ()) -> None:
    """Add a flag for each engine option. Flags not passed are absent from the namespace."""
    group = parser.add_argument_group(
        "engine",
        "Options of LLM(model, ...). --max-model-len, --max-num-batched-tokens and "
        "--kv-cache-memory-bytes take integers with a unit: 4k is 4000, 4.5k is 4500, 4K is 4096.",
    )
    help_of = option_help()
    for field in _options():
        if field.name in but:
            continue
        flags = _flags(field.name)
        text = help_of.get(field.name, "").replace("%", "%%")
        if _kind(field) is bool:
            action = BooleanOptionalAction
            group.add_argument(*flags, action=action, default=SUPPRESS, help=text)
        else:
            kind, shown = _kind(field), field.name.upper()
            group.add_argument(*flags, type=kind, default=SUPPRESS, metavar=shown, help=text)
    if "logits_processors" not in but:
        named = (
            "Logits processors of all requests, each as module:name; see "
            "nanoserve/sampling/processors.py. Default: none."
        )
        group.add_argument(
            "--logits-processors", action=Words, default=SUPPRESS, metavar="NAME", help=named
        )
    taken = {*but, *parser._option_string_actions}
    for name in {*FOREIGN, *RENAMED}:  # options of vLLM, rejected or accepted with an explanation
        flags = _flags(name)
        if flags[0] in taken or name in but:
            continue
        if name.startswith(_SWITCHES) or name in _MORE_SWITCHES:
            action = BooleanOptionalAction
            group.add_argument(*flags, action=action, default=SUPPRESS, help=SUPPRESS)
        else:
            settings: dict[str, Any] = {"default": SUPPRESS, "help": SUPPRESS}
            if name == "hf_token":  # without a value, it is the token of the last login
                settings |= {"nargs": "?", "const": True}
            group.add_argument(*flags, type=_hidden_kind(name), **settings)


@cache
def option_help() -> dict[str, str]:
    """Return the help of each option by name, from its comment in `EngineConfig` and its default.

    Options in backticks are written as flags. The help is empty if there is no source to read.
    """
    try:
        lines = getsource(EngineConfig).splitlines()
    except OSError:
        return {}
    defaults = {field.name: field.default for field in _options()}
    found: dict[str, str] = {}
    comment: list[str] = []
    for line in lines:
        name = _NAME.match(line)
        if line.startswith("    # "):
            comment.append(line.removeprefix("    # "))
            continue
        if name is not None and name[1] in defaults:
            text, default = " ".join(comment), defaults[name[1]]
            text = _IN_BACKTICKS.sub(
                lambda quoted: _flags(quoted[1])[0] if quoted[1] in defaults else quoted[1], text
            )
            found[name[1]] = text if default is None else f"{text} Default: {default}."
        comment = []
    return found


def engine_options(args: Namespace, but: Collection[str] = ()) -> dict[str, Any]:
    """Return the options that were passed, except the options named in `but`.

    A chat template is returned as a string, because its file may be only on this machine.

    Raises `ValueError` for a chat template that cannot be read.
    """
    names = [*(field.name for field in _options()), "logits_processors", *FOREIGN, *RENAMED]
    given = {name: getattr(args, name) for name in names if name in args and name not in but}
    if given.get("chat_template") is not None:
        given["chat_template"] = load_chat_template(given["chat_template"])
    return given


def _options() -> list[Field[Any]]:
    return [field for field in fields(EngineConfig) if field.name not in _IN_PROGRAMS_ONLY]


def _kind(field: Field[Any]) -> Callable[[str], Any]:
    """Return the function that reads a flag's value, by name or by the field's first type."""
    if field.name in _AS_JSON:
        return from_json
    if field.name == "max_model_len":
        return length_or_auto
    if field.name in _WITH_UNITS:
        return whole_number
    kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    return str if kinds[0] is Path else kinds[0]


def _hidden_kind(name: str) -> Callable[[str], Any]:
    """Return the function that reads vLLM's option as an integer with a unit, JSON or a string."""
    return whole_number if name in _WITH_UNITS else json_or_text


def _flags(name: str) -> list[str]:
    return [f"--{name.replace('_', '-')}", *([_SHORT[name]] if name in _SHORT else [])]
