"""A model's name -> its `Checkpoint`: a folder on the disk, bundled, or from the Hugging Face hub.

Of a repository on the hub only what nanoserve reads is fetched: a few small files at first, and the
weights once nothing else can be refused.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from nanoserve.checkpoint.loader import INDEX, SINGLE_FILE, shard_names
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checks import require
from nanoserve.config import EngineConfig
from nanoserve.tiny_qwen3 import bundled_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A model or a tokenizer whose name has been looked up, once."""

    name: str | Path  # as the user gave it
    folder: Path  # with everything in it; of one from the hub, everything but the weights
    is_from_hub: bool
    config: EngineConfig

    @classmethod
    def find(
        cls, name: str | Path, config: EngineConfig, revision: str | None = None
    ) -> "Checkpoint":
        """A folder that exists wins, then a bundled name; then "organisation/model" is looked up on
        the hub, at `revision` (a branch, a tag or a commit).

        Raises `ValueError`, with what to do, for a name that is none of these and for a model that
        cannot be had from the hub.
        """
        folder = _local_folder(name)
        if folder is not None:
            require(
                revision is None,
                f"revision={revision!r} is a version on the hub, but {str(name)!r} is on the disk",
            )
            return cls(name, folder, is_from_hub=False, config=config)
        from nanoserve.checkpoint.hub import is_hub_name, snapshot

        require(
            is_hub_name(name),
            f"{str(name)!r} is neither a folder nor a bundled checkpoint, nor can it be a name on "
            f"the hub, which is a str of the form 'organisation/model'",
        )
        patterns = ["*.json", "*.jinja"] + ["*.py"] * config.trust_remote_code
        folder = snapshot(name, revision, patterns, config.download_dir)
        return cls(name, folder, is_from_hub=True, config=config)

    def model_config(self, supported: Collection[str]) -> ModelConfig:
        """What its `config.json` says; see `ModelConfig.from_checkpoint` for what is refused."""
        return ModelConfig.from_checkpoint(self.folder, self.config.dtype, supported)

    def fetch_weights(self) -> None:
        """Complete the folder, if it is one of the hub's and its weights are asked for.

        Only the files that the loader reads: repositories hold copies in other formats. Raises
        `ValueError` if there are none.
        """
        if not self.is_from_hub or self.config.load_format == "dummy":
            return
        folder, index = self.folder, self.folder / INDEX
        files = shard_names(index) if index.is_file() else [SINGLE_FILE]
        if not all((folder / file).is_file() for file in files):
            from nanoserve.checkpoint.hub import snapshot

            # The folder is called by the commit, so the weights are those of its config.json.
            cache = self.config.download_dir
            snapshot(self.name, folder.name, files, cache, are_weights=True)
        missing = [file for file in files if not (folder / file).is_file()]
        require(
            not missing,
            f"{self.name} has no {', '.join(missing)} on the hub or in the cache, and nothing but "
            f"safetensors is read: pickles (*.bin) may run code; save them anew with transformers",
        )


def _local_folder(name: str | Path) -> Path | None:
    if os.path.isdir(name):  # unlike Path.is_dir, it takes names that are too long for a file
        return Path(name)
    return bundled_checkpoint(name) if isinstance(name, str) else None
