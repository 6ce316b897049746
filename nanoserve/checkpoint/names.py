"""Error messages for a name that is not a model, with suggestions.

This module is imported only when there is an error to report.
"""

import os
import re
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from nanoserve.checkpoint.packaged import BUNDLED, PACKAGED
from nanoserve.utils.checks import shown

_NEITHER = "is neither a folder nor a bundled checkpoint nor a GGUF file"
_FORM = (
    "nor can it be a name on the hub, which is a str of the form 'organisation/model' or "
    "'organisation/model/file.gguf'"
)
# Beginning of a model's name -> the organisation that publishes it.
_ORGANISATIONS = {
    "deepseek": "deepseek-ai", "gemma": "google", "llama": "meta-llama", "meta-llama": "meta-llama",
    "minicpm": "openbmb", "mistral": "mistralai", "mixtral": "mistralai", "phi": "microsoft",
    "qwen": "Qwen", "qwq": "Qwen", "smollm": "HuggingFaceTB", "tinyllama": "TinyLlama",
}  # fmt: skip
_ADDRESS = re.compile(r"https?://|(www\.)?(huggingface\.co|hf\.co)/", re.IGNORECASE)
_ON_THE_HUB = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)"
    r"(?P<name>[\w.-]+/[\w.-]+)(?P<rest>.*)",
    re.IGNORECASE,
)
_LLAMA_CPP = re.compile(r"(?P<name>[\w.-]+/[\w.-]+):(?P<kind>[\w.-]+)")
_MAX_LENGTH = 300  # characters of a name that are examined


def tell_no_name(name: str | Path) -> str:
    """Describe a name of no folder, bundled checkpoint, GGUF file or model on the hub."""
    text = str(name)
    problem = f"{shown(text)} {_NEITHER}"
    if os.path.isfile(os.path.expanduser(text)):
        return _tell_file(text)
    if _ADDRESS.match(text):
        return f"{shown(text)} is an address, not a model: {_of_address(text[:_MAX_LENGTH])}"
    if text == "":
        return f"{problem}, {_FORM}: it is empty"
    is_file = text.endswith(".gguf") and text.count("/") < 2
    if is_file or text.startswith(("./", "../", "/", "~")):
        path = os.path.abspath(os.path.expanduser(text))
        return (
            f"{problem}: {path[:_MAX_LENGTH]} does not exist; "
            f"for a model on the hub, give 'organisation/model'"
        )
    advice = _suggest(name, text[:_MAX_LENGTH])
    return f"{problem}, {_FORM}{advice and f': {advice}'}"


def _suggest(name: str | Path, text: str) -> str:
    """Suggest the name that was probably meant, or return ""."""
    if isinstance(name, Path):
        return "a Path is never looked up on the hub: give the name as a str"
    if tagged := _LLAMA_CPP.fullmatch(text):
        repository, kind = tagged["name"], tagged["kind"]
        return f"instead of {kind!r}, give the file, as in '{repository}/model-{kind}.gguf'"
    if "/" in text:
        return ""
    if ":" in text:
        return "a name on the hub has no ':'"
    names = (*BUNDLED, *PACKAGED)
    near = get_close_matches(text.lower().replace("_", "-"), names, n=1, cutoff=0.75)
    begins = [start for start in _ORGANISATIONS if text.lower().startswith(start)]
    if not near and begins and not text.endswith(".gguf"):
        near = [f"{_ORGANISATIONS[begins[0]]}/{text}"]
    if near:
        return f"did you mean {near[0]!r}?"
    return f"bundled are {', '.join(BUNDLED)}; in packages of their own, {', '.join(PACKAGED)}"


def _of_address(text: str) -> str:
    """Return advice on the name to give instead of a web address."""
    found = _ON_THE_HUB.match(text)
    if found is None:
        return "download the model and give its folder, or give its name on the hub"
    file = found["rest"].partition("?")[0].rpartition("/")[2]
    name = f"{found['name']}/{file}" if file.endswith(".gguf") else found["name"]
    return f"give its name on the hub, {name!r}"


def _tell_file(text: str) -> str:
    path = os.path.expanduser(text)
    with suppress(OSError), open(path, "rb") as content:
        if content.read(4) == b"GGUF":
            return f"{shown(text)} is in GGUF format, but its name must end in '.gguf': rename it"
    folder = os.path.dirname(os.path.abspath(path))
    return (
        f"{shown(text)} is a file, but a checkpoint is a folder or a file that ends in '.gguf': "
        f"if it belongs to a checkpoint, give its folder, {folder!r}"
    )
