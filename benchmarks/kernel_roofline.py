"""Compute the minimum times of a step's kernels, one by one, for a GPU that need not be present.

    python benchmarks/kernel_roofline.py
    python benchmarks/kernel_roofline.py --gpu h200 --launch-us 1.5
    python benchmarks/kernel_roofline.py --kernel-config '{"split_products": true}'
    python benchmarks/kernel_roofline.py --shape qwen3-8b --quantization fp8 --no-workload

`roofline.py` counts what a model needs; this counts nanoserve's launches: each reads its inputs
from memory, writes its outputs there, and is a node of the graph. A step is run on torch's "meta"
device, where tensors have shapes and no memory, and each launch is recorded with its arguments. Its
time is the longest of its bytes, its matrix products and its instructions at the GPU's best rates,
plus `--launch-us`, or `--dependent-us` if it starts before the kernel before it has finished.

So this is a limit, too, and the difference to `roofline.py` is lost even if every kernel is
perfect. Not included are block tables, the host's work between two steps, and how evenly programs
share their work (`load_balance.py`). Steps with prompts count as if they were graphs, too.
"""

import functools
import json
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from load_balance import nano_vllm_steps
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from nanoserve.attention.kv_cache import KVCacheSpec
from nanoserve.attention.triton import TritonAttention
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.precision import precision_of
from nanoserve.cli.bench.roofline import Need, Step, pairs_seen
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.kernels.triton import (
    dependent_launch,
    grouped_linear,
    paged_attention,
    split_linear,
    store_kv,
)
from nanoserve.kernels.triton.choose_tokens import SETTINGS_WORDS, choose_tokens
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.triton_ops import TritonOps
from nanoserve.models.quantization.linear_methods import choose_linear_method
from nanoserve.models.registry import model_class
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cuda_graphs import graph_sizes

_META = torch.device("meta")
_BLOCK_SIZE, _MAX_ROWS, _NO_WINDOW = 16, 256, 2**31 - 1
# Of a thread for each value of its first argument; the other kernels have few for their bytes. As
# `tests/support/compile_kernels.py` counts them.
_INSTRUCTIONS = {"_best_of_parts": 54}
# Of a product's tensors, the places of its rows and of its weight.
_PRODUCTS = {"_split_linear": (-2, -1), "_scaled_product": (1, 3), "_grouped_product": (1, 2)}


class GPU(NamedTuple):
    """Best rates of a GPU, per second: bytes of a copy, operations, a thread's instructions."""

    num_sms: int
    bandwidth: float
    matmul_rate: float
    issue_rate: float


# Four schedulers in each multiprocessor issue an instruction of 32 threads a clock, at 1.755 GHz.
GPUS = {
    "h100": GPU(132, 3.0e12, 790e12, 132 * 4 * 32 * 1.755e9),
    "h200": GPU(132, 4.3e12, 790e12, 132 * 4 * 32 * 1.755e9),
}


class Launch(NamedTuple):
    """Launch of a kernel; `layer` is the one whose keys and values it is the first to read."""

    name: str
    num_bytes: int
    num_operations: int = 0
    num_instructions: int = 0
    layer: int | None = None
    is_dependent: bool = False


class _Recorder(TorchDispatchMode):
    """List the launches in its context: torch's operations and Triton's kernels.

    Tensors in the storages `left_out` take no bytes.
    """

    def __init__(self, kv_cache: torch.Tensor, num_tokens: int, left_out: set[int]) -> None:
        """kv_cache: one layer's; all lie side by side."""
        super().__init__()
        self.launches: list[Launch] = []
        self._kv_cache, self._num_tokens, self._left_out = kv_cache, num_tokens, left_out
        self._layers_read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, read, written = func._schema.name, _tensors((args, kwargs)), _tensors(out)
        storages = {_storage(tensor) for tensor in read}
        is_view = all(_storage(tensor) in storages for tensor in written)
        if "empty" in name or (is_view and not name.endswith("_")):
            return out
        if name == "aten::embedding":  # reads a row for each token
            read = [args[1], out]
        operations = 0
        if name in ("aten::linear", "aten::_scaled_mm"):
            operations = 2 * args[0].numel() * args[1].numel() // args[0].shape[-1]
        num_bytes = sum(tensor.nbytes for tensor in [*read, *written])
        self.launches.append(Launch(name.removeprefix("aten::"), num_bytes, operations))
        return out

    def add_kernel(self, name: str, arguments: Iterable[Any], is_dependent: bool) -> None:
        tensors = [t for t in _tensors(list(arguments)) if _storage(t) not in self._left_out]
        in_pool = [t for t in tensors if _storage(t) == _storage(self._kv_cache)]
        num_bytes = sum(t.nbytes for t in tensors if _storage(t) != _storage(self._kv_cache))
        layer = None
        if in_pool and name == "_store_kv":
            _, _, num_kv_heads, _, head_dim = in_pool[0].shape
            num_bytes += 2 * self._num_tokens * num_kv_heads * head_dim * in_pool[0].itemsize
        elif in_pool:  # several kernels may share the keys of a layer; the first one counts
            index = in_pool[0].storage_offset() // self._kv_cache.numel()
            layer = None if index in self._layers_read else index
            self._layers_read.add(index)
        instructions = _INSTRUCTIONS.get(name, 0) * tensors[0].numel()
        operations = 0
        if name in _PRODUCTS:
            x, weight = (tensors[place] for place in _PRODUCTS[name])
            operations = 2 * x.numel() * len(weight)
        self.launches.append(Launch(name, num_bytes, operations, instructions, layer, is_dependent))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if torch.is_tensor(value)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _recorded(recorder: _Recorder, num_sms: int) -> Iterator[None]:
    """In its context, record kernels for this many multiprocessors instead of launching them."""

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        name = self.__name__ if isinstance(self, JITFunction) else self.fn.__name__
        is_dependent = kwargs.get("launch_pdl", False)
        recorder.add_kernel(name, [*args, *kwargs.values()], is_dependent)

    # How decode attention is cut depends on the GPU; the meta device cannot say which it is.
    with (
        recorder,
        patch.object(JITFunction, "run", run),
        patch.object(GridExecutor, "__call__", run),
        patch.object(paged_attention, "_num_multiprocessors", lambda device: num_sms),
        patch.object(split_linear, "num_multiprocessors", lambda device: num_sms),
        patch.object(grouped_linear, "num_multiprocessors", lambda device: num_sms),
        ExitStack() as stack,
    ):
        for module in (dependent_launch, paged_attention, store_kv):
            stack.enter_context(patch.object(module, "has_dependent_launch", lambda: True))
        yield


class Predictor:
    """Launches of a model's steps, and their seconds on `gpu`.

    launch_seconds, dependent_seconds: overhead of a launch, and of one with dependent launch.
    kernels: the option `kernel_config`. quantization: options of quantized weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        gpu: GPU,
        launch_seconds: float,
        max_num_tokens: int = 8192,
        dependent_seconds: float | None = None,
        kernels: KernelConfig | None = None,
        quantization: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.gpu, self.launch_seconds = config, gpu, launch_seconds
        self.dependent_seconds = launch_seconds if dependent_seconds is None else dependent_seconds
        kernels = kernels or KernelConfig()
        self._is_dependent = kernels.dependent_launch
        attention = TritonAttention(merges_in_kernel=kernels.merge_in_attention)
        ops = TritonOps(
            kernels.dependent_launch, kernels.split_products, kernels.fused_quantization
        )
        options = EngineConfig("none", kernel_config=kernels, **quantization or {})
        method = choose_linear_method(options, config, _META, 0) if quantization else None
        context = LayerContext(
            getattr(torch, config.dtype),
            _META,
            attention=attention,
            ops=ops,
            linear_method=method,
        )
        self._model = model_class(config.architecture)(config, context)
        if method is not None:
            _quantize(self._model, method)
        precision = precision_of("nanoserve", dict(quantization or {}), config.dtype)
        self._need = Need(config, precision)
        blocks = -(-config.max_position_embeddings // _BLOCK_SIZE)
        layout = BatchLayout(max(max_num_tokens, _MAX_ROWS), _MAX_ROWS, blocks)
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=_META)
        self._tensors = BatchTensors(layout, memory)
        self._tables = torch.zeros(1, _MAX_ROWS, blocks, dtype=torch.int32, device=_META)
        spec = KVCacheSpec(_BLOCK_SIZE, config.num_key_value_heads, config.head_dim, context.dtype)
        zeros = functools.partial(torch.zeros, device=_META)
        self._kv_caches = spec.allocate(config.num_hidden_layers, 2, zeros)
        self._sizes = np.array(graph_sizes(_MAX_ROWS))
        self.launches = functools.cache(self._launches)

    def _launches(
        self, num_tokens: int, num_rows: int, num_decode_rows: int, num_logits: int
    ) -> list[Launch]:
        """Return the launches of model, LM head and sampler."""
        header = BatchHeader(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_decode_rows=num_decode_rows,
            max_query_len=1 if num_tokens == num_rows else num_tokens,
            max_context_len=self.config.max_position_embeddings,  # what a graph is captured for
        )
        tensors = self._tensors
        metadata = tensors.attention_metadata(header, self._tables[:, :num_rows])
        words = SETTINGS_WORDS.value
        settings = torch.zeros(_MAX_ROWS, words, dtype=torch.int32, device=_META)
        buffers = self._model.named_buffers()
        rotary = [buffer for name, buffer in buffers if name.endswith((".cos", ".sin"))]
        left_out = {_storage(tensor) for tensor in (self._tables, settings, *rotary)}
        recorder = _Recorder(self._kv_caches[0].values, num_tokens, left_out)
        with torch.inference_mode(), _recorded(recorder, self.gpu.num_sms):
            hidden = self._model(tensors.input_ids[:num_tokens], self._kv_caches, metadata)
            if num_logits:
                rows = tensors.output_rows[:num_logits]
                logits = self._model.compute_logits(hidden[rows])
                positions = tensors.positions[rows] + 1
                slots = tensors.output_slots[:num_logits]
                is_dependent = self._is_dependent
                choose_tokens(logits, slots, positions, settings, is_dependent=is_dependent)
        return recorder.launches

    def step(self, step: Step) -> list[tuple[Launch, float]]:
        """Return launches, attention's with all its reads, and seconds.

        A decode step is padded with rows of one key, to a size for which there is a graph.
        """
        query_lens, context_lens = step.query_lens, step.context_lens
        num_rows, num_logits = len(query_lens), step.num_logits
        if query_lens.max() == 1:
            size = int(self._sizes[np.searchsorted(self._sizes, num_rows)])
            padding = np.ones(size - num_rows, dtype=np.int64)
            query_lens, context_lens = (np.append(a, padding) for a in (query_lens, context_lens))
        decode_rows = int((query_lens == 1).sum())
        launches = self.launches(int(query_lens.sum()), len(query_lens), decode_rows, num_logits)
        item, heads = self._kv_caches[0].values.itemsize, self.config.num_attention_heads
        kv_bytes = 2 * item * self.config.num_key_value_heads * self.config.head_dim
        of_layer = []
        for layer_window in self.config.sliding_windows:
            window = layer_window or _NO_WINDOW
            keys = int(np.minimum(context_lens, window + query_lens - 1).sum())
            pairs = int(pairs_seen(query_lens, context_lens, window).sum())
            of_layer.append((keys * kv_bytes, 4 * pairs * heads * self.config.head_dim))
        timed = []
        for launch in launches:
            if launch.layer is not None:
                num_bytes, num_operations = of_layer[launch.layer]
                launch = launch._replace(
                    num_bytes=launch.num_bytes + num_bytes, num_operations=num_operations
                )
            timed.append((launch, self._seconds(launch)))
        return timed

    def _seconds(self, launch: Launch) -> float:
        overhead = self.dependent_seconds if launch.is_dependent else self.launch_seconds
        return overhead + max(
            launch.num_bytes / self.gpu.bandwidth,
            launch.num_operations / self.gpu.matmul_rate,
            launch.num_instructions / self.gpu.issue_rate,
        )

    def limit(self, step: Step) -> float:
        """Return seconds by the model's needs, as `roofline.limit`."""
        need = self._need
        return max(
            need.bytes(step) / self.gpu.bandwidth, need.operations(step) / self.gpu.matmul_rate
        )


def _quantize(model: torch.nn.Module, method: Any) -> None:
    """Replace the weights of all linears by quantized ones, which have no values either."""
    for layer in model.modules():
        if getattr(layer, "method", None) is method:
            weight = torch.empty(layer.weight.shape, dtype=torch.bfloat16, device=_META)
            method.fill(layer, "weight", method.to_integers(weight, False))
            method.process_after_loading(layer)


def decode_step(num_rows: int, context: int) -> Step:
    return Step(np.ones(num_rows, dtype=np.int64), np.full(num_rows, context), num_rows)


def print_step(predictor: Predictor, num_rows: int, context: int) -> None:
    """Print launches, bytes and microseconds of a decode step, by kernel."""
    step = decode_step(num_rows, context)
    rows: dict[str, np.ndarray] = {}
    for launch, seconds in predictor.step(step):
        rows.setdefault(launch.name, np.zeros(3))
        rows[launch.name] += 1, launch.num_bytes / 1e6, seconds * 1e6
    print(f"\n{num_rows} rows of {context} tokens\n")
    print("| kernel | launches | MB | us |\n|---|---|---|---|")
    for name, (launches, megabytes, us) in sorted(rows.items(), key=lambda row: -row[1][2]):
        print(f"| {name} | {launches:.0f} | {megabytes:.1f} | {us:.0f} |")
    launches, megabytes, us = sum(rows.values())
    print(f"| sum | {launches:.0f} | {megabytes:.1f} | {us:.0f} |")
    limit = predictor.limit(step) * 1e6
    print(f"\nThe model's roofline: {limit:.0f} us, {limit / us:.0%} of the sum.")


# Kernels of a decode step, by the part of the workload's time in which they are counted.
_PARTS = {
    "decode_attention_kernel": "decode: attention",
    "merge_parts_kernel": "decode: attention",
    "linear": "decode: products",
    "_split_linear": "decode: products",
    "_scaled_product": "decode: products",
    "_grouped_product": "decode: products",
    "_scaled_mm": "decode: products",
}


def seconds_by_part(predictor: Predictor, steps: Iterable[Step]) -> tuple[float, dict[str, float]]:
    """Return the seconds of all steps by the roofline, and those predicted for each part."""
    limit, parts = 0.0, dict.fromkeys([*_PARTS.values(), "decode: all else", "mixed steps"], 0.0)
    for step in steps:
        limit += predictor.limit(step)
        is_decode = step.query_lens.max() == 1
        for launch, seconds in predictor.step(step):
            part = _PARTS.get(launch.name, "decode: all else") if is_decode else "mixed steps"
            parts[part] += seconds
    return limit, parts


def main() -> None:
    parser = ArgumentParser(description="The least time of each kernel of a step, predicted.")
    add = parser.add_argument
    add("--gpu", choices=GPUS, default="h100")
    add("--shape", choices=SHAPES, default="qwen3-0.6b")
    add("--rows", default="1,8,64,256", help="rows of a decode step (default 1,8,64,256)")
    add("--context", type=int, default=820, help="tokens of each row (default 820)")
    add("--launch-us", type=float, default=1.0, help="overhead of a graph node (default 1.0)")
    add("--dependent-us", type=float, help="the same with dependent launch (default --launch-us)")
    add("--kernel-config", type=json.loads, default={}, metavar="JSON", help="an engine option")
    add("--quantization", help="an engine option (default: weights in bfloat16)")
    add("--quantization-activations", help="an engine option")
    add(
        "--max-num-batched-tokens",
        type=int,
        default=8192,
        help="tokens of a step of the workload (default 8192)",
    )
    add("--no-workload", action="store_true", help="only decode steps")
    args = parser.parse_args()
    config = ModelConfig.from_hf(SHAPES[args.shape], {}, "bfloat16")
    gpu, budget = GPUS[args.gpu], args.max_num_batched_tokens
    dependent_us = args.launch_us if args.dependent_us is None else args.dependent_us
    kernels = KernelConfig.of(args.kernel_config)
    overheads = args.launch_us / 1e6, budget, dependent_us / 1e6
    quantization = {
        name: value
        for name in ("quantization", "quantization_activations")
        if (value := getattr(args, name)) is not None
    }
    predictor = Predictor(config, gpu, *overheads, kernels, quantization)
    print(f"{args.shape} on {args.gpu}: {gpu.bandwidth / 1e12:.1f} TB/s, ", end="")
    print(f"{gpu.matmul_rate / 1e12:.0f} TFLOP/s, {args.launch_us} us a launch")
    for num_rows in map(int, args.rows.split(",")):
        print_step(predictor, num_rows, args.context)
    if args.no_workload:
        return
    engine_config = EngineConfig("none", max_num_batched_tokens=budget)
    steps, num_tokens = nano_vllm_steps(engine_config, config.vocab_size)
    limit, parts = seconds_by_part(predictor, steps)
    predicted = sum(parts.values())
    print("\n| part of nano-vllm's workload | s |\n|---|---|")
    for name, seconds in parts.items():
        print(f"| {name} | {seconds:.2f} |")
    print(
        f"\nnano-vllm's workload: {predicted:.2f} s, {num_tokens / predicted:.0f} tokens/s; ",
        end="",
    )
    print(f"its roofline {limit:.2f} s, {limit / predicted:.0%} of that.")


if __name__ == "__main__":
    main()
