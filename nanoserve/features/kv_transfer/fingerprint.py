"""The fingerprint of an engine: all that K and V depend on besides tokens.

Engines with the same fingerprint may share KV blocks. It is computed from the content of the
weights' files, and not from their names or times: a copy of a model has the fingerprint of the
original, and a model that was replaced under its name has another one.
"""

import hashlib
import secrets
from dataclasses import fields
from pathlib import Path
from typing import Any

import xxhash

from nanoserve import __version__
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.weight_files import folder_files
from nanoserve.config import EngineConfig

_CHUNK = 2**24  # bytes
# Options that change K and V, or how a block holds them. Others, such as the attention backend,
# change their last bits at most: a block is what this engine could have computed elsewhere.
_OPTIONS = (
    *("quantization", "quantization_group_size", "quantization_activations"),
    *("kv_cache_dtype", "block_size", "batch_invariant", "device"),
    *("tensor_parallel_size", "pipeline_parallel_size", "disable_hybrid_kv_cache_manager"),
)


def fingerprint(config: EngineConfig, model_config: ModelConfig, path: Path) -> bytes:
    """Return 32 bytes that other processes compute for the same weights and options.

    path: the checkpoint's folder, or its GGUF file; all of its weights are read once. Random
    weights (`load_format="dummy"`) have a fingerprint of their own, which no other engine has.
    """
    weights = secrets.token_hex(16)
    if config.load_format != "dummy":
        weights = _weights_hash(path)
    options = [(name, str(getattr(config, name))) for name in _OPTIONS]
    model = [
        (field.name, getattr(model_config, field.name))
        for field in fields(model_config)
        if field.name != "default_sampling"
    ]
    parts: list[Any] = [__version__, weights, model, options]
    return hashlib.sha256(repr(parts).encode()).digest()


def _weights_hash(path: Path) -> str:
    files = [path] if path.is_file() else folder_files(path)
    digest = xxhash.xxh3_128()
    for file in files:
        with file.open("rb") as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
