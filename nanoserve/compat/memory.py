"""Memory between two engines of one script."""

import gc
import sys


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Let go of what nobody holds any more, and of what torch keeps of a GPU for later.

    An engine leaves nothing else behind when it is closed or collected: no process group of this
    process, no module's global. `shutdown_ray` is vLLM's, and there is no Ray.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        from nanoserve.worker.cuda import Cuda

        # Under its lock: another thread's engine may be recording a graph.
        Cuda(torch.device("cuda", torch.cuda.current_device())).release_unused()
