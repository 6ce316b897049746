"""Download files from the Hugging Face Hub into its cache. Cached files need no network."""

from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoserve.checkpoint.errors import code_to_convert, describe_unknown_name
from nanoserve.checkpoint.gguf.container import parts_of
from nanoserve.checkpoint.weight_files import INDEX, SINGLE_FILE, shard_names
from nanoserve.config import EngineConfig
from nanoserve.utils.checks import require

_TIMEOUT = 10.0  # seconds to wait for the Hub; after that the cache is used
# Files in folders are other formats of the model, but for 1_Pooling/config.json of
# sentence-transformers. tekken.json is Mistral's own tokenizer format, 15 MB; tokenizer.json is
# read instead.
_NEVER = ["[!1]*/*", "tekken.json"]


def fetch_all_but_weights(name: str | Path, revision: str | None, config: EngineConfig) -> Path:
    """Download the small files of a model or tokenizer at `revision`, and return their folder.

    For "organisation/model/file.gguf", return the file, which includes the weights. Raises
    `ValueError` for a name that the Hub cannot have, and when `_snapshot` does.
    """
    repository, file = name, ""
    if isinstance(name, str) and name.endswith(".gguf"):
        repository, _, file = name.rpartition("/")
    if not isinstance(name, str) or not _is_hub_name(str(repository)):
        raise ValueError(describe_unknown_name(name))
    if file:
        return _fetch_gguf(str(repository), file, revision, config.download_dir)
    patterns = ["*.json", "*.jinja"] + ["*.py"] * config.trust_remote_code
    return _snapshot(name, revision, patterns, config.download_dir)


def fetch_weights(name: str, folder: Path, cache: str | Path | None) -> None:
    """Download the weights into a folder that `fetch_all_but_weights` has returned.

    Only the files that the loader reads are downloaded: repositories hold copies in other formats.
    Raises `ValueError` if there are none.
    """
    if folder.is_file():  # a GGUF file is complete
        return
    index = folder / INDEX
    files = shard_names(index) if index.is_file() else [SINGLE_FILE]
    if not all((folder / file).is_file() for file in files):
        # The folder is named after the commit, so config.json and the weights match.
        _snapshot(name, folder.name, files, cache, are_weights=True)
    missing = [file for file in files if not (folder / file).is_file()]
    require(
        not missing,
        f"{name} has no {', '.join(missing)} on the Hub or in the cache. Only safetensors is "
        f"supported (pickle files may execute code). Convert it with transformers: "
        f"{code_to_convert(name, 'FOLDER')}. Then load model='FOLDER', tokenizer={name!r}.",
    )


def _fetch_gguf(name: str, file: str, revision: str | None, cache: str | Path | None) -> Path:
    """Return the path of the file; all parts of a split model are downloaded next to it."""
    files = parts_of(file)
    # The names are passed as patterns, and wildcards would match other files.
    require(not set(file) & set("*?["), f"{file!r} is not the name of a file on the Hub")
    folder = _snapshot(name, revision, files, cache, are_weights=True)
    missing = [part for part in files if not (folder / part).is_file()]
    require(not missing, f"{name} has no {', '.join(missing)} on the Hub or in the cache")
    return folder / file


def _is_hub_name(name: str) -> bool:
    """Return True if `name` has the form "organisation/model".

    Names without an organisation are not looked up: no model that nanoserve runs has one, and a
    misspelt folder should not wait for the network.
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
    """Return the cache's folder of one version, with the Hub's files that match `patterns`.

    If the Hub does not answer, the folder has the files that are cached. Raises `ValueError`, with
    advice, for a model that is unknown, gated, without such a revision (a branch, a tag or a
    commit), or not cached and without a network.
    """
    from huggingface_hub import snapshot_download

    no_answer = _query_hub(name, revision)
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
    except Exception as error:  # from the Hub, the network or the disk
        # A cache filled by another program may lack small files that match but are not needed.
        partial = getattr(error, "snapshot_path", None)
        if partial is None or are_weights:
            raise ValueError(_advice(no_answer or error, name, revision)) from (no_answer or error)
        folder = partial
    return Path(folder)


def _query_hub(name: str, revision: str | None) -> Exception | None:
    """Return the error of a query for this model on the Hub, or None if it succeeds.

    `snapshot_download` sends the same query, but without a timeout.
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
        return f"{name} has no revision {revision!r} on the Hub"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name!r} is neither a folder nor a bundled checkpoint, and the Hub has no such "
            f"model; if the model is private, {log_in}"
        )
    reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
    return (
        f"{name!r} is neither a folder nor a bundled checkpoint, and cannot be downloaded from the "
        f"Hub: {reason}; without a network, use a folder or a model that is in the cache"
    )


class _NoBar(tqdm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})
