"""Files of the Hugging Face hub, in the hub's own cache. What is there needs no network."""

from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoserve.checkpoint.gguf.container import parts_of
from nanoserve.checkpoint.misfits import save_anew
from nanoserve.checkpoint.names import tell_no_name
from nanoserve.checkpoint.shards import INDEX, shard_names
from nanoserve.checkpoint.weight_files import SINGLE_FILE
from nanoserve.config import EngineConfig
from nanoserve.utils.checks import require

_TIMEOUT = 10.0  # seconds that the hub has to answer; the cache is asked then
# Mistral's own tokenizer format, 15 MB beside the tokenizer.json that is read.
_NEVER = ["*/*", "tekken.json"]


def fetch_all_but_weights(name: str | Path, revision: str | None, config: EngineConfig) -> Path:
    """The folder of a model or a tokenizer at `revision`, with the small files that are read.

    Of "organisation/model/file.gguf" it is the file, with the weights in it. Raises `ValueError`
    for what cannot be a name on the hub, and when `_snapshot` does.
    """
    repository, file = name, ""
    if isinstance(name, str) and name.endswith(".gguf"):
        repository, _, file = name.rpartition("/")
    if not _is_hub_name(repository):
        raise ValueError(tell_no_name(name))
    if file:
        return _fetch_gguf(repository, file, revision, config.download_dir)
    patterns = ["*.json", "*.jinja"] + ["*.py"] * config.trust_remote_code
    return _snapshot(name, revision, patterns, config.download_dir)


def fetch_weights(name: str, folder: Path, cache: str | Path | None) -> None:
    """Complete a folder that `fetch_all_but_weights` has given.

    Only the files that the loader reads: repositories hold copies in other formats. Raises
    `ValueError` if there are none.
    """
    if folder.is_file():  # a GGUF is complete
        return
    index = folder / INDEX
    files = shard_names(index) if index.is_file() else [SINGLE_FILE]
    if not all((folder / file).is_file() for file in files):
        # The folder is called by the commit, so the weights are those of its config.json.
        _snapshot(name, folder.name, files, cache, are_weights=True)
    missing = [file for file in files if not (folder / file).is_file()]
    require(
        not missing,
        f"{name} has no {', '.join(missing)} on the hub or in the cache, and nothing but "
        f"safetensors is read: pickles (*.bin) may run code; save them anew with transformers, "
        f"{save_anew(name, 'FOLDER')}, and give FOLDER and tokenizer={name!r}",
    )


def _fetch_gguf(name: str, file: str, revision: str | None, cache: str | Path | None) -> Path:
    """The file, with the others of its model beside it if there are several."""
    files = parts_of(file)
    # They are patterns, too, of which this one would match others.
    require(not set(file) & set("*?["), f"{file!r} is no name of a file on the hub")
    folder = _snapshot(name, revision, files, cache, are_weights=True)
    missing = [part for part in files if not (folder / part).is_file()]
    require(not missing, f"{name} has no {', '.join(missing)} on the hub or in the cache")
    return folder / file


def _is_hub_name(name: str | Path) -> bool:
    """Whether it is a str of the form "organisation/model".

    Names without an organisation are not looked up: no model that nanoserve runs has one, and a
    misspelt folder should not wait for a network.
    """
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

    If the hub does not answer, it is what the cache has. Raises `ValueError`, with what to do, for
    a model that cannot be had: unknown, gated, without such a revision (a branch, a tag or a
    commit), or not cached and without a network.
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
