"""Triton's interpreter: mended for a newer numpy, and spared what it has done already.

It sees the same values in the same order; only what is the same every time is not done anew.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any


def prepare() -> None:
    """Before a kernel is run, in every process that runs some. Without Triton there are none."""
    if find_spec("triton") is None:
        return
    import triton.runtime.interpreter as interpreter

    if version("triton").startswith("3.6."):
        _take_ints(interpreter)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang, interpreter.tl)
    interpreter._get_np_dtype = _by_element(interpreter._get_np_dtype)
    _leave_out_unseen_checks(interpreter.interpreter_builder)


@contextmanager
def equal_rows() -> Iterator[None]:
    """Let `tl.dot` compute all rows of a tile alike, as a GPU does.

    numpy's libraries compute the last rows of a matrix with other instructions than the first ones.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        rows, columns = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        total = np.zeros_like(d.data)
        for k in range(rows.shape[-1]):
            total += rows[..., :, k, None] * columns[..., k, None, :]
        return TensorHandle(total + d.data, d.dtype.scalar)

    original = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = create_dot
    try:
        yield
    finally:
        InterpreterBuilder.create_dot = original


@contextmanager
def only_inside(*tensors: Any) -> Iterator[None]:
    """Let loads and stores raise `IndexError` outside of these tensors.

    Those that a launcher makes with `new_empty` are allowed, too.
    """
    import numpy as np
    import torch
    from triton.runtime.interpreter import InterpreterBuilder

    def bounds_of(one: Any) -> tuple[int, int]:
        last = sum((n - 1) * step for n, step in zip(one.shape, one.stride(), strict=True))
        return one.data_ptr(), one.data_ptr() + last * one.element_size()

    bounds, make = [bounds_of(one) for one in tensors], torch.Tensor.new_empty
    names = ("create_masked_load", "create_masked_store")
    originals = {name: getattr(InterpreterBuilder, name) for name in names}

    def new_empty(self: Any, *args: Any, **options: Any) -> Any:
        made = make(self, *args, **options)
        bounds.extend([bounds_of(made)] * (made.numel() > 0))  # of none is a pointer, made later
        return made

    def checked(name: str) -> Callable[..., Any]:
        place_of_mask = names.index(name)

        def access(builder: Any, places: Any, *rest: Any) -> Any:
            mask = np.broadcast_to(rest[place_of_mask].data, places.data.shape).astype(bool)
            found = places.data[mask].astype(np.int64)
            is_inside = np.zeros(found.shape, bool)
            for first, last in bounds:
                is_inside |= (found >= first) & (found <= last)
            if not is_inside.all():
                raise IndexError(f"{name}: {np.count_nonzero(~is_inside)} addresses are outside")
            return originals[name](builder, places, *rest)

        return access

    torch.Tensor.new_empty = new_empty
    for name in names:
        setattr(InterpreterBuilder, name, checked(name))
    try:
        yield
    finally:
        torch.Tensor.new_empty = make
        for name, original in originals.items():
            setattr(InterpreterBuilder, name, original)


def _take_ints(interpreter: Any) -> None:
    """Triton 3.6 takes `int` of an array with one element, which numpy 2.4 no longer does."""
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_and_mend


def _leave_out_unseen_checks(builder: Any) -> None:
    """Half of the time went into sums of integers done again in 64 bits, which an assertion looks
    at that is none without `debug`."""
    if hasattr(builder.options, "sanitize_overflow") and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


class _Launch:
    """What a launch has patched of the language, until it restores it."""

    def __init__(self, scope: Any, patched: set[Any]) -> None:
        self._scope, self._patched = scope, patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


def _once_a_launch(patch: Callable[[Any], Any], language: Any) -> Callable[[Any], Any]:
    """Every call of a function from a kernel looks through all of the language for what to patch,
    a third of the time; after the launch's own look there is nothing left to find."""
    seen: dict[tuple[int, int], set[Any]] = {}
    patched: set[Any] = set()

    def patch_lang(fn: Any) -> Any:
        names = fn.__globals__
        key = id(names), len(names)  # rewriting a function adds some
        if key not in seen:
            modules = (language, language.core)
            seen[key] = {m for m in modules if any(value is m for value in names.values())}
        if patched and seen[key] <= patched:
            return None  # which a call does not look at
        patched.update(seen[key])
        return _Launch(patch(fn), patched)

    return patch_lang


def _by_element(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Which writes down a table of all types to look one up. A block's is that of its elements."""
    remembered = cache(np_dtype)

    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar
        return np_dtype(scalar) if scalar.is_ptr() else remembered(scalar)

    return look_up
