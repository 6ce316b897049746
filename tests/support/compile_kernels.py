"""Compiles the kernels for a GPU that is not there, and says what ptxas thinks of them.

    python tests/support/compile_kernels.py 90 ["regular expression for the cases that are wanted"
        ["and for those of which the instructions are counted"]] [89 ...]

Calls the public launchers with small CPU tensors, under a driver that claims to be a GPU of that
compute capability. A launch then ends after compilation, so what is compiled is what would run:
the same arguments, constants and numbers of warps. Prints a JSON object for each case and kernel.
"""

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
from quantized_cases import quantized_cases
from sass import disassemble
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

import nanoserve.kernels.triton.paged_attention
from nanoserve.kernels.triton.act_and_mul import ACTIVATIONS, act_and_mul
from nanoserve.kernels.triton.add_rms_norm import add_rms_norm, rms_norm
from nanoserve.kernels.triton.choose_tokens import choose_tokens, pack_settings
from nanoserve.kernels.triton.experts import fused_experts
from nanoserve.kernels.triton.filter_logits import filter_borders
from nanoserve.kernels.triton.latent_attention import latent_attention
from nanoserve.kernels.triton.low_rank import add_low_rank
from nanoserve.kernels.triton.paged_attention import paged_attention
from nanoserve.kernels.triton.quantized_rows import CodeFormat
from nanoserve.kernels.triton.split_linear import split_linear, tiled_linear
from nanoserve.kernels.triton.split_work import most_arrivals
from nanoserve.kernels.triton.store_kv import store_kv

# Compute capability -> KiB of shared memory that one program may have. A100 (80), RTX 30 and A10
# (86), RTX 40 and L4 (89), H100 (90), B200 (100), RTX 50 (120).
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


def _attention(
    head_dim: int,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    query_len: int,
    kv_cache_dtype: str | None = None,
    is_mixed: bool = False,
    merges: bool = False,
    in_order: bool = False,
    context_len: int = 64,
    **sees: Any,
) -> None:
    num_rows = 2
    arrivals = torch.zeros(1000, dtype=torch.int32) if merges else None
    # Where a graph's launch finds them, 8 bytes behind an aligned address.
    row_counts = torch.zeros(10, dtype=torch.int32)[2:4] if is_mixed else None
    kv_cache, kv_scales = _cache((2, 4, num_kv_heads, 16, head_dim), dtype, kv_cache_dtype)
    paged_attention(
        torch.zeros(num_rows * query_len, num_heads, head_dim, dtype=dtype),
        kv_cache,
        torch.zeros(num_rows + 1, dtype=torch.int32),
        torch.zeros(num_rows, dtype=torch.int32),
        torch.zeros(num_rows, 4, dtype=torch.int32),
        scale=head_dim**-0.5,
        num_decode_rows=num_rows if query_len == 1 else 0,
        row_counts=row_counts,
        max_context_len=context_len,
        max_query_len=query_len,
        kv_scales=kv_scales,
        arrivals=arrivals,
        in_order=in_order,
        **sees,
    )


def _cache(
    shape: tuple[int, ...], dtype: torch.dtype, kv_cache_dtype: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values and no scales, or codes and theirs."""
    if kv_cache_dtype is None:
        return torch.zeros(shape, dtype=dtype), None
    codes = {"int8": torch.int8, "fp8": torch.uint8}[kv_cache_dtype]
    return torch.zeros(shape, dtype=codes), torch.zeros(shape[:-1])


def _attention_cases() -> list[tuple[str, Callable[[], None]]]:
    head_dims, dtypes = (64, 80, 96, 128, 256), (torch.bfloat16, torch.float32)
    shapes = [(head_dim, dtype, 4, 2, {}) for head_dim in head_dims for dtype in dtypes]
    window, cap = {"sliding_window": 33}, {"soft_cap": 50.0}
    shapes += [(head_dim, torch.bfloat16, 4, 2, window | cap) for head_dim in (64, 128, 256)]
    shapes += [(128, torch.bfloat16, 4, 2, sees) for sees in (window, cap)]
    shapes += [(128, torch.float16, 4, 2, {}), (128, torch.bfloat16, 8, 1, {})]
    for kv_cache_dtype in ("int8", "fp8"):
        kind = {"kv_cache_dtype": kv_cache_dtype}
        shapes += [(head_dim, torch.bfloat16, 4, 2, kind) for head_dim in (64, 128, 256)]
        shapes += [(128, torch.float32, 4, 2, kind)]
    shapes += [(128, torch.bfloat16, 8, 1, {"kv_cache_dtype": "int8"})]
    sinks = window | {"sinks": torch.zeros(8)}  # gpt-oss
    shapes += [
        (64, torch.bfloat16, 8, 1, sees) for sees in (sinks, sinks | {"kv_cache_dtype": "fp8"})
    ]
    cases = []
    for head_dim, dtype, num_heads, num_kv_heads, sees in shapes:
        label = f"{dtype} head_dim={head_dim} heads={num_heads}:{num_kv_heads}"
        label = " ".join([label.replace("torch.", "attention "), *_names(sees)])
        call = partial(_attention, head_dim, dtype, num_heads, num_kv_heads, **sees)
        cases.append((f"{label} prefill", partial(call, query_len=64)))
        cases.append((f"{label} decode", partial(call, query_len=1)))
        if head_dim in (64, 128, 256):  # rows of 8 tokens or fewer; with 8 heads, a tile of 64 rows
            cases.append((f"{label} few", partial(call, query_len=8)))
            cases.append((f"{label} mixed", partial(call, query_len=8, is_mixed=True)))
            in_order = partial(call, query_len=8, in_order=True)
            cases.append((f"{label} in order", in_order))
            cases.append((f"{label} shares in order", partial(in_order, context_len=2048)))
        if head_dim == 128:
            for name, query_len in (("decode", 1), ("few", 8)):
                case = partial(call, query_len=query_len, merges=True)
                cases.append((f"{label} {name} merging", case))
    return cases


def _latent_attention(
    num_heads: int, dtype: torch.dtype, kv_cache_dtype: str | None, num_shares: int
) -> None:
    """The sizes of DeepSeek V2 and V3."""
    cache, scales = _cache((1, 4, 1, 16, 576), dtype, kv_cache_dtype)
    latent_attention(
        torch.zeros(4, num_heads, 576, dtype=dtype),
        cache,
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 4, dtype=torch.int32),
        scale=0.1,
        value_dim=512,
        max_context_len=64,
        num_shares=num_shares,
        k_scales=scales,
        row_counts=torch.zeros(10, dtype=torch.int32)[2:4] if num_shares == 1 else None,
    )


def _latent_attention_cases() -> list[tuple[str, Callable[[], None]]]:
    shapes: list[tuple[int, torch.dtype, str | None]] = [
        (heads, dtype, None) for heads in (16, 128) for dtype in (torch.bfloat16, torch.float32)
    ]
    shapes += [
        (16, torch.float16, None),
        (16, torch.bfloat16, "int8"),
        (128, torch.bfloat16, "fp8"),
    ]
    cases = []
    for num_heads, dtype, kind in shapes:
        for num_shares in (1, 4):
            label = f"latent {dtype} heads={num_heads} kv={kind} shares={num_shares}"
            case = partial(_latent_attention, num_heads, dtype, kind, num_shares)
            cases.append((label.replace("torch.", ""), case))
    return cases


def _names(sees: dict[str, Any]) -> list[str]:
    return [f"kv={value}" if name == "kv_cache_dtype" else name for name, value in sees.items()]


def _store_kv(
    num_tokens: int,
    head_dim: int,
    dtype: torch.dtype,
    has_norm: bool,
    kv_cache_dtype: str | None = None,
    is_dependent: bool = False,
) -> None:
    table = torch.zeros(64, head_dim // 2, dtype=dtype)
    weight = torch.zeros(head_dim, dtype=dtype) if has_norm else None
    integers = torch.zeros(num_tokens, dtype=torch.int32)
    heads = torch.zeros(num_tokens, 8, head_dim, dtype=dtype)
    cache, scales = _cache((2, 4, 2, 16, head_dim), dtype, kv_cache_dtype)
    tables = (table, table, weight, weight, 1e-6, cache, integers, scales)
    store_kv(heads, integers, *tables, is_dependent=is_dependent)


def _choose_tokens(
    vocab_size: int,
    dtype: torch.dtype,
    is_filtered: bool,
    is_masked: bool = False,
    **options: bool,
) -> None:
    integers = torch.zeros(4, dtype=torch.int32)
    settings = torch.from_numpy(np.stack([pack_settings(1.0, 0, 0)] * 4))
    logits = torch.zeros(4, vocab_size, dtype=dtype)
    borders = filter_borders(logits, integers, settings, **options) if is_filtered else None
    masks = torch.zeros(4, -(-vocab_size // 32), dtype=torch.int32) if is_masked else None
    mask_rows = integers if is_masked else None
    choose_tokens(logits, integers, integers, settings, borders, masks, mask_rows, **options)


def _add_rms_norm(hidden: int, dtype: torch.dtype, **options: Any) -> None:
    x = torch.zeros(4, hidden, dtype=dtype)
    add_rms_norm(x, x, x[0], 1e-6, **options)


def _rms_norm(hidden: int, dtype: torch.dtype, **options: bool) -> None:
    rms_norm(torch.zeros(4, hidden, dtype=dtype), torch.zeros(hidden), 1e-6, **options)


def _small_cases() -> list[tuple[str, Callable[[], None]]]:
    cases: list[tuple[str, Callable[[], None]]] = []
    for dtype in (torch.bfloat16, torch.float32):  # float16 takes what bfloat16 takes
        for hidden in (192, 1024, 16384):
            case = partial(_add_rms_norm, hidden, dtype)
            cases.append((f"add_rms_norm {dtype} hidden={hidden}", case))
        case = partial(_rms_norm, 4096, dtype)
        cases.append((f"rms_norm {dtype} hidden=4096, float32 weight", case))
        for size, activation in product((448, 3072), ACTIVATIONS):
            case = partial(act_and_mul, torch.zeros(4, 2 * size, dtype=dtype), activation)
            cases.append((f"act_and_mul {dtype} size={size} {activation}", case))
        for num_tokens, head_dim in ((4, 64), (4, 80), (4, 128), (256, 128), (256, 256)):
            for has_norm in (True, False):
                label = f"store_kv {dtype} tokens={num_tokens} head_dim={head_dim} norm={has_norm}"
                cases.append((label, partial(_store_kv, num_tokens, head_dim, dtype, has_norm)))
        for num_tokens, kv_cache_dtype in product((4, 256), ("int8", "fp8")):
            label = f"store_kv {dtype} tokens={num_tokens} head_dim=128 kv={kv_cache_dtype}"
            cases.append((label, partial(_store_kv, num_tokens, 128, dtype, True, kv_cache_dtype)))
        for vocab_size, is_filtered in ((2048, True), (151_936, True), (151_936, False)):
            label = f"choose_tokens {dtype} vocab={vocab_size} filtered={is_filtered}"
            cases.append((label, partial(_choose_tokens, vocab_size, dtype, is_filtered)))
    masked = partial(_choose_tokens, 151_936, torch.bfloat16, False, True)
    cases.append(("choose_tokens bfloat16 vocab=151936 masked", masked))
    cases += [*_dependent_cases(), *_fused_cases()]
    return [(label.replace("torch.", ""), call) for label, call in cases]


def _fused_cases() -> list[tuple[str, Callable[[], None]]]:
    """Norm and gate with the codes of their results, in the usual sizes and the largest."""
    cases: list[tuple[str, Callable[[], None]]] = []
    formats = {"e4m3": CodeFormat(torch.float8_e4m3fn), "int8": CodeFormat(torch.int8, 32)}
    for (name, code_format), dtype in product(formats.items(), (torch.bfloat16, torch.float32)):
        option = {"code_format": code_format}
        for hidden in (1024, 4096, 16384):
            label = f"fused {name} add_rms_norm {dtype} hidden={hidden}"
            cases.append((label, partial(_add_rms_norm, hidden, dtype, **option)))
        for size in (3072, 12288, 16384):
            gate_up = torch.zeros(4, 2 * size, dtype=dtype)
            label = f"fused {name} act_and_mul {dtype} size={size}"
            cases.append((label, partial(act_and_mul, gate_up, "silu", **option)))
    return cases


def _dependent_cases() -> list[tuple[str, Callable[[], None]]]:
    """Each small kernel as one that starts before the kernel before it has finished."""
    dtype, option = torch.bfloat16, {"is_dependent": True}
    gate_up = torch.zeros(4, 2 * 3072, dtype=dtype)
    return [
        ("dependent add_rms_norm", partial(_add_rms_norm, 1024, dtype, **option)),
        ("dependent rms_norm", partial(_rms_norm, 4096, dtype, **option)),
        ("dependent act_and_mul", partial(act_and_mul, gate_up, "silu", **option)),
        ("dependent store_kv", partial(_store_kv, 4, 128, dtype, True, **option)),
        (
            "dependent choose_tokens",
            partial(_choose_tokens, 151_936, dtype, True, True, **option),
        ),
    ]


def _split_linear(
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    activation: str | None,
    **options: bool,
) -> None:
    x, weight = torch.zeros(rows, inputs, dtype=dtype), torch.zeros(outputs, inputs, dtype=dtype)
    arrivals = torch.zeros(most_arrivals(x.device), dtype=torch.int32)
    split_linear(x, weight, arrivals, activation, **options)


def _split_linear_cases() -> list[tuple[str, Callable[[], None]]]:
    """One for each size of tiles; inputs that are split, and others that are not."""
    cases = []
    shapes = [(2048, 1024, None), (1024, 6144, "silu"), (3072, 1024, None), (200, 144, "silu")]
    for rows, (inputs, outputs, activation) in product((1, 64, 256), shapes):
        for dtype in (torch.bfloat16, torch.float32):
            label = f"split_linear {dtype} rows={rows} inputs={inputs} {activation}"
            case = partial(_split_linear, rows, inputs, outputs, dtype, activation)
            cases.append((label.replace("torch.", ""), case))
    case = partial(_split_linear, 16, 2048, 1024, torch.bfloat16, None, is_dependent=True)
    cases.append(("dependent split_linear", case))
    for (inputs, outputs, activation), dtype in product(shapes, (torch.bfloat16, torch.float32)):
        x, weight = torch.zeros(16, inputs, dtype=dtype), torch.zeros(outputs, inputs, dtype=dtype)
        label = f"tiled_linear {dtype} inputs={inputs} {activation}".replace("torch.", "")
        cases.append((label, partial(tiled_linear, x, weight, activation)))
    return cases


def _low_rank(
    inputs: int, outputs: list[int], rank: int, dtype: torch.dtype, is_dependent: bool = False
) -> None:
    size, num_targets, total = 3, len(outputs), sum(outputs)
    add_low_rank(
        torch.zeros(size, inputs, dtype=dtype),
        torch.zeros(size, total, dtype=dtype),
        torch.zeros(2, inputs, -(-num_targets * rank // 16) * 16, dtype=dtype),
        torch.zeros(2, rank, total, dtype=dtype),
        torch.zeros(2, num_targets + 1, dtype=torch.int32),
        torch.zeros(num_targets + 1, dtype=torch.int32),
        torch.zeros(4, 16, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
        is_dependent=is_dependent,
    )


def _low_rank_cases() -> list[tuple[str, Callable[[], None]]]:
    """Of Qwen3-0.6B's q, k and v, of wide layers, and of sizes that no tile divides."""
    cases = []
    shapes = [(1024, [2048, 1024, 1024], 16), (3072, [1024], 16), (4096, [4096], 256)]
    shapes += [(100, [72, 40], 8)]
    for (inputs, outputs, rank), dtype in product(shapes, (torch.bfloat16, torch.float32)):
        label = f"low_rank {dtype} inputs={inputs} rank={rank}".replace("torch.", "")
        cases.append((label, partial(_low_rank, inputs, outputs, rank, dtype)))
    case = partial(_low_rank, 1024, [2048, 1024, 1024], 16, torch.bfloat16, True)
    return [*cases, ("dependent low_rank", case)]


def _experts(
    num_tokens: int,
    hidden: int,
    size: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype,
    has_biases: bool = False,
) -> None:
    x = torch.zeros(num_tokens, hidden, dtype=dtype)
    expert_ids = torch.zeros(num_tokens, top_k, dtype=torch.int64)
    gate_up = torch.zeros(num_experts, 2 * size, hidden, dtype=dtype)
    down = torch.zeros(num_experts, hidden, size, dtype=dtype)
    options: dict[str, Any] = {}
    if has_biases:  # and gpt-oss's gate
        biases = gate_up.new_zeros(gate_up.shape[:2]), down.new_zeros(down.shape[:2])
        options = {"biases": biases, "swiglu": (1.702, 7.0, 1.0)}
    fused_experts(x, expert_ids, torch.zeros(num_tokens, top_k), gate_up, down, **options)


def _experts_cases() -> list[tuple[str, Callable[[], None]]]:
    """A small step and a large one; sizes that the tiles divide, and sizes that they do not."""
    cases = []
    shapes = [
        (256, 192, 8, 128, torch.bfloat16),
        (256, 192, 8, 128, torch.float32),
        (200, 72, 2, 3, torch.bfloat16),
        (200, 72, 2, 3, torch.float32),
    ]
    for hidden, size, top_k, num_experts, dtype in shapes:
        for num_tokens in (4, 1024):
            label = f"experts {dtype} tokens={num_tokens} hidden={hidden} size={size} "
            label = f"{label}top_k={top_k} experts={num_experts}".replace("torch.", "")
            case = partial(_experts, num_tokens, hidden, size, top_k, num_experts, dtype)
            cases.append((label, case))
            if num_experts == 3:
                cases.append((f"{label} biases", partial(case, has_biases=True)))
    return cases


# A label, and a call of a launcher; several kernels may come out of one.
CASES: list[tuple[str, Callable[[], None]]] = [
    *_attention_cases(),
    *_latent_attention_cases(),
    *_experts_cases(),
    *_small_cases(),
    *_split_linear_cases(),
    *_low_rank_cases(),
    *quantized_cases(),
]


_LAUNCH = JITFunction.run


class _AbsentGPU(DriverBase):
    """Just enough of a driver to compile for a GPU."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        """Each target is a device of its own: Triton keeps what it has compiled by device."""
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("there is no GPU to measure")


def compile_cases(capability: int, wanted: str, disassembled: str | None = None) -> None:
    compiled: list[Any] = []
    logs: dict[int, str] = {}  # kernel -> what ptxas said; cases may share a kernel
    codes: dict[int, Any] = {}  # kernel -> its instructions

    def compile_only(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            kernel = _LAUNCH(self, *args, **{**kwargs, "warmup": True})
        logs.setdefault(id(kernel), said.getvalue())
        compiled.append(kernel)
        return kernel

    triton.runtime.driver.set_active(_AbsentGPU(capability))
    # What the launchers ask a GPU for, and keep, they take from here for one that is not there.
    nanoserve.kernels.triton.paged_attention.SHARED_MEMORY_WITHOUT_GPU = (
        SHARED_KIB[capability] * 1024
    )
    nanoserve.kernels.triton.paged_attention._shared_memory.cache_clear()
    triton.knobs.nvidia.dump_ptxas_log = True  # to stdout
    JITFunction.run = compile_only
    for label, call in CASES:
        if not re.search(wanted, label):
            continue
        case = {"arch": f"sm_{capability}", "case": label}
        compiled.clear()
        try:
            call()
        except Exception as error:  # on to the next case: the table shall be complete
            print(json.dumps({**case, "error": f"{type(error).__name__}: {error}"}), flush=True)
        for kernel in compiled:
            record = {**case, **_resources(kernel, logs[id(kernel)])}
            if disassembled is not None and re.search(disassembled, label):
                if id(kernel) not in codes:
                    codes[id(kernel)] = disassemble(kernel.asm["cubin"])
                record["instructions"] = codes[id(kernel)]
            print(json.dumps(record), flush=True)


def _resources(kernel: Any, log: str) -> dict[str, str | int]:
    def number(pattern: str) -> int:
        return max(int(found) for found in re.findall(pattern, log))

    return {
        "kernel": kernel.metadata.name,
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores"),
        "shared_bytes": kernel.metadata.shared,
        "is_dependent": kernel.metadata.launch_pdl,
        "before_wait": _before_wait(kernel.asm["ptx"]),
        "arrival": _arrival(kernel.asm["ptx"]),
    }


def _before_wait(ptx: str) -> list[str]:
    """What touches global memory, or goes past it, before a wait for the kernel before."""
    before, wait, behind = ptx.partition("griddepcontrol.wait")
    if not wait:
        return ["no wait"]
    found = re.findall(r"(?:ld|st|atom|red)\.[\w.]*global[\w.]*|cp\.async[\w.]*|\bret\b", before)
    labels = set(re.findall(r"^(\$\w+):", behind, re.M))
    found += ["bra" for label in re.findall(r"\bbra[\w.]*\s+(\$\w+)", before) if label in labels]
    return sorted(set(found))


def _arrival(ptx: str) -> dict[str, Any]:
    """How a program says that its part is stored, and how it reads those of others."""
    found = re.search(r"\batom[\w.]*", ptx)
    if found is None:
        return {}
    before, behind = ptx[: found.start()], ptx[found.end() :]
    return {
        "atomic": found[0],
        "has_barrier": before.rindex("bar.sync") > before.rindex("st.global"),
        "loads": sorted(set(re.findall(r"ld\.global\.cg[\w.]*", behind))),
    }


if __name__ == "__main__":
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: nothing would be compiled")
    with tempfile.TemporaryDirectory() as cache:  # a stale cache must not pass for a compilation
        triton.knobs.cache.dir = cache
        starts = [at for at, word in enumerate(sys.argv) if word.isdigit()]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            compile_cases(int(sys.argv[start]), *(sys.argv[start + 1 : end] or [""]))
