"""`EngineConfig` on the command line: its fields are the flags, under vLLM's names."""

from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from nanoserve.cli.parser import from_json, json_or_text, length_or_auto, whole_number
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
_IN_PROGRAMS_ONLY = ("model", "logits_processors")  # the latter are named here, not called
# vLLM's shorter spellings.
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
# Integers that vLLM reads with units: 1k, 1K, 2.5M.
_WITH_UNITS = {
    *("max_num_batched_tokens", "kv_cache_memory_bytes", "max_num_scheduled_tokens"),
    *("max_num_queued_tokens", "safetensors_prefetch_block_size"),
}
_AS_JSON = (
    *("speculative_config", "structured_outputs_config", "kv_events_config"),
    *("override_generation_config", "hf_overrides"),
)


def add_engine_flags(parser: ArgumentParser, but: Collection[str] = ()) -> None:
    """A flag for each option of the engine. What is not given is not in the namespace."""
    group = parser.add_argument_group(
        "engine", "as LLM(model, ...) takes them; the README says what each does"
    )
    for field in _options():
        if field.name in but:
            continue
        flags = _flags(field.name)
        told = "" if field.default is None else f"({field.default})"
        if _kind(field) is bool:
            action = BooleanOptionalAction
            group.add_argument(*flags, action=action, default=SUPPRESS, help=told)
        else:
            kind, shown = _kind(field), field.name.upper()
            group.add_argument(*flags, type=kind, default=SUPPRESS, metavar=shown, help=told)
    if "logits_processors" not in but:
        named = "module:name of each, see nanoserve.sampling.processors"
        group.add_argument(
            "--logits-processors", nargs="+", default=SUPPRESS, metavar="NAME", help=named
        )
    taken = {*but, *parser._option_string_actions}
    for name in {*FOREIGN, *RENAMED}:  # vLLM's, which are refused, or accepted, with a reason
        flags = _flags(name)
        if flags[0] in taken or name in but:
            continue
        if name.startswith(_SWITCHES) or name in _MORE_SWITCHES:
            action = BooleanOptionalAction
            group.add_argument(*flags, action=action, default=SUPPRESS, help=SUPPRESS)
        else:
            told: dict[str, Any] = {"default": SUPPRESS, "help": SUPPRESS}
            if name == "hf_token":  # alone, it is the one that was logged in with
                told |= {"nargs": "?", "const": True}
            group.add_argument(*flags, type=_hidden_kind(name), **told)


def engine_options(args: Namespace, but: Collection[str] = ()) -> dict[str, Any]:
    """Return the options that were given.

    A chat template is its text: its file may be on this machine alone.

    Raises `ValueError` for what is no chat template.
    """
    names = [*(field.name for field in _options()), "logits_processors", *FOREIGN, *RENAMED]
    given = {name: getattr(args, name) for name in names if name in args and name not in but}
    if given.get("chat_template") is not None:
        given["chat_template"] = load_chat_template(given["chat_template"])
    return given


def _options() -> list[Field[Any]]:
    return [field for field in fields(EngineConfig) if field.name not in _IN_PROGRAMS_ONLY]


def _kind(field: Field[Any]) -> Callable[[str], Any]:
    """What a flag's value is made with: the first type that is not None."""
    if field.name in _AS_JSON:
        return from_json
    if field.name == "max_model_len":
        return length_or_auto
    if field.name in _WITH_UNITS:
        return whole_number
    kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    return str if kinds[0] is Path else kinds[0]


def _hidden_kind(name: str) -> Callable[[str], Any]:
    """Read an option of vLLM's: an integer with a unit, JSON, or else a text."""
    return whole_number if name in _WITH_UNITS else json_or_text


def _flags(name: str) -> list[str]:
    return [f"--{name.replace('_', '-')}", *([_SHORT[name]] if name in _SHORT else [])]
