"""Release memory between two engines of one script."""

import gc
import sys


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage, and release the GPU memory that torch caches.

    An engine that is closed or collected leaves nothing else, i.e. no process group in this process
    and no global state. `shutdown_ray` is accepted because vLLM has it, and has no effect.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        from nanoserve.worker.cuda import Cuda

        # It takes a lock, because an engine in another thread may be capturing a graph.
        Cuda(torch.device("cuda", torch.cuda.current_device())).release_unused()
