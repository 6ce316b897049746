"""A model's name -> its `Checkpoint`: on the disk, bundled, in a package, or from the hub.

Of a repository on the hub only what nanoserve reads is fetched: a few small files at first, and the
weights once nothing else can be refused.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checks import require
from nanoserve.config import EngineConfig
from nanoserve.tiny_qwen3 import BUNDLED


@dataclass(frozen=True)
class Checkpoint:
    """A model or a tokenizer whose name has been looked up, once."""

    name: str | Path  # as the user gave it
    # With everything in it; of one from the hub, everything but the weights. Or a file: a GGUF.
    folder: Path
    is_from_hub: bool
    config: EngineConfig

    @classmethod
    def find(
        cls, name: str | Path, config: EngineConfig, revision: str | None = None
    ) -> "Checkpoint":
        """A folder or a GGUF file that exists wins, then a bundled name, then that of a model in a
        package ("smollm2"); then "organisation/model" or "organisation/model/file.gguf" is looked
        up on the hub, at `revision` (a branch, a tag or a commit).

        Raises `ValueError`, with what to do, for a name that is none of these, for a package that
        is not installed and for a model that cannot be had from the hub.
        """
        folder = local_checkpoint(name)
        if folder is not None:
            told = (
                f"revision={revision!r} is a version on the hub, but {str(name)!r} is on the disk"
            )
            require(revision is None, told)
            return cls(name, folder, is_from_hub=False, config=config)
        from nanoserve.checkpoint.hub import fetch_all_but_weights

        folder = fetch_all_but_weights(name, revision, config)
        return cls(name, folder, is_from_hub=True, config=config)

    def model_config(self, supported: Collection[str]) -> ModelConfig:
        """What its `config.json` says; see `ModelConfig.from_checkpoint` for what is refused."""
        config = self.config
        if (
            config.hf_overrides
            or config.override_generation_config
            or (config.generation_config != "auto")
        ):
            from nanoserve.checkpoint.overrides import read_with_overrides

            return read_with_overrides(self.folder, config, supported)
        return ModelConfig.from_checkpoint(self.folder, self.config.dtype, supported)

    def fetch_weights(self) -> None:
        """Complete the folder, if it is one of the hub's and its weights are asked for.

        Raises `ValueError` if there are none that can be read.
        """
        if self.is_from_hub and self.config.load_format != "dummy":
            from nanoserve.checkpoint.hub import fetch_weights

            fetch_weights(self.name, self.folder, self.config.download_dir)


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
    from nanoserve.checkpoint.packaged import packaged_file

    return packaged_file(name)


def bundled_checkpoint(name: str) -> Path | None:
    """The folder of a checkpoint that ships with the package, or None if no such one does.

    name: "tiny-qwen3", and "tiny-qwen3-draft", which guesses for it; a path is never taken for a
    bundled name.
    """
    folder = Path(__file__).parents[1] / "tiny_qwen3" / BUNDLED.get(name, "")
    return folder if name in BUNDLED and (folder / "config.json").is_file() else None
