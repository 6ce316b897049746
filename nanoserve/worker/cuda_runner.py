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
    cuda = cuda or Cuda(context.device)
    # What a stage receives and sends has not been part of a graph yet.
    is_capturable = context.attention.capturable and context.pp.num_stages == 1
    asked = config.speculative_config
    if asked is not None and not asked.enforce_eager:
        device = _guessing_device(config, context, cuda)
        return ModelRunner(config, model_config, path, context, device)
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


def _guessing_device(config: EngineConfig, context: LayerContext, cuda: Cuda) -> CudaDevice:
    from nanoserve.attention.triton import TritonAttention
    from nanoserve.worker.guess_graphs import GuessingDevice

    num_guesses = config.speculative_config.num_speculative_tokens
    require(
        context.attention.capturable and config.max_num_batched_tokens > num_guesses,
        f"speculative_config with enforce_eager=False records rows of {num_guesses + 1} tokens: "
        f"attention_backend={config.attention_backend!r} must be one that can be part of a CUDA "
        f"graph, and max_num_batched_tokens={config.max_num_batched_tokens} that large",
    )
    if isinstance(context.attention, TritonAttention):
        context.attention.longest_cut = num_guesses + 1
    return GuessingDevice(config, cuda, is_capturable=True)
