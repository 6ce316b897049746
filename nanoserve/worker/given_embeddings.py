"""The forward pass of a step that is given the embeddings of some of its tokens."""

import torch
from torch import Tensor, nn

from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.engine.prompt_embeds import StepEmbeds
from nanoserve.models.layers.context import LayerContext
from nanoserve.sampling.host_copies import to_device
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cpu_device import Computation, Forward


def forward_with(embeds: StepEmbeds, computation: Computation, context: LayerContext) -> Forward:
    """Return the forward pass of a step with these embeddings, which are sent to the device now."""
    indices, content = to_device(context.device, embeds.indices, embeds.rows)
    rows, model = content.view(context.dtype), computation.model

    def forward(tensors: BatchTensors, header: BatchHeader, block_tables: Tensor) -> Tensor:
        metadata = tensors.attention_metadata(header, block_tables)
        input_ids = tensors.input_ids[: header.num_tokens]
        hidden = embed(model, input_ids, indices, rows)
        return model(input_ids, computation.kv_caches, metadata, hidden)

    return forward


def embed(model: nn.Module, input_ids: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """Return the embeddings of all tokens of a step, [num_tokens, hidden_size].

    `rows` [num_rows, hidden_size] replace what the model makes of the placeholders `indices`. A
    model that scales its embeddings has a `scale_given` if transformers scales `inputs_embeds`,
    too.
    """
    scale = getattr(model.model, "scale_given", None)
    hidden: Tensor = model.model.embed(input_ids)
    return torch.index_copy(hidden, 0, indices, rows if scale is None else scale(rows))
