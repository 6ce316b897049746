"""A GPU that is a CPU, and does everything as late as it may.

What is launched lies in a queue until somebody waits for it; until then its results are poison. So
whatever the host reads too early, or overwrites before the device has read it, comes out as
another token.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fake_cuda import FakeCuda, FakeEvent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

POISON = -(2**40)


class LateCuda(FakeCuda):
    """At once while an engine is built; late from `is_late = True` on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        self.queue: deque[Callable[[], None]] = deque()
        self.num_run = 0  # of what has been in the queue
        self.longest = 0

    @contextmanager
    def guard(self) -> Iterator[None]:
        with Launching(self):
            yield

    @contextmanager
    def at_once(self) -> Iterator[None]:
        before, self.is_late = self.is_late, False
        yield
        self.is_late = before

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        with self.at_once():
            memory = super().pinned(*shape, dtype=dtype)
            return memory.fill_(POISON) if dtype == torch.int64 else memory

    def launch(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.longest = max(self.longest, len(self.queue))

    def run(self, until: int | None = None) -> None:
        """What was launched, up to the first `until` of all time."""
        with self.at_once(), torch.inference_mode():
            while self.queue and (until is None or self.num_run < until):
                self.queue.popleft()()
                self.num_run += 1

    def kernel(
        self, call: Callable[..., torch.Tensor], result: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        """`call`, one launch; what it returns is like `result`, of the same arguments."""

        def launched(*args: Any, **options: Any) -> torch.Tensor:
            if not self.is_late:
                return call(*args, **options)
            with self.at_once():
                out = poisoned(result(*args))
            self.launch(lambda: out.copy_(call(*args, **options)))
            return out

        return launched

    def interpreted(self, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a kernel of Triton's as one of this GPU's tensors."""
        return call

    def capture(self, *args: Any) -> Any:
        """As a real one's, which waits, and then runs what it records, now and not later."""
        self.synchronize()
        with self.at_once():
            return super().capture(*args)

    def event(self) -> "LateEvent":
        return LateEvent(self)

    def synchronize(self) -> None:
        super().synchronize()
        self.run()


class LateEvent(FakeEvent):
    def __init__(self, cuda: LateCuda) -> None:
        super().__init__()
        self.cuda, self.place = cuda, 0

    def record(self) -> None:
        super().record()
        self.place = self.cuda.num_run + len(self.cuda.queue)

    def synchronize(self) -> None:
        super().synchronize()
        self.cuda.run(self.place)


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Of the same shape, on the host: NaN, or integers that are neither tokens nor slots."""
    out = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
    if out.dtype == torch.bool:
        return out.fill_(True)
    if out.is_floating_point():
        return out.fill_(torch.nan)
    return out.fill_(max(POISON, torch.iinfo(out.dtype).min))


class Launching(TorchDispatchMode):
    """Within, every operation of torch is one that a GPU would be given."""

    def __init__(self, cuda: LateCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.cuda.is_late:
            return func(*args, **kwargs)
        assert "_local_scalar_dense" not in str(func), "this waits for the device"
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        schema = func._schema
        if schema.is_mutable:
            self.cuda.launch(lambda: func(*args, **kwargs))
            return args[0]
        if schema.returns and all(result.alias_info for result in schema.returns):
            return func(*args, **kwargs)  # a view: no memory is read
        if "empty" in schema.name:  # memory, and nothing that is launched
            return poisoned(func(*args, **kwargs))
        # Shapes come from tensors without memory: what needs to see values raises there.
        meta_args, meta_kwargs = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
        if "device" in meta_kwargs:
            meta_kwargs["device"] = torch.device("meta")
        shapes = func(*meta_args, **meta_kwargs)
        results = tree_map_only(torch.Tensor, poisoned, shapes)

        def work() -> None:
            made = func(*args, **kwargs)
            for result, one in zip(tree_leaves(results), tree_leaves(made), strict=True):
                result.copy_(one)

        self.cuda.launch(work)
        return results


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
