"""The embeddings that a step is given for some of its tokens, as tensors on the device."""

from typing import NamedTuple

from torch import Tensor, nn

from nanoserve.engine.prompt_embeds import StepEmbeds
from nanoserve.models.layers.context import LayerContext
from nanoserve.sampling.host_copies import to_device


class GivenEmbeddings(NamedTuple):
    """Embeddings [num_rows, hidden_size] of the tokens `indices`, int64 [num_rows], of a step."""

    indices: Tensor
    rows: Tensor

    @classmethod
    def of(cls, embeds: StepEmbeds, context: LayerContext) -> "GivenEmbeddings":
        """Send the embeddings of a step to the device."""
        indices, content = to_device(context.device, embeds.indices, embeds.rows)
        return cls(indices, content.view(context.dtype))

    def embed(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        """Return the embeddings of all tokens of the step, [num_tokens, hidden_size].

        Given rows replace what the model makes of placeholder ids. A model that scales its
        embeddings has a `scale_given` if transformers scales `inputs_embeds`, too.
        """
        scale = getattr(model.model, "scale_given", None)
        rows = self.rows if scale is None else scale(self.rows)
        return model.model.embed(input_ids).index_copy(0, self.indices, rows)
