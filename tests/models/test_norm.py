"""RMSNorm in plain torch, on the residual stream."""

import pytest
import torch

from nanoserve.models.layers.ops import TorchOps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_stream_goes_on_as_the_sum_not_as_its_norm(dtype: torch.dtype) -> None:
    """In float32 a conversion to float32 copies nothing, and work in place reaches the caller."""
    x, residual = torch.tensor([[1.0, 2.0]], dtype=dtype), torch.tensor([[2.0, 2.0]], dtype=dtype)
    normed, total = TorchOps().add_rms_norm(x, residual, torch.ones(2, dtype=dtype), eps=0.0)
    assert total.tolist() == [[3.0, 4.0]]
    assert normed.float().tolist()[0] == pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5], rel=1e-2)
