"""Translate vLLM's engine options to `EngineConfig`.

Every option of vLLM is known by name. Some have another name or other values here. For an option
that nanoserve does not have, a value that matches its behaviour is accepted, and any other value is
rejected with what to use instead. Silently ignoring an option would be worse than an error.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from nanoserve.compat.option_table import FOREIGN
from nanoserve.compat.speculation import own_options
from nanoserve.config import EngineConfig
from nanoserve.utils.checks import shown

logger = logging.getLogger(__name__)

# The name in vLLM or nano-vllm, and the name here.
RENAMED = {
    "num_gpu_blocks_override": "num_kv_blocks",
    "num_kvcache_blocks": "num_kv_blocks",
    "kvcache_block_size": "block_size",
    "device_memory_utilization": "gpu_memory_utilization",
}
# Values that are spelled differently here.
SPELLINGS: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    "attention_backend": {
        "FLASH_ATTN": "flash_attn",
        "TRITON_ATTN": "triton",
        "TORCH_SDPA": "torch",
        "CPU_ATTN": "auto",
    },
    "load_format": {"hf": "auto"},
    "model_impl": {"vllm": "nanoserve"},
    "distributed_executor_backend": {"uni": "mp"},
}
# Advice for values that are not supported here.
_ADVICE = {
    ("load_format", "pt"): "pickles may run code: save the model as safetensors",
    ("load_format", "gguf"): "pass the file itself as model: LLM('folder/model-Q4_K_M.gguf')",
    ("load_format", "sharded_state"): "each rank reads its shard of an ordinary checkpoint",
    ("load_format", "mistral"): "use the repository's files in Hugging Face's format",
    ("load_format", "bitsandbytes"): "bitsandbytes checkpoints are read with load_format='auto'",
    ("attention_backend", "FLASHINFER"): "use 'triton' or 'flash_attn'",
    ("distributed_executor_backend", "external_launcher"): "use 'mp' or 'ray' to start ranks",
    ("kv_cache_dtype", "fp8_e5m2"): "use 'fp8', which is e4m3 with a scale per token and head",
}


# Names in other engines, and the name here.
_LIKE = {
    "torch_dtype": "dtype",
    "n_ctx": "max_model_len",
    "max_seq_len": "max_model_len",
    "context_length": "max_model_len",
    "n_batch": "max_num_batched_tokens",
    "max_batch_size": "max_num_seqs",
    "max_running_requests": "max_num_seqs",
    "n_threads": "num_threads",
    "n_gpu_layers": "device",
    "device_map": "device",
    "cache_dir": "download_dir",
    "load_in_4bit": "quantization",
    "load_in_8bit": "quantization",
    "attn_implementation": "attention_backend",
    "mem_fraction_static": "gpu_memory_utilization",
    "tp_size": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "dp": "data_parallel_size",
    "token": "hf_token",
    "local_files_only": "the environment variable HF_HUB_OFFLINE=1",
}


def engine_config(model: str | Path, options: Mapping[str, Any]) -> EngineConfig:
    """Return the `EngineConfig` for options of `LLM`, including vLLM's; None is "not given".

    Raises `ValueError` for a name that neither nanoserve nor vLLM has, with similar names; for an
    option of vLLM with a value that is not supported, with what to use instead; and for a value out
    of range.
    """
    name = str(model)
    if isinstance(model, Path) and not name.startswith(("/", ".", "~")):
        name = f"./{name}"  # a Path is never a name on the Hub
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("max_model_len") in (-1, "auto"):
        del given["max_model_len"]
    translated = _translate(given)
    speculative = translated.get("speculative_config")
    if isinstance(speculative, Mapping):
        translated["speculative_config"] = own_options(speculative)
    if translated.get("logits_processors"):
        make = partial(EngineConfig, name)
        translated["logits_processors"] = _processors(make, translated)
    return EngineConfig(name, **translated)


def _translate(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under the names, and with the spelling of values, of `EngineConfig`."""
    known = {field.name for field in fields(EngineConfig)} - {"model"}
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in FOREIGN:
            _accept(name, value)
            continue
        ours = RENAMED.get(name, name)
        if ours not in known:
            raise ValueError(_unknown(name, known))
        if ours != name and ours in given:
            raise ValueError(
                f"{name}={shown(value)} means {ours}, which is set as well; remove one"
            )
        options[ours] = _spelled(ours, value)
    return options


def _accept(name: str, value: Any) -> None:
    """Log that an option of vLLM has no effect; raise `ValueError` if its value should have one."""
    accepts, instead = FOREIGN[name]
    text = "..." if name == "hf_token" else shown(value)  # a token is a secret
    if not accepts(value):
        raise ValueError(f"{name}={text} is vLLM's and not supported here: {instead}")
    logger.info("%s=%s has no effect here: %s", name, text, instead)


def _unknown(name: str, known: Collection[str]) -> str:
    names = {*known, *FOREIGN, *RENAMED}
    if name in _LIKE:
        return f"unknown option {name!r}: did you mean {_LIKE[name]}?"
    near = _of_the_same_words(name, names) or get_close_matches(name, sorted(names), cutoff=0.7)
    if not near:
        return f"unknown option {name!r}; known options are {sorted(known)}"
    return f"unknown option {name!r}: did you mean {' or '.join(near[:3])}?"


def _of_the_same_words(name: str, names: Collection[str]) -> list[str]:
    """Return the names with the same number of words, each beginning like the word in `name`.

    An example is "gpu_memory_utilization" for "gpu_mem_utilization".
    """
    words = name.lower().replace("-", "_").split("_")
    found = []
    for one in sorted(names):
        others = one.split("_")
        pairs = zip(words, others, strict=False)
        if len(words) == len(others) and all(a.startswith(b[:3]) for a, b in pairs):
            found.append(one)
    return found


def _spelled(name: str, value: Any) -> Any:
    """Return a value in the spelling of `EngineConfig`; a data type may be torch's."""
    if name == "dtype" and type(value).__name__ == "dtype":
        value = str(value).removeprefix("torch.")
    spellings = SPELLINGS.get(name, {})
    if isinstance(value, str):
        instead = _ADVICE.get((name, value))
        if instead is not None:
            raise ValueError(f"{name}={value!r} is vLLM's and not supported here: {instead}")
        return spellings.get(value, value)
    return value


def _processors(make_config: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Return the logits processors, with vLLM classes wrapped as processors of all rows."""
    given = options["logits_processors"]
    if not isinstance(given, (list, tuple)) or all(map(_is_plain, given)):
        return given
    from nanoserve.compat.logits_processors import VllmProcessor, load

    if options.get("speculative_config") is not None:
        raise ValueError(
            "logits_processors that are vLLM classes do not support draft tokens; remove "
            "speculative_config, or pass callables (logits, states), see "
            "nanoserve.sampling.processors"
        )
    others = {name: value for name, value in options.items() if name != "logits_processors"}
    make = partial(VllmProcessor, vllm_config=make_config(**others))
    loaded = map(load, given)
    return tuple(make(entry) if isinstance(entry, type) else entry for entry in loaded)


def _is_plain(processor: Any) -> bool:
    return callable(processor) and not isinstance(processor, type)
