"""What to say of checkpoints that cannot be read, or that are not what they say: and what to do.

Imported when there is something to say.
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.config_json import read_json
from nanoserve.utils.checks import shown

logger = logging.getLogger(__name__)

_MAX_LENGTH = 250  # characters of all names of a kind
# What wraps a model puts its own attribute before the names of all tensors.
_WRAPPERS = {
    "module.": "saved from DistributedDataParallel",
    "_orig_mod.": "saved from torch.compile",
    "language_model.": "the text part of a multimodal model",
}


def tell_misfits(
    expected: Mapping[str, Any], stored: Mapping[str, Any], optional: Collection[str]
) -> str:
    """Which tensors are missing, which unexpected, and which of another shape.

    `expected` maps names to shapes, and so does `stored`, which may have the `optional` ones too.
    """
    missing = sorted(expected.keys() - stored.keys())
    unexpected = sorted(stored.keys() - expected.keys() - set(optional))
    misshapen = [
        f"{name} is {shown(list(stored[name]))}, not {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    told = [f"{kind}: {some(names)}" for kind, names in problems.items() if names]
    return "; ".join(_guesses(missing, stored) + told)


def _guesses(missing: list[str], stored: Collection[str]) -> list[str]:
    """Why so many are missing: the file has them by another name."""
    # A few are enough to tell: of a mixture of experts, a hundred thousand may be missing.
    prefix = next(filter(None, (_before(name, stored) for name in missing[:3])), "")
    if sum(prefix + name in stored for name in missing) > len(missing) / 2:
        how_many = "all" if all(name.startswith(prefix) for name in stored) else "many"
        why = [why for wrapper, why in _WRAPPERS.items() if wrapper in prefix]
        told = ": ".join([f"{how_many} names begin with {prefix!r}", *why])
        rename = f"{{name.removeprefix({prefix!r}): t for name, t in load_file(FILE).items()}}"
        return [f"{told}; strip it, with safetensors.torch: save_file({rename}, FILE)"]
    if sum(name.removeprefix("model.") in stored for name in missing) > len(missing) / 2:
        return [
            "the names lack 'model.', as those of a base model without a head, such as an "
            "embedding model, which generates no text: take the ...ForCausalLM that it was made of"
        ]
    return []


def _before(name: str, stored: Collection[str]) -> str:
    """A short prefix with which it is stored."""
    long = (other for other in stored if other.endswith(f".{name}"))
    return next((p for p in (other.removesuffix(name) for other in long) if len(p) < 50), "")


def check_folder(path: Path) -> None:
    """Of one without a config, or with an adapter. Raises `ValueError` for the former."""
    if not (path / "config.json").is_file():
        raise ValueError(_tell_no_config(path))
    logger.warning(
        "%s has an adapter_config.json beside the model: the adapter is not applied; to have it "
        "applied, merge it into the model with peft's merge_and_unload() and save that",
        path,
    )


def tell_no_weights(path: Path) -> str:
    """Of a folder without model.safetensors, and without an index of several files."""
    if (path / "adapter_config.json").is_file():
        return _tell_adapter(path)
    told = f"{path} is no checkpoint: it has no model.safetensors and no index of one"
    pickled = sorted(file.name for file in path.glob("*.bin"))
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if others:
        return (
            f"{told}, but {some(others)}; if one is the whole model with transformers' names of "
            f"tensors, which consolidated.safetensors has not, call it model.safetensors"
        )
    if pickled:
        return (
            f"{told}; {some(pickled)} are pickles, which may run code: save them anew with "
            f"transformers, {save_anew(str(path), str(path))}"
        )
    return told


def save_anew(source: str, folder: str) -> str:
    """The line of code that makes safetensors of whatever transformers reads."""
    load = f"AutoModelForCausalLM.from_pretrained({source!r}, dtype='auto')"
    return f"`{load}.save_pretrained({folder!r})`"


def _tell_adapter(path: Path) -> str:
    adapter = read_json(path / "adapter_config.json")
    base = shown(adapter.get("base_model_name_or_path"))
    kind = "LoRA" if adapter.get("peft_type", "LORA") == "LORA" else "peft"
    return (
        f"{path} is a {kind} adapter of {base} (base_model_name_or_path): merge it into its base "
        f"with peft's merge_and_unload() and save that"
    )


def _tell_no_config(path: Path) -> str:
    """Of a folder; those of llama.cpp's models hold files that say everything themselves."""
    if (path / "adapter_config.json").is_file():
        return _tell_adapter(path)
    files = sorted(file.name for file in path.glob("*.gguf"))
    advice = f"give one of its files ({some(files)})" if files else "name the file as well"
    return (
        f"{path} is no checkpoint: it has no config.json; if it is a model in GGUF, {advice}, "
        f"as in 'folder/model-Q4_K_M.gguf' or, on the hub, 'organisation/model/model-Q4_K_M.gguf'"
    )


def some(names: list[str]) -> str:
    """The first of them. A model with many experts has tens of thousands; some files, long ones."""
    told: list[str] = []
    for name in names:
        if told and sum(map(len, told)) + len(name) > _MAX_LENGTH:
            break
        told.append(f"{name:.{_MAX_LENGTH}}")
    rest = len(names) - len(told)
    return ", ".join(told) + (f" and {rest} more" if rest else "")
