"""How much of a GPU's memory is left for KV blocks."""

from dataclasses import dataclass

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.worker.kv_cache import blocks_wanted

_GIB = 2**30
_PLENTY = 2**20  # KV blocks; it takes the brain half a second to number so many


@dataclass(frozen=True)
class GPUMemory:
    """Bytes of a GPU, measured when the weights were loaded and a worst-case step had been run."""

    total: int
    free: int  # with nothing but the weights loaded; other processes may hold some, too
    weights: int
    activations: int  # what a step of the worst case takes on top
    graphs: int
    libraries: int = 0  # of CUDA, beside torch's memory; `free` is without them already

    def num_kv_blocks(
        self, config: EngineConfig, model_config: ModelConfig, block_bytes: int
    ) -> int:
        """Return the usable blocks in this process's share of memory, `gpu_memory_utilization`.

        Other processes do not shrink the share: if what they hold is missing, this raises, and
        so it does if nothing is left. `ValueError` with the numbers and what to lower.
        """
        share = int(self.total * config.gpu_memory_utilization)
        taken = self.weights + self.activations + self.graphs + self.libraries
        told = (
            f"gpu_memory_utilization={config.gpu_memory_utilization} of {_gib(self.total)} is "
            f"{_gib(share)}; weights take {_gib(self.weights)}, a step of "
            f"max_num_batched_tokens={config.max_num_batched_tokens} and "
            f"max_num_seqs={config.max_num_seqs} {_gib(self.activations)}, CUDA graphs "
            f"{_gib(self.graphs)}, CUDA's libraries {_gib(self.libraries)}"
        )
        if share - taken < 2 * block_bytes:
            raise ValueError(
                f"no memory is left for KV blocks: {told}. Raise the first, or lower the next two"
            )
        # More than every running sequence at its full length only helps the prefix cache.
        wanted = max(blocks_wanted(config, model_config), _PLENTY)
        most = min(wanted, (2**31 - 1) // config.block_size - 1)  # slots are numbered in 32 bits
        num_blocks = min((share - taken) // block_bytes - 1, most)
        missing = (num_blocks + 1) * block_bytes + self.activations + self.graphs - self.free
        if missing > 0:
            raise ValueError(
                f"{_gib(missing)} are missing: {told}, so {num_blocks} KV blocks would fit, but "
                f"only {_gib(self.free)} are free. Other processes, other engines of this one, or "
                f"CUDA itself hold the rest; lower gpu_memory_utilization"
            )
        return num_blocks


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
