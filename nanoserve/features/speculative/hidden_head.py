"""A head drafts from the target's hidden state, without a second model or KV cache.

Token t + 1 was sampled from the hidden state at position t. From these two the head estimates the
hidden state at t + 1, from which the target's LM head computes the logits of the first draft token,
t + 2. The caller chooses that token, greedily or with the noise of its position, and its embedding
is the input of the next step. Predicting hidden states is the idea of EAGLE (Li et al. 2024,
arXiv 2401.15077). Keeping a single state, without attention to earlier tokens, is the idea of the
Recurrent Drafter (Cheng et al. 2024, arXiv 2403.09919).

    state = hidden                               # [num_rows, hidden_size]
    for _ in range(num_draft_tokens):
        state, drafted = head(state, embed(token_ids))
        token_ids = choose(lm_head(drafted))     # [num_rows]
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nanoserve.checkpoint.weight_files import open_weights
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoserve.models.layers.norm import RMSNorm
from nanoserve.utils.checks import check_int, json_object, require

_SHAPE = "shape"  # the key in the file's metadata
_MAX_SIZE = 1 << 20  # of either dimension: the metadata of a file is not trusted


class HiddenHead(nn.Module):
    """A recurrent head. It applies a SwiGLU block to [state, embedding] to get the next state.

    It has no residual connection, which did not improve a head trained in the same way.

    `hidden_size` is the target's. The embedding and the LM head are shared with the target, so the
    head has few weights: 5 x hidden_size x intermediate_size, and three norms.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, context: LayerContext, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.ops = context.ops
        # Hidden states and embeddings differ in magnitude; each is scaled to a root mean square
        # of 1.
        self.state_norm = RMSNorm(hidden_size, eps, context)
        self.embedding_norm = RMSNorm(hidden_size, eps, context)
        both = {"gate_up_proj": 2 * intermediate_size}
        self.gate_up_proj = ColumnParallelLinear(2 * hidden_size, both, context)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, context)
        # The LM head expects the output of the target's last norm: training starts from its weight.
        self.norm = RMSNorm(hidden_size, eps, context)

    def forward(self, state: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Return (next state, input of the LM head), each [num_rows, hidden_size].

        state: [num_rows, hidden_size], at first the target's hidden states after its last norm.
        embedding: the same shape, of the tokens that were chosen from them.
        """
        both = torch.cat((self.state_norm(state), self.embedding_norm(embedding)), dim=-1)
        state = self.down_proj(self.ops.act_and_mul(self.gate_up_proj(both), "silu"))
        return state, self.norm(state)

    def unroll(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Return the input of the LM head for each draft token when all tokens are known.

        hidden: [num_rows, hidden_size]; embeddings and result: [num_rows, num_draft_tokens,
        hidden_size]. A draft token can be accepted only if all before it were. So training and
        evaluation feed the known tokens, not the draft tokens.
        """
        drafted = []
        for embedding in embeddings.unbind(dim=1):
            hidden, for_lm_head = self(hidden, embedding)
            drafted.append(for_lm_head)
        return torch.stack(drafted, dim=1)

    def save(self, path: Path) -> None:
        """Write the weights in bfloat16, with their shape in the metadata."""
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in self.state_dict().items()}
        hidden_size, intermediate_size = self.down_proj.weight.shape
        shape = f'{{"hidden_size": {hidden_size}, "intermediate_size": {intermediate_size}}}'
        # One key only: safetensors writes several in any order, so that the bytes would differ.
        save_file(weights, path, {_SHAPE: shape})
        # safetensors makes the file readable by its owner alone; a package is read by every user.
        path.chmod(0o644)

    @classmethod
    def untrained(cls, hidden_size: int, intermediate_size: int, eps: float = 1e-6) -> "HiddenHead":
        """Return a head with initial weights in float32, to be trained."""
        head = cls(hidden_size, intermediate_size, LayerContext(), eps)
        for linear in (head.gate_up_proj, head.down_proj):
            nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5))  # as in nn.Linear
        for norm in (head.state_norm, head.embedding_norm, head.norm):
            nn.init.ones_(norm.weight)
        return head.requires_grad_(True)

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], context: LayerContext) -> "HiddenHead":
        """Return a head for inference.

        weights: from `read_head`. context: the device, and the linear method of the weights.
        """
        hidden_size, intermediate_size = weights["down_proj.weight"].shape
        head = cls(hidden_size, intermediate_size, context)
        head.load_state_dict(weights)
        for linear in (head.gate_up_proj, head.down_proj):
            linear.process_after_loading()
        return head.eval()


def read_head(path: Path) -> dict[str, Tensor]:
    """Return the weights, by name, of a file written by `HiddenHead.save`.

    Raises `ValueError` if the file is not a head, or has weights of unexpected names or shapes.
    """
    with open_weights(path) as file:
        metadata = file.metadata() or {}
        require(_SHAPE in metadata, f"{path} is not a head: it has no {_SHAPE!r} in its metadata")
        shape = json_object(metadata[_SHAPE].encode(), f"the shape in {path}")
        names = ("hidden_size", "intermediate_size")
        hidden_size, intermediate_size = (
            check_int(f"{path}: {name}", shape.get(name), 1, _MAX_SIZE) for name in names
        )
        # On the meta device: a shape that is far too large for the file must not take memory.
        meta = LayerContext(device=torch.device("meta"))
        head = HiddenHead(hidden_size, intermediate_size, meta)
        expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        require(
            found == expected,
            f"{path} has weights of shapes {found}, but its metadata requires {expected}",
        )
        return {name: file.get_tensor(name) for name in expected}
