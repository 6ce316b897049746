"""A model's name -> its `Checkpoint`: on the disk, bundled, in a package, or from the hub.

Of a repository on the hub only what nanoserve reads is fetched: a few small files at first, and the
weights once nothing else can be refused.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.checkpoint.gguf.container import GGUFFile
from nanoserve.checkpoint.hub import fetch_all_but_weights, fetch_weights
from nanoserve.checkpoint.model_config import ConfigFiles, ModelConfig, read_config_files
from nanoserve.checkpoint.overrides import config_with_overrides
from nanoserve.checkpoint.packaged import BUNDLED, packaged_file
from nanoserve.config import EngineConfig
from nanoserve.utils.checks import require

if TYPE_CHECKING:
    from nanoserve.checkpoint.gguf.container import GGUFFile


@dataclass(frozen=True)
class Checkpoint:
    """A model or a tokenizer that was looked up by its name, once.

    name: as the user gave it.
    folder: with everything in it; of one from the hub, everything but the weights. Or a GGUF file.
    download_dir: the cache of the hub's files; None is the hub's own.
    """

    name: str | Path
    folder: Path
    is_from_hub: bool = False
    download_dir: str | Path | None = None

    @classmethod
    def open(
        cls, name: str | Path, config: EngineConfig, revision: str | None = None
    ) -> "Checkpoint":
        """Find a checkpoint. A folder or a GGUF file that exists wins, then a bundled name, then
        that of a model in a package ("smollm2"); then "organisation/model" or
        "organisation/model/file.gguf" is looked up on the hub, at `revision` (a branch, a tag or a
        commit).

        Raises `ValueError`, with what to do, for a name that is none of these, for a package that
        is not installed and for a model that cannot be had from the hub.
        """
        folder = local_checkpoint(name)
        if folder is not None:
            require(
                revision is None,
                f"revision={revision!r} is a version on the hub, but {str(name)!r} is on the disk",
            )
            return cls(name, folder)
        folder = fetch_all_but_weights(name, revision, config)
        return cls(name, folder, is_from_hub=True, download_dir=config.download_dir)

    @cached_property
    def source(self) -> "Path | GGUFFile":
        """What the config and the tokenizer are read from: the folder, or the parsed GGUF file.

        Raises `ValueError` for a damaged GGUF file.
        """
        if not self.folder.is_file():
            return self.folder
        return GGUFFile.open(self.folder)

    @cached_property
    def config_files(self) -> ConfigFiles:
        """What `config.json` and `generation_config.json` say. Raises `ValueError` for a folder
        without the first one."""
        return read_config_files(self.source)

    def model_config(self, config: EngineConfig, supported: Collection[str]) -> ModelConfig:
        """Return what the config files say, with what `config` puts in their place.

        See `ModelConfig.from_files` for what is refused.
        """
        has_overrides = config.hf_overrides or config.override_generation_config
        if not has_overrides and config.generation_config == "auto":
            return ModelConfig.from_files(self.config_files, config.dtype, supported)
        return config_with_overrides(self.config_files, config, supported)

    def fetch_weights(self) -> None:
        """Complete the folder, if it is one of the hub's.

        Raises `ValueError` if there are none that can be read.
        """
        if self.is_from_hub:
            fetch_weights(str(self.name), self.folder, self.download_dir)


def local_checkpoint(name: str | Path) -> Path | None:
    """Return the folder or the GGUF file of a model on this machine, or None if there is none.

    Raises `ValueError` for a model in a package that is not installed.
    """
    # Unlike those of a Path, these take names that are too long for a file.
    path = os.path.expanduser(name)
    if os.path.isdir(path) or (path.endswith(".gguf") and os.path.isfile(path)):
        return Path(path)
    if not isinstance(name, str):
        return None
    if folder := bundled_checkpoint(name):
        return folder
    return packaged_file(name)


def bundled_checkpoint(name: str) -> Path | None:
    """Return the folder of a checkpoint that ships with the package, or None if no such one does.

    name: "tiny-qwen3", and "tiny-qwen3-draft", which drafts for it; a path is never taken for a
    bundled name.
    """
    folder = Path(__file__).with_name("tiny_qwen3") / BUNDLED.get(name, "")
    return folder if name in BUNDLED and (folder / "config.json").is_file() else None
