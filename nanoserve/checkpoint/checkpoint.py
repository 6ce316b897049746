"""Find a model by name: on disk, bundled, in a Python package, or on the Hugging Face Hub.

Only the files that nanoserve reads are downloaded from the Hub: first the small ones, and the
weights after everything else has been validated.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.checkpoint.config_json import architecture_of
from nanoserve.checkpoint.gguf.container import GGUFFile
from nanoserve.checkpoint.hub import fetch_all_but_weights, fetch_weights
from nanoserve.checkpoint.model_config import ConfigFiles, ModelConfig, read_config_files
from nanoserve.checkpoint.overrides import config_with_overrides
from nanoserve.checkpoint.packaged import BUNDLED, packaged_file
from nanoserve.checkpoint.pooling_config import only_pools
from nanoserve.config import EngineConfig
from nanoserve.utils.checks import require
from nanoserve.utils.registry import import_location

if TYPE_CHECKING:
    from nanoserve.checkpoint.gguf.container import GGUFFile


# Imported on first use: importing transformers takes seconds, and few engines pool.
_THROUGH_TRANSFORMERS = "nanoserve.checkpoint.transformers_config:transformers_model_config"
_FOR_POOLING = "nanoserve.checkpoint.pooling_model:pooling_model_config"


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of a model or a tokenizer, found once by name.

    name: as the user passed it.
    folder: a GGUF file, or the folder of all files, except weights that are still on the Hub.
    download_dir: cache for files from the Hub; None uses the Hugging Face cache.
    """

    name: str | Path
    folder: Path
    is_from_hub: bool = False
    download_dir: str | Path | None = None

    @classmethod
    def open(
        cls, name: str | Path, config: EngineConfig, revision: str | None = None
    ) -> "Checkpoint":
        """Find a checkpoint by name.

        The first match counts: an existing folder or GGUF file, a bundled name, the name of a
        model in a package ("smollm2"), and then "organisation/model" or
        "organisation/model/file.gguf" on the Hub, at `revision` (a branch, a tag or a commit).

        Raises `ValueError`, with advice, if the name is none of these, if the package is not
        installed, or if the model cannot be downloaded from the Hub.
        """
        folder = local_checkpoint(name)
        if folder is not None:
            require(
                revision is None,
                f"revision={revision!r} is a version on the Hub, but {str(name)!r} is on disk",
            )
            return cls(name, folder)
        folder = fetch_all_but_weights(name, revision, config)
        return cls(name, folder, is_from_hub=True, download_dir=config.download_dir)

    @cached_property
    def source(self) -> "Path | GGUFFile":
        """The source of the config and the tokenizer: the folder, or the parsed GGUF file.

        Raises `ValueError` for a damaged GGUF file.
        """
        if not self.folder.is_file():
            return self.folder
        return GGUFFile.open(self.folder)

    @cached_property
    def config_files(self) -> ConfigFiles:
        """The contents of `config.json` and `generation_config.json`.

        Raises `ValueError` for a folder without `config.json`.
        """
        return read_config_files(self.source)

    def model_config(self, config: EngineConfig, supported: Collection[str]) -> ModelConfig:
        """Return the settings of the config files, with the overrides of `config` applied.

        A model that pools (`runner`) has no LM head: see `nanoserve.checkpoint.pooling_model`. If
        `model_impl` says so, or if nanoserve has no class for the architecture, the model runs
        through transformers: see `nanoserve.checkpoint.transformers_config`. See also
        `ModelConfig.from_files` for the settings that are rejected.
        """
        named = architecture_of({**self.config_files.config, **(config.hf_overrides or {})})
        folder = None if self.folder.is_file() else self.folder
        pools = config.runner == "pooling"
        if pools or (config.runner == "auto" and only_pools(named, folder)):
            return import_location(_FOR_POOLING)(self.config_files, folder, config, supported)
        is_known = named in supported
        if config.model_impl == "transformers" or (config.model_impl == "auto" and not is_known):
            require(
                not self.folder.is_file(),
                f"model_impl={config.model_impl!r}: transformers does not run {self.folder}; use "
                "model_impl='nanoserve' for a GGUF file",
            )
            return import_location(_THROUGH_TRANSFORMERS)(self.config_files, config, supported)
        has_overrides = config.hf_overrides or config.override_generation_config
        if not has_overrides and config.generation_config == "auto":
            return ModelConfig.from_files(self.config_files, config.dtype, supported)
        return config_with_overrides(self.config_files, config, supported)

    def fetch_weights(self) -> None:
        """Download the weights into the folder if the checkpoint is from the Hub.

        Raises `ValueError` if the repository has no weights that can be read.
        """
        if self.is_from_hub:
            fetch_weights(str(self.name), self.folder, self.download_dir)


def local_checkpoint(name: str | Path) -> Path | None:
    """Return the folder or the GGUF file of a model on this machine, or None if there is none.

    Raises `ValueError` for a model in a package that is not installed.
    """
    # Unlike the methods of Path, these functions accept names that are too long for a file.
    path = os.path.expanduser(name)
    if os.path.isdir(path) or (path.endswith(".gguf") and os.path.isfile(path)):
        return Path(path)
    if not isinstance(name, str):
        return None
    if folder := bundled_checkpoint(name):
        return folder
    return packaged_file(name)


def bundled_checkpoint(name: str) -> Path | None:
    """Return the folder of a checkpoint that ships with nanoserve, or None if there is none.

    name: "tiny-qwen3", or "tiny-qwen3-draft", its draft model; a path is never taken for a bundled
    name.
    """
    folder = Path(__file__).with_name("tiny_qwen3") / BUNDLED.get(name, "")
    return folder if name in BUNDLED and (folder / "config.json").is_file() else None
