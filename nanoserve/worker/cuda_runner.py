"""The runner of a GPU, with what the configuration adds to it."""

from pathlib import Path

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checks import require
from nanoserve.config import EngineConfig
from nanoserve.layers.context import LayerContext
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.cuda_device import CudaDevice
from nanoserve.worker.model_runner import ModelRunner


def make_cuda_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    path: Path,
    context: LayerContext,
    cuda: Cuda | None = None,
) -> ModelRunner:
    """A runner on the GPU of `context`, or on `cuda` in its place.

    Raises `ValueError` if a graph is asked for that attention cannot be part of.
    """
    cuda, is_capturable = cuda or Cuda(context.device), context.attention.capturable
    if not config.capture_sampling:
        device = CudaDevice(config, cuda, is_capturable)
        return ModelRunner(config, model_config, path, context, device)
    from nanoserve.worker.captured_sampling import CapturingDevice, CapturingRunner

    require(
        is_capturable,
        f"capture_sampling=True, but attention_backend={config.attention_backend!r} cannot be part "
        f"of a CUDA graph: choose another, or leave capture_sampling off",
    )
    device = CapturingDevice(config, cuda, is_capturable)
    return CapturingRunner(config, model_config, path, context, device)
