"""Outputs of pooling requests, with vLLM's classes, from those of the engine."""

import numpy as np
import torch

from nanoserve.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)


def pooled_of(output: RequestOutput) -> np.ndarray:
    """Return the result of a request; raise its error, or `RuntimeError` if it was aborted."""
    if output.error is not None:
        raise output.error
    if output.pooled is None:
        raise RuntimeError(f"request {output.request_id!r} was aborted before it had a result")
    return output.pooled


def pooling_output(output: RequestOutput) -> PoolingRequestOutput:
    data = PoolingOutput(torch.from_numpy(pooled_of(output)))
    return PoolingRequestOutput(output.request_id, data, *_of_request(output))


def embedding_output(output: RequestOutput) -> EmbeddingRequestOutput:
    embedding = EmbeddingOutput(pooled_of(output).tolist())
    return EmbeddingRequestOutput(output.request_id, embedding, *_of_request(output))


def classification_output(output: RequestOutput) -> ClassificationRequestOutput:
    probs = ClassificationOutput(pooled_of(output).tolist())
    return ClassificationRequestOutput(output.request_id, probs, *_of_request(output))


def _of_request(output: RequestOutput) -> tuple[list[int], bool, int | None]:
    return output.prompt_token_ids, output.finished, output.num_cached_tokens
