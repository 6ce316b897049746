"""A late GPU whose tensors are not the host's: what is copied between the two, and who waits.

Its tensors say `device="cuda"`, and hold a tensor of the CPU on which its queue works. So what runs
is what runs on a GPU: pinned memory, copies, and what torch copies unasked, such as the number in
`x[index] = 1.0`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Number
from typing import Any

import numpy as np
import pytest
import torch
from late_cuda import LateCuda, LateEvent, Launching, poisoned
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

POISON_BYTE = 0x7F
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_WAITING = (torch.Tensor.tolist, torch.Tensor.numpy)


class GpuTensor(torch.Tensor):
    """A tensor of the GPU; `value` is what it will be once the queue has run."""

    value: torch.Tensor
    gpu: "GpuCuda"

    @staticmethod
    def __new__(cls, value: torch.Tensor, gpu: "GpuCuda") -> "GpuTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
        )
        tensor.value, tensor.gpu = value, gpu
        return tensor

    # For C++ it is a CPU's: without CUDA, torch cannot index those of a GPU.
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _WAITING:
            return func(args[0].gpu.brought(args[0]))
        if (
            func is torch.Tensor.__setitem__
            and isinstance(args[2], Number)
            and _has_tensor(args[1])
        ):
            args[0].gpu.count_wait("a number beside an index is copied from the host")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        gpus = (x.gpu for x in tree_leaves((args, kwargs)) if isinstance(x, GpuTensor))
        return next(gpus).dispatch(func, args, kwargs or {})


class GpuCuda(LateCuda):
    """`LateCuda` that counts: `copies` by direction, `waits` by reason, `num_launched`.

    A copy from or to memory that is not pinned, or that is not `non_blocking`, is a wait for all
    that was launched before. So is whatever the host reads of a tensor of the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = CUDA
        self.copies: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.num_launched = 0

    # ------------------------------------------------------------------ what is counted

    def launch(self, work: Callable[[], None]) -> None:
        super().launch(work)
        self.num_launched += 1

    def count_wait(self, reason: str) -> None:
        if self.is_late:
            self.waits[reason] += 1
            self.run()

    def event(self) -> "GpuEvent":
        return GpuEvent(self)

    def brought(self, tensor: GpuTensor) -> torch.Tensor:
        """Return what the host sees of a tensor that it reads at once."""
        self.copies["to the host"] += self.is_late
        self.count_wait("the host reads a tensor")
        return tensor.value

    # ------------------------------------------------------------------ torch's operations

    @contextmanager
    def guard(self) -> Iterator[None]:
        with torch.inference_mode(), _Dispatching(self):
            yield

    def run(self, until: int | None = None) -> None:
        with torch._C._EnableTorchFunction(), self.guard():
            super().run(until)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_here = any(isinstance(x, GpuTensor) for x in tensors)
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        asked = given.get("device")
        comes = asked is not None and torch.device(asked).type == "cuda"
        if not is_here and not comes:
            return self._on_host(func, args, kwargs)
        if name in ("item", "_local_scalar_dense"):
            return self.brought(args[0]).item()
        if name in ("to", "_to_copy") and asked is not None and comes is not is_here:
            host = args[0] if comes else torch.empty(args[0].shape, dtype=args[0].dtype)
            dtype = given.get("dtype") or args[0].dtype
            target = self.wrap(poisoned(host.to(dtype))) if comes else host.to(dtype)
            return self._copy(target, args[0], given.get("non_blocking", False))
        if name == "copy_" and isinstance(args[0], GpuTensor) is not isinstance(args[1], GpuTensor):
            return self._copy(*args, **kwargs)
        return self._here(func, name, args, kwargs, is_here)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name in ("aten::pin_memory", "aten::_pin_memory"):
            memory = args[0].clone()
        elif kwargs.get("pin_memory"):
            memory = func(*args, **kwargs | {"pin_memory": False}).fill_(POISON_BYTE)
        else:
            return func(*args, **kwargs)
        self.own[memory.data_ptr()] = memory
        return memory

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        host, to, start = (
            (source, _value(target), "to the device")
            if isinstance(target, GpuTensor)
            else (target, target, "to the host")
        )
        self.copies[start] += self.is_late
        value = _value(source)
        if self.is_late:
            if host is target:
                host.copy_(poisoned(host))
            self.launch(lambda: to.copy_(value))
        else:
            to.copy_(value)
        if not non_blocking:
            self.count_wait(f"a copy {start} that is not non_blocking")
        elif host.nbytes and not self._is_pinned(host):
            self.count_wait(f"a copy {start} of memory that is not pinned")
        return target

    def _is_pinned(self, host: torch.Tensor) -> bool:
        at = host.data_ptr()
        return any(start <= at < start + own.nbytes for start, own in self.own.items())

    def _here(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], is_here: bool) -> Any:
        indices = args[1] if name in ("index", "index_put", "index_put_") else []
        for index in indices:
            if isinstance(index, torch.Tensor) and not isinstance(index, GpuTensor):
                self.copies["to the device"] += self.is_late
                self.count_wait("an index is copied from the host")
        for x in tree_leaves((args, kwargs)):
            if is_here and isinstance(x, torch.Tensor) and x.dim() and type(x) is not GpuTensor:
                is_index = any(x is index for index in indices)
                assert is_index, f"{name}: a tensor of the host beside one of the GPU"
        values, options = tree_map_only(GpuTensor, _value, (args, kwargs))
        values, options = tree_map_only(torch.device, lambda device: CPU, (values, options))
        with Launching(self):
            made = func(*values, **options)
        if func._schema.is_mutable:
            return args[0]
        return tree_map_only(torch.Tensor, self.wrap, made)

    def wrap(self, value: torch.Tensor) -> GpuTensor:
        return GpuTensor(value, self)

    # ------------------------------------------------------------------ kernels and graphs

    def interpreted(self, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **options: call(*tree_map_only(GpuTensor, _value, args), **options)

    def kernel(
        self, call: Callable[..., torch.Tensor], result: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        def launched(*args: Any, **options: Any) -> torch.Tensor:
            if not self.is_late:
                return self.wrap(_value(call(*args, **options)))
            with self.at_once():
                out = poisoned(_value(result(*args)))
            self.launch(lambda: out.copy_(_value(call(*args, **options))))
            return self.wrap(out)

        return launched

    def capture(
        self, forward: Callable[[], torch.Tensor], pool: list[int]
    ) -> tuple[Callable[[], None], torch.Tensor]:
        output = forward()
        pool.append(len(output))

        def replay() -> None:
            self.launch(lambda: output.value.copy_(forward().value))

        return replay, output


class GpuEvent(LateEvent):
    def synchronize(self) -> None:
        if self.cuda.num_run < self.place:
            self.cuda.waits["an event"] += self.cuda.is_late
        super().synchronize()


class _Dispatching(TorchDispatchMode):
    def __init__(self, gpu: GpuCuda) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.gpu.dispatch(func, args, kwargs or {})


def _value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.value if isinstance(tensor, GpuTensor) else tensor


def _has_tensor(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor | np.ndarray | list) for part in parts)


def allow_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch take `device="cuda"` where there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
