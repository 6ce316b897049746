"""Pooled rows become the result: they are cut, normalized, or turned into probabilities.

All of it is in float32 on the host: a result has some thousand numbers at most.
"""

from dataclasses import replace

import numpy as np

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.pooling_config import PoolingConfig
from nanoserve.pooling_params import PoolingParams
from nanoserve.utils.checks import require

_EPSILON = 1e-12  # as in torch.nn.functional.normalize: a vector of zeros stays one


def resolved(params: PoolingParams, model_config: ModelConfig) -> PoolingParams:
    """Return the parameters with the model's values for those that are None.

    `use_activation` is then for scores only. Raises `ValueError` for parameters that the model does
    not have.
    """
    pooling = model_config.pooling
    task = params.task
    if task is not None:
        own = "classify" if pooling.is_classifier else "embed"
        require(
            task.removeprefix("token_") == own,
            f"task={task!r}: {pooling.architecture} supports {own!r} and 'token_{own}'",
        )
    kind = params.pooling_type or pooling.pooling_type
    if task is not None:
        kind = "ALL" if task.startswith("token_") else kind
        require(
            kind != "ALL" or task.startswith("token_"),
            f"pooling_type='ALL' returns a row for each token, and task={task!r} one for the "
            f"prompt: use encode, or task='token_{task}'",
        )
    if pooling.is_classifier:
        return _for_scores(replace(params, pooling_type=kind), pooling)
    normalize, activates = params.normalize, params.use_activation
    require(
        None in (normalize, activates) or normalize == activates,
        f"normalize={normalize} contradicts use_activation={activates}, which is the same here",
    )
    if normalize is None:
        normalize = pooling.normalize if activates is None else activates
    _check_dimensions(params.dimensions, pooling, model_config.hidden_size)
    return replace(params, pooling_type=kind, normalize=normalize, use_activation=False)


def _for_scores(params: PoolingParams, pooling: PoolingConfig) -> PoolingParams:
    for name in ("normalize", "dimensions"):
        require(
            not getattr(params, name),
            f"{name}={getattr(params, name)} is for embeddings, and {pooling.architecture} returns "
            f"{len(pooling.labels)} scores: remove it",
        )
    return replace(params, normalize=False, use_activation=params.use_activation is not False)


def _check_dimensions(dimensions: int | None, pooling: PoolingConfig, most: int) -> None:
    if dimensions is None:
        return
    require(
        dimensions <= most,
        f"dimensions={dimensions} must be at most the model's {most}; omit it for all of them",
    )
    allowed = pooling.dimensions
    require(
        not allowed or dimensions in allowed,
        f"dimensions={dimensions} is not one of {list(allowed)}, for which "
        f"{pooling.architecture} was trained (matryoshka_dimensions)",
    )


def finished_result(params: PoolingParams, pooled: np.ndarray, activation: str) -> np.ndarray:
    """Return the result of a request, float32 [size], or [num_tokens, size] for ALL."""
    rows = pooled.astype(np.float32)
    if params.dimensions is not None:
        rows = rows[..., : params.dimensions]
    if params.normalize:
        norms = np.linalg.norm(rows, axis=-1, keepdims=True)
        rows = rows / np.maximum(norms, _EPSILON)
    return activated(rows, activation) if params.use_activation else rows


def activated(scores: np.ndarray, activation: str) -> np.ndarray:
    """Return scores as probabilities: "softmax" over the classes, "sigmoid" of each, or "none"."""
    if activation == "softmax":
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    if activation == "sigmoid":
        return np.exp(-np.logaddexp(0, -scores))
    return scores
