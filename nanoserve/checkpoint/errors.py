"""Error messages for checkpoints that cannot be read or do not match the model, with advice.

This module is imported only when there is an error to report.
"""

import logging
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.config_json import read_json
from nanoserve.checkpoint.packaged import BUNDLED, PACKAGED
from nanoserve.utils.checks import shown

logger = logging.getLogger(__name__)

_MAX_LIST = 250  # characters in a list of names
# A wrapper of a model prefixes the names of all tensors with its own attribute.
_WRAPPERS = {
    "module.": "saved from DistributedDataParallel",
    "_orig_mod.": "saved from torch.compile",
    "language_model.": "the text part of a multimodal model",
}


def describe_mismatches(
    expected: Mapping[str, Any], stored: Mapping[str, Any], optional: Collection[str]
) -> str:
    """Describe the tensors that are missing, unexpected, or of a different shape.

    `expected` and `stored` map names to shapes; `stored` may also have the `optional` names.
    """
    missing = sorted(expected.keys() - stored.keys())
    unexpected = sorted(stored.keys() - expected.keys() - set(optional))
    misshapen = [
        f"{name} is {shown(list(stored[name]))}, not {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    messages = [f"{kind}: {some(names)}" for kind, names in problems.items() if names]
    return "; ".join(_likely_cause(missing, stored) + messages)


def _likely_cause(missing: list[str], stored: Collection[str]) -> list[str]:
    """Describe the likely cause if most tensors have other names in the checkpoint."""
    # Three names are enough: a mixture of experts may lack a hundred thousand.
    prefix = next(filter(None, (_before(name, stored) for name in missing[:3])), "")
    if sum(prefix + name in stored for name in missing) > len(missing) / 2:
        how_many = "all" if all(name.startswith(prefix) for name in stored) else "many"
        why = [why for wrapper, why in _WRAPPERS.items() if wrapper in prefix]
        names = ": ".join([f"{how_many} names begin with {prefix!r}", *why])
        rename = f"{{name.removeprefix({prefix!r}): t for name, t in load_file(FILE).items()}}"
        return [f"{names}; strip it, with safetensors.torch: save_file({rename}, FILE)"]
    if sum(name.removeprefix("model.") in stored for name in missing) > len(missing) / 2:
        return [
            "the names lack 'model.', like the names of a base model without a head, such as an "
            "embedding model, which generates no text: use the ...ForCausalLM it was derived from"
        ]
    return []


def _before(name: str, stored: Collection[str]) -> str:
    """Return a short prefix under which `name` is stored, or ""."""
    long = (other for other in stored if other.endswith(f".{name}"))
    return next((p for p in (other.removesuffix(name) for other in long) if len(p) < 50), "")


def check_folder(path: Path) -> None:
    """Raise `ValueError` for a folder without a config; log a warning for one with an adapter."""
    if not (path / "config.json").is_file():
        raise ValueError(_describe_missing_config(path))
    logger.warning(
        "%s has an adapter_config.json next to the model: the adapter is not applied; to apply it, "
        "merge it into the model with peft's merge_and_unload() and save the result",
        path,
    )


def describe_missing_weights(path: Path) -> str:
    """Describe a folder with neither model.safetensors nor an index of several files."""
    if (path / "adapter_config.json").is_file():
        return _describe_adapter(path)
    problem = f"{path} is not a checkpoint: it has neither model.safetensors nor an index of shards"
    pickled = sorted(file.name for file in path.glob("*.bin"))
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if others:
        return (
            f"{problem}, but {some(others)}; if one is the complete model with the tensor names of "
            f"transformers, unlike consolidated.safetensors, rename it to model.safetensors"
        )
    if pickled:
        return (
            f"{problem}; {some(pickled)} are pickles, which may execute code: convert them "
            f"with transformers, {code_to_convert(str(path), str(path))}"
        )
    return problem


def code_to_convert(source: str, folder: str) -> str:
    """Return the line of code that converts a model to safetensors with transformers."""
    load = f"AutoModelForCausalLM.from_pretrained({source!r}, dtype='auto')"
    return f"`{load}.save_pretrained({folder!r})`"


def _describe_adapter(path: Path) -> str:
    adapter = read_json(path / "adapter_config.json")
    base = shown(adapter.get("base_model_name_or_path"))
    kind = "LoRA" if adapter.get("peft_type", "LORA") == "LORA" else "peft"
    return (
        f"{path} is a {kind} adapter of {base} (base_model_name_or_path): merge it into its base "
        f"with peft's merge_and_unload() and save the result"
    )


def _describe_missing_config(path: Path) -> str:
    """Describe a folder without config.json; one with GGUF files holds complete models."""
    if (path / "adapter_config.json").is_file():
        return _describe_adapter(path)
    files = sorted(file.name for file in path.glob("*.gguf"))
    advice = f"pass one of its files ({some(files)})" if files else "add the file name"
    return (
        f"{path} is not a checkpoint: it has no config.json; if it is a GGUF model, {advice}, "
        f"as in 'folder/model-Q4_K_M.gguf' or, on the Hub, 'organisation/model/model-Q4_K_M.gguf'"
    )


def some(names: list[str]) -> str:
    """Join the first names, up to `_MAX_LIST` characters, and add the number of the rest.

    A model with many experts has tens of thousands of names, and a damaged file may have long ones.
    """
    listed: list[str] = []
    for name in names:
        if listed and sum(map(len, listed)) + len(name) > _MAX_LIST:
            break
        listed.append(f"{name:.{_MAX_LIST}}")
    rest = len(names) - len(listed)
    return ", ".join(listed) + (f" and {rest} more" if rest else "")


_NEITHER = "is neither a folder nor a bundled checkpoint nor a GGUF file"
_FORM = (
    "nor can it be a Hub name, which is a str of the form 'organisation/model' or "
    "'organisation/model/file.gguf'"
)
# Beginning of a model's name -> the organisation that publishes it.
_ORGANISATIONS = {
    "deepseek": "deepseek-ai", "gemma": "google", "glm": "zai-org", "granite": "ibm-granite",
    "llama": "meta-llama", "meta-llama": "meta-llama",
    "minicpm": "openbmb", "mistral": "mistralai", "mixtral": "mistralai", "olmo": "allenai",
    "phi": "microsoft",
    "qwen": "Qwen", "qwq": "Qwen", "smollm": "HuggingFaceTB", "tinyllama": "TinyLlama",
}  # fmt: skip
_ADDRESS = re.compile(r"https?://|(www\.)?(huggingface\.co|hf\.co)/", re.IGNORECASE)
_ON_THE_HUB = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)"
    r"(?P<name>[\w.-]+/[\w.-]+)(?P<rest>.*)",
    re.IGNORECASE,
)
_LLAMA_CPP = re.compile(r"(?P<name>[\w.-]+/[\w.-]+):(?P<kind>[\w.-]+)")
_MAX_EXAMINED = 300  # characters of a name that are examined


def describe_unknown_name(name: str | Path) -> str:
    """Describe a name that is no folder, bundled checkpoint, GGUF file or model on the Hub."""
    text = str(name)
    problem = f"{shown(text)} {_NEITHER}"
    if os.path.isfile(os.path.expanduser(text)):
        return _describe_file(text)
    if _ADDRESS.match(text):
        return f"{shown(text)} is an address, not a model: {_of_address(text[:_MAX_EXAMINED])}"
    if text == "":
        return f"{problem}, {_FORM}: it is empty"
    is_file = text.endswith(".gguf") and text.count("/") < 2
    if is_file or text.startswith(("./", "../", "/", "~")):
        path = os.path.abspath(os.path.expanduser(text))
        return (
            f"{problem}: {path[:_MAX_EXAMINED]} does not exist; "
            f"for a model on the Hub, use 'organisation/model'"
        )
    advice = _suggest(name, text[:_MAX_EXAMINED])
    return f"{problem}, {_FORM}{advice and f': {advice}'}"


def _suggest(name: str | Path, text: str) -> str:
    """Suggest the name that was probably meant, or return ""."""
    if isinstance(name, Path):
        return "a Path is never looked up on the Hub: pass the name as a str"
    if tagged := _LLAMA_CPP.fullmatch(text):
        repository, kind = tagged["name"], tagged["kind"]
        return f"instead of {kind!r}, pass the file, as in '{repository}/model-{kind}.gguf'"
    if "/" in text:
        return ""
    if ":" in text:
        return "a Hub name has no ':'"
    names = (*BUNDLED, *PACKAGED)
    near = get_close_matches(text.lower().replace("_", "-"), names, n=1, cutoff=0.75)
    begins = [start for start in _ORGANISATIONS if text.lower().startswith(start)]
    if not near and begins and not text.endswith(".gguf"):
        near = [f"{_ORGANISATIONS[begins[0]]}/{text}"]
    if near:
        return f"did you mean {near[0]!r}?"
    return f"bundled: {', '.join(BUNDLED)}; in separate packages: {', '.join(PACKAGED)}"


def _of_address(text: str) -> str:
    """Return advice on the name to give instead of a web address."""
    found = _ON_THE_HUB.match(text)
    if found is None:
        return "download the model and pass its folder, or pass its Hub name"
    file = found["rest"].partition("?")[0].rpartition("/")[2]
    name = f"{found['name']}/{file}" if file.endswith(".gguf") else found["name"]
    return f"pass its Hub name, {name!r}"


def _describe_file(text: str) -> str:
    path = os.path.expanduser(text)
    with suppress(OSError), open(path, "rb") as content:
        if content.read(4) == b"GGUF":
            return f"{shown(text)} is in GGUF format, but its name must end in '.gguf': rename it"
    folder = os.path.dirname(os.path.abspath(path))
    return (
        f"{shown(text)} is a file, but a checkpoint is a folder or a file that ends in '.gguf': "
        f"if it belongs to a checkpoint, pass its folder, {folder!r}"
    )
