"""Which variants of the kernels are launched: what Triton has compiled, or would compile.

On a GPU they are what Triton has compiled; in the interpreter, where nothing is, they are by the
same rules what it would compile a kernel anew for.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

Variant = tuple[str, ...]  # the kernel's name, and what tells it from the kernel's other variants


# Arguments that others read, of all kernels.
_WRITTEN = ("out", "out_ptr", "normed", "total", "q", "token_ids")


class LaunchedKernels:
    """Notes what is launched within `noted`; in a CUDA graph, when that is captured.

    With a `token_id` kernels are not run: what they would write is 0, and every token that is
    chosen is this one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token_id: int | None = None) -> None:
        self.variants: set[Variant] = set()
        kind = InterpretedFunction if triton.knobs.runtime.interpret else JITFunction
        variant = _interpreted if triton.knobs.runtime.interpret else _compiled
        run = kind.run

        def run_and_note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            result = None
            if token_id is None:
                result = run(kernel, *args, grid=grid, warmup=warmup, **options)
            else:
                for name, value in zip(kernel.arg_names, args, strict=False):
                    if name in _WRITTEN and value is not None:
                        value.fill_(token_id if name == "token_ids" else 0)
            self.variants.add(variant(kernel, result, args, options))
            return result

        monkeypatch.setattr(kind, "run", run_and_note)

    @contextmanager
    def noted(self) -> Iterator[set[Variant]]:
        """Give what is launched within."""
        self.variants = set()
        yield self.variants
        self.variants = set()


def of_kernel(variants: set[Variant], name: str) -> set[Variant]:
    return {variant for variant in variants if variant[0] == name}


def _compiled(kernel: Any, result: Any, args: Any, options: Any) -> Variant:
    return kernel.fn.__name__, result.hash


def _interpreted(kernel: Any, result: Any, args: Any, options: dict[str, Any]) -> Variant:
    signature = inspect.signature(kernel.fn)
    given = {name: value for name, value in options.items() if name in kernel.arg_names}
    bound = signature.bind(*args, **given)
    plain = kernel.kwargs.get("do_not_specialize") or ()
    unaligned = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    parts = [kernel.fn.__name__]
    for name, value in bound.arguments.items():
        is_constant = "constexpr" in str(signature.parameters[name].annotation)
        what = value if is_constant or value is None else _kind(value, name, plain, unaligned)
        parts.append(f"{name}={what}")
    parts += sorted(f"{name}={value}" for name, value in options.items() if name not in given)
    return tuple(parts)


def _kind(value: Any, name: str, plain: Any, unaligned: Any) -> str:
    """What Triton knows of an argument when it compiles."""
    if isinstance(value, torch.Tensor):
        is_aligned = value.data_ptr() % 16 == 0 and not {name} & {*plain, *unaligned}
        return f"{value.dtype}{' aligned' * is_aligned}"
    if isinstance(value, bool | float):
        return type(value).__name__
    if name in plain:
        return "int" if abs(value) < 2**31 else "int64"
    if value == 1:
        return "1"
    return f"{'int' if abs(value) < 2**31 else 'int64'}{' of 16s' * (value % 16 == 0)}"


def told(variants: set[Variant], known: set[Variant]) -> str:
    """Say in what each variant differs from the most alike of those that are known."""
    lines = []
    for variant in sorted(variants):
        alike = max(of_kernel(known, variant[0]), key=lambda k: len({*k} & {*variant}), default=())
        lines.append(
            f"{variant[0]}: {sorted({*variant} - {*alike})} not {[*{*alike} - {*variant}]}"
        )
    return "\n".join(lines)
