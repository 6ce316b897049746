"""Logs one line about the loaded model, with suggestions that would make it faster."""

import logging
import sys
from importlib.util import find_spec
from typing import Any

from nanoserve.engine.guard import GuardedEngine
from nanoserve.worker.kv_cache import kv_block_bytes

logger = logging.getLogger(__name__)


def announce(engine: GuardedEngine) -> None:
    """Log the line; also print it to a terminal if logging at level INFO is off."""
    line = f"loaded {summary(engine)}"
    suggestions = speed_suggestions(engine)
    if suggestions:
        line += f"; for speed: {'; '.join(suggestions)}"
    logger.info(line)
    if sys.stderr is not None and sys.stderr.isatty() and not logger.isEnabledFor(logging.INFO):
        print(f"nanoserve: {line}", file=sys.stderr)


def summary(engine: GuardedEngine) -> str:
    """Return one line: model, dtype, device, attention backend, matrix products, KV pool."""
    config, model_config, executor = engine.config, engine.model_config, engine.executor
    context = getattr(executor, "context", None)  # None if the model is in other processes
    size = config.block_size
    architecture = model_config.checkpoint_architecture
    if model_config.transformers_config is not None:
        architecture += " through transformers"
    parts = [repr(config.model), architecture, model_config.dtype, config.device]
    if config.tensor_parallel_size > 1:
        parts.append(f"{config.tensor_parallel_size} ranks")
    if config.pipeline_parallel_size > 1:
        parts.append(f"{config.pipeline_parallel_size} stages")
    if context is not None:
        parts += [f"attention {_name(context.attention)}", f"products {_products(executor)}"]
    num_blocks = engine.scheduler.block_manager.num_blocks
    gib = num_blocks * kv_block_bytes(config, model_config) / 2**30
    parts.append(f"{num_blocks} KV blocks of {size} tokens ({gib:.2f} GiB)")
    parts.append(f"max_model_len {engine.input_processor.max_model_len}")
    return ", ".join(parts)


def speed_suggestions(engine: GuardedEngine) -> list[str]:
    """Return suggestions that would make a CPU compute faster."""
    config, model_config = engine.config, engine.model_config
    if config.device != "cpu":
        return []
    suggestions = []
    if find_spec("numba") is None:
        suggestions.append("pip install 'nanoserve[cpu]' compiles attention and sampling")
    if model_config.dtype == "float16":
        suggestions.append("dtype='bfloat16' or 'float32' has faster kernels on a CPU")
    return suggestions


def _name(attention: Any) -> str:
    return type(attention).__name__.removesuffix("Attention").lower()


def _products(executor: Any) -> str:
    """Return the kernel of matrix products: a name of `float_choice`, or a kind of weights."""
    method = executor.context.linear_method
    kind = "" if method is None else type(method).__name__.removesuffix("LinearMethod").lower()
    return getattr(method, "name", kind or "torch")
