"""Look up grammar backends by name, and import each when the first request needs it."""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

from xxhash import xxh3_128_digest

from nanoserve.features.structured.checker import Checker
from nanoserve.features.structured.compiler import Compiler
from nanoserve.features.structured.config import GRAMMAR_BACKENDS, StructuredOutputsConfig
from nanoserve.features.structured.grammar import Backend, Source
from nanoserve.features.structured.limits import check_bounds

_Key = tuple[str, str, str, bytes]

_MOST_KNOWN = 1024
# The latest checks, by backend and grammar: why it cannot be compiled, or None if it can.
_known: "OrderedDict[_Key, Future[str | None]]" = OrderedDict()
_checkers: dict[str, Checker] = {}
_lock = threading.Lock()


def check(library: str, source: Source) -> None:
    """Check a grammar without a tokenizer, which would take longer to load.

    library: the name of a backend.

    Raises `ValueError` if the grammar cannot be compiled, i.e. if it is too deep or too wide, the
    library rejects it, or compiling it takes too long or crashes.
    """
    key = (library, source.kind, source.whitespace, xxh3_128_digest(source.text.encode()))
    with _lock:
        known = _known.get(key)
        if known is not None:
            _known.move_to_end(key)
        else:
            mine = _known[key] = Future()
            while len(_known) > _MOST_KNOWN:
                _known.popitem(last=False)
    if known is None:
        known = mine
        try:
            mine.set_result(_fault(library, source))
        except BaseException as error:  # no verdict on the grammar: the next request checks again
            with _lock:
                if _known.get(key) is mine:
                    del _known[key]
            mine.set_exception(error)
    fault = known.result()
    if fault is not None:
        raise ValueError(f"structured_outputs: {source.kind}: {fault}")


def make_compiler(config: StructuredOutputsConfig, tokenizer: Any, vocab_size: int) -> Compiler:
    """Return a compiler that imports its backend when the first grammar is compiled."""
    name = config.backend_name

    def make() -> Backend:
        backend: Any = GRAMMAR_BACKENDS.get(name)
        return backend(tokenizer.backend, vocab_size)

    return Compiler(make)


def _fault(library: str, source: Source) -> str | None:
    try:
        check_bounds(source, library)
    except ValueError as error:
        return str(error)
    with _lock:
        if library not in _checkers:
            _checkers[library] = Checker(library)
        checker = _checkers[library]
    return checker.check(source)
