"""RMSNorm in plain torch, on the residual stream, and of a vector that several ranks share."""

import pytest
import torch
from torch import Tensor

from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.layers.sharded_norm import ShardedRMSNorm, norm_shards
from nanoserve.models.layers.tensor_parallel import TensorParallel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_stream_goes_on_as_the_sum_not_as_its_norm(dtype: torch.dtype) -> None:
    """In float32 a conversion to float32 copies nothing, and work in place reaches the caller."""
    x, residual = torch.tensor([[1.0, 2.0]], dtype=dtype), torch.tensor([[2.0, 2.0]], dtype=dtype)
    normed, total = TorchOps().add_rms_norm(x, residual, torch.ones(2, dtype=dtype), eps=0.0)
    assert total.tolist() == [[3.0, 4.0]]
    assert normed.float().tolist()[0] == pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5], rel=1e-2)


@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_four_ranks_normalise_a_vector_by_its_whole_mean(num_slices: int) -> None:
    """With fewer slices than ranks, as of KV heads, a slice is on several ranks."""
    eps, generator = 1e-2, torch.Generator().manual_seed(0)
    whole, weight = torch.rand(2, 5, 8, generator=generator)[:, :3].unbind()
    weight = weight[0]
    part = 8 // num_slices
    slices = [rank * num_slices // 4 for rank in range(4)]
    parts = [whole[:, part * i : part * (i + 1)] for i in slices]
    # What an all-reduce returns: the sum of what all ranks have passed.
    total = sum(x.square().mean(dim=-1, keepdim=True) for x in parts)
    expected = TorchOps().rms_norm(whole, weight, eps)
    for rank, x in enumerate(parts):
        context = LayerContext(parallel=ParallelContext(tp=_OneOfFour(rank, 4, total)))
        norm = ShardedRMSNorm(8, num_slices, eps, context)
        (tensor,) = norm.checkpoint_tensors("q_norm")
        assert (tensor.name, tensor.shape) == ("q_norm.weight", (8,))
        norm.weight.copy_(weight.narrow(tensor.dim, tensor.start, len(norm.weight)))
        (found,) = norm_shards([norm], [x])
        torch.testing.assert_close(found, expected.narrow(1, tensor.start, part))


class _OneOfFour(TensorParallel):
    """A rank for which `group` is the sum over all ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.group
