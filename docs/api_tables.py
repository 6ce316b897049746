"""Tables of options and parameters, read from where they are defined."""

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from nanoserve.compat.options import FOREIGN, RENAMED, SPELLINGS
from nanoserve.compat.request_names import OF_VLLM
from nanoserve.compat.sampling import FOREIGN as FOREIGN_PARAMETERS
from nanoserve.config import EngineConfig
from nanoserve.sampling_params import SamplingParams

# Options that vLLM does not have. vLLM has all others, under the same name.
_OWN_OPTIONS = {
    *("num_kv_blocks", "prefix_cache_seed", "enable_prompt_tokens_details", "trace", "device"),
    "kv_offloading_path",
    *("num_threads", "priority_aging", "quantization_group_size", "capture_sampling"),
    "capture_mixed_steps",
    *("distributed_timeout_seconds", "worker_timeout_seconds", "quantization_activations"),
}
# Options that take a dictionary, whatever their annotation says.
DICTIONARIES = (
    *("speculative_config", "structured_outputs_config", "kv_events_config"),
    *("kv_transfer_config", "kernel_config"),
)
# Values that may have no effect.
_TEXTS = (
    *("auto", "generate", "none", "hf", "mp", "uni", "lazy", "cpu", "vllm", "linear", "native"),
    *("info", "balanced"),
)
_NEUTRAL = (False, True, 0, 1, *_TEXTS, "raw_logprobs")
# Fields of nanoserve's SamplingParams that vLLM's does not have.
_OURS_ALONE = {"logits_processors", "num_speculative_tokens"}


def sampling_parameters() -> list[tuple[str, str, str]]:
    """Return (name, default, meaning) of each field of `SamplingParams`, in docstring order."""
    described = descriptions(SamplingParams.__doc__ or "")
    defaults = {field.name: field.default for field in fields(SamplingParams)}
    names = sorted(defaults, key=lambda name: [*described, name].index(name))
    return [
        (f"`{name}`", f"`{getattr(defaults[name], 'name', defaults[name])}`", described[name])
        for name in names
    ]


def vllm_options() -> list[tuple[str, str, str]]:
    """Return (name, how it is handled, alternative) of each option of vLLM's `EngineArgs`."""
    ours = [field.name for field in fields(EngineConfig)]
    rows = [(name, "have", _spellings(name)) for name in ours if name not in _OWN_OPTIONS]
    rows += [(name, f"have, as `{own}`", "") for name, own in RENAMED.items()]
    for name, (accepts, instead) in FOREIGN.items():
        what = what_is_accepted(accepts)
        rows.append((name, what, instead))
    return [(f"`{name}`", what, text) for name, what, text in sorted(rows)]


def own_options() -> list[str]:
    """Return the options that vLLM does not have."""
    return [field.name for field in fields(EngineConfig) if field.name in _OWN_OPTIONS]


def vllm_parameters() -> list[tuple[str, str, str]]:
    """Return the same for the fields of vLLM's `SamplingParams`, current and former ones."""
    names = [field.name for field in fields(SamplingParams)]
    rows = [(name, "have", "") for name in names if name not in _OURS_ALONE]
    for name in OF_VLLM:
        instead, neutral = FOREIGN_PARAMETERS[name]
        values = ", ".join(f"`{value!r}`" for value in (None, *neutral))
        rows.append((name, f"rejected, except {values}", instead))
    return [(f"`{name}`", what, text) for name, what, text in sorted(rows)]


def what_is_accepted(accepts: Callable[[Any], bool]) -> str:
    if accepts(object()):
        return "accepted without effect"
    if accepts(1.5):
        return "a number is accepted without effect"
    if accepts({}) and accepts(""):
        return "rejected, unless it is empty"
    text = ", ".join(f"`{value!r}`" for value in _NEUTRAL if accepts(value))
    return f"rejected, except {text}"


def _spellings(name: str) -> str:
    text = [f"`{theirs!r}` is `{ours!r}`" for theirs, ours in SPELLINGS.get(name, {}).items()]
    return ", ".join(text)


def comments_of(config: type) -> dict[str, str]:
    """Return, by field, the comment beside it or directly above it."""
    lines = Path(inspect.getfile(config)).read_text("utf-8").splitlines()
    (body,) = (
        node.body
        for node in ast.parse("\n".join(lines)).body
        if isinstance(node, ast.ClassDef) and node.name == config.__name__
    )
    found: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign):
            beside = lines[node.lineno - 1].partition("  # ")[2]
            above, number = [], node.lineno - 2
            while lines[number].strip().startswith("# "):
                above.insert(0, lines[number].strip()[2:])
                number -= 1
            found[getattr(node.target, "id", "")] = " ".join([*above, beside]).strip()
    return found


def descriptions(docstring: str) -> dict[str, str]:
    """Return name and text of docstring entries like "top_p: only the ...", continued by indent."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in docstring.split("Order of operations")[0].splitlines():
        entry = re.match(r"    ([a-z_]+(?:, [a-z_]+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith("        ") and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif names and line.strip() == "":
            continue
    return found
