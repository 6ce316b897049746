"""Functions that run on every rank of an engine, by name: see `LLM.collective_rpc`.

A function is registered by its location, because each rank imports it. It is called between two
steps as `function(runner, *args, **kwargs)` with the rank's `ModelRunner`. Arguments and results
travel as JSON, also on rank 0, so that all ranks return the same types: nothing is unpickled, and
ranks on other machines are reached in the same way.
"""

import hashlib
import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.utils.checks import require, shown
from nanoserve.utils.registry import Registry, import_location
from nanoserve.worker.model_runner import ModelRunner

WORKER_FUNCTIONS: Registry[Callable[..., Any]] = Registry(
    "worker function",
    {
        "weights_checksum": "nanoserve.worker.worker_functions:weights_checksum",
        "memory_stats": "nanoserve.worker.worker_functions:memory_stats",
    },
)
# Objects of these packages hold weights in other forms than a parameter.
_FORMS = ("nanoserve.kernels.cpu.", "nanoserve.models.quantization.")


def register_worker_function(name: str, location: str) -> None:
    """Register a function that `LLM.collective_rpc(name)` calls on every rank.

    It is called as `function(runner, *args, **kwargs)` between two steps. `runner` is the rank's
    `nanoserve.worker.model_runner.ModelRunner`: `runner.model`, which is None while dropped weights
    are asleep, `runner.config`, `runner.model_config`, `runner.device`, and `runner.context`, whose
    `parallel.global_rank` is the rank. Weights must not be changed in place, because most of them
    are kept in other forms: `LLM.update_weights` replaces them.

    location: "package.module:function", which all ranks can import: of an installed package, or in
    a folder of PYTHONPATH. Raises `ValueError` for anything else, and for a name that is in use.
    """
    is_text = isinstance(name, str) and isinstance(location, str)
    require(
        is_text and not location.startswith("__main__:"),
        f"name={shown(name)}, location={shown(location)} must be strings, the second one "
        f"'package.module:function' of a module that other processes can import",
    )
    WORKER_FUNCTIONS.register(name, location)


def call_function(order: bytes, runner: ModelRunner) -> dict[str, Any]:
    """Call a function on this rank.

    order: JSON, [location, args, kwargs]. Returns {"result": ...} as after a passage through JSON,
    or {"error": traceback} if the function cannot be imported or raises, or if its result is not
    serializable.
    """
    try:
        location, args, kwargs = json.loads(order)
        with runner.device.guard():
            result = import_location(location)(runner, *args, **kwargs)
            runner.device.finish()  # errors of a GPU appear here and not in the next step
        return {"result": json.loads(json.dumps(result))}
    except Exception:
        return {"error": traceback.format_exc().strip()}


def weights_checksum(runner: ModelRunner) -> str:
    """Return the SHA-256 of a rank's weights in hexadecimal, with their names, types and shapes.

    It is taken of the weights as the rank keeps them: its part of each, quantized or in another
    layout. So compare checksums of the same rank and options on the same kind of machine. Equal
    weights have equal checksums. Raises `ValueError` while the weights are dropped (sleep level 2).
    """
    require(runner.model is not None, "the weights are asleep: wake_up() first")
    checksum = hashlib.sha256()
    for name, tensor in sorted(_weights(runner.model), key=lambda item: item[0]):
        dense = tensor.to_dense() if tensor.is_mkldnn else tensor
        content = dense.detach().cpu().contiguous().flatten().view(torch.uint8)
        checksum.update(f"{name} {dense.dtype} {list(dense.shape)}\n".encode())
        checksum.update(content.numpy().data)
    return checksum.hexdigest()


def memory_stats(runner: ModelRunner) -> dict[str, int]:
    """Return the bytes of a rank's weights ("weights_bytes") and KV cache ("kv_cache_bytes").

    The KV cache includes recurrent states, if the model has any.

    Weights count wherever they are: with sleep level 1, in host memory. A draft model is not
    counted, and neither are activations and graphs.
    """
    weights = [] if runner.model is None else _weights(runner.model)
    layout, kv_bytes = runner.kv_cache_layout, 0
    if runner.kv_caches is not None:  # and the dummy block
        kv_bytes = (runner.num_kv_blocks + 1) * layout.block_bytes + layout.states.num_bytes
    return {
        "weights_bytes": sum(tensor.numel() * tensor.element_size() for _, tensor in weights),
        "kv_cache_bytes": kv_bytes,
    }


def copy_to_host(runner: ModelRunner, pairs: list[tuple[int, int]]) -> None:
    """Copy KV blocks to places of the host pool: (block, place). Nothing waits for the copies."""
    runner.host_pool.copy(runner.kv_caches, KVTransfers(pairs, []))


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all that a model has loaded: tied weights once, no RoPE tables."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, RotaryEmbedding):
            continue
        own = {
            **dict(module.named_parameters(recurse=False)),
            **dict(module.named_buffers(recurse=False)),
            **vars(module),
        }
        for name, value in own.items():
            for path, tensor in _tensors(f"{prefix}.{name}", value):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield path, tensor


def _tensors(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in `value`: a tensor, a form of a weight, or a list of such."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _tensors(f"{path}.{index}", each)
    elif type(value).__module__.startswith(_FORMS) and not isinstance(value, nn.Module):
        for name, each in vars(value).items():
            yield from _tensors(f"{path}.{name}", each)
