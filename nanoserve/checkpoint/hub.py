"""A model's name -> its folder: on the disk, bundled, or a snapshot of the Hugging Face hub.

Of a repository on the hub only what nanoserve reads is fetched, into the hub's own cache: a few
small files at first, and the weights once nothing else can be refused. What is in the cache needs
no network.
"""

import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoserve.checkpoint.loader import INDEX, SINGLE_FILE, shard_names
from nanoserve.config import EngineConfig, require
from nanoserve.tiny_qwen3 import bundled_checkpoint

_TIMEOUT = 10.0  # seconds that the hub has to answer; the cache is asked then
# Mistral's own tokenizer format, 15 MB beside the tokenizer.json that is read.
_NEVER = ["*/*", "tekken.json"]


def checkpoint_folder(name: str | Path, config: EngineConfig, revision: str | None = None) -> Path:
    """The folder of a model or a tokenizer, with everything in it but the weights.

    A folder that exists wins, then a bundled name; then "organisation/model" is looked up on the
    hub, at `revision` (a branch, a tag or a commit). Names without an organisation are not looked
    up: no model that nanoserve runs has one, and a misspelt folder should not wait for a network.

    Raises `ValueError`, with what to do, for a name that is none of these, and for a model that
    cannot be had: unknown, gated, without such a revision, or not cached and without a network.
    """
    folder = _local_folder(name)
    if folder is not None:
        require(
            revision is None,
            f"revision={revision!r} is a version on the hub, but {str(name)!r} is on the disk",
        )
        return folder
    require(
        _is_hub_name(name),
        f"{str(name)!r} is neither a folder nor a bundled checkpoint, nor can it be a name on the "
        f"hub, which is a str of the form 'organisation/model'",
    )
    patterns = ["*.json", "*.jinja"] + ["*.py"] * config.trust_remote_code
    return _snapshot(name, revision, patterns, config.download_dir)


def fetch_weights(name: str | Path, folder: Path, config: EngineConfig) -> None:
    """Complete the folder that `checkpoint_folder` gave for a name of the hub.

    Only the files that the loader reads: repositories hold copies in other formats.
    """
    if config.load_format == "dummy" or _local_folder(name) is not None:
        return
    index = folder / INDEX
    files = shard_names(index) if index.is_file() else [SINGLE_FILE]
    if not all((folder / file).is_file() for file in files):
        _snapshot(name, folder.name, files, config.download_dir, are_weights=True)
    missing = [file for file in files if not (folder / file).is_file()]
    require(
        not missing,
        f"{name} has no {', '.join(missing)} on the hub or in the cache, and nothing but "
        f"safetensors is read: pickles (*.bin) may run code; save them anew with transformers",
    )


def _local_folder(name: str | Path) -> Path | None:
    if os.path.isdir(name):  # unlike Path.is_dir, it takes names that are too long for a file
        return Path(name)
    return bundled_checkpoint(name) if isinstance(name, str) else None


def _is_hub_name(name: str | Path) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def _snapshot(
    name: str,
    revision: str | None,
    patterns: list[str],
    cache: str | Path | None,
    are_weights: bool = False,
) -> Path:
    """The cache's folder of one version, completed by the hub's files that match `patterns`.

    If the hub does not answer, it is what the cache has.
    """
    from huggingface_hub import snapshot_download

    no_answer = _ask(name, revision)
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache,
            allow_patterns=patterns,
            ignore_patterns=_NEVER,
            local_files_only=no_answer is not None,
            tqdm_class=None if are_weights else _NoBar,
        )
    except Exception as error:  # of the hub, of the network or of the disk
        # Who filled the cache may have left out small files that match and that nobody needs.
        partial = getattr(error, "snapshot_path", None)
        if partial is None or are_weights:
            raise ValueError(_advice(no_answer or error, name, revision)) from (no_answer or error)
        folder = partial
    return Path(folder)


def _ask(name: str, revision: str | None) -> Exception | None:
    """Why the hub does not tell of this model; None if it does.

    `snapshot_download` asks as well, but would wait for a silent hub for ever.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, revision=revision, timeout=_TIMEOUT)
    except Exception as error:
        return error
    return None


def _advice(error: Exception, name: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    log_in = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name}, then {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision!r} on the hub"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name!r} is neither a folder nor a bundled checkpoint, and the hub has no such "
            f"model; if it is a private one, {log_in}"
        )
    reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
    return (
        f"{name!r} is neither a folder nor a bundled checkpoint, and cannot be had from the hub: "
        f"{reason}; without a network, give a folder or what is in the cache already"
    )


class _NoBar(tqdm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})
