"""Who knows grammars, by name; each is imported when the first request asks for it."""

from functools import lru_cache, partial
from typing import Any

from nanoserve.structured.compiler import Compiler
from nanoserve.structured.config import StructuredOutputsConfig
from nanoserve.structured.source import Source

_FEW = 2**14  # characters of a grammar that is worth remembering that it is good


def check(library: str, source: Source) -> None:
    """Raise `ValueError` for what cannot be compiled; without a tokenizer, which takes longer."""
    check = _check_once if len(source.text) <= _FEW else _check
    check(library, source)


def make_compiler(config: StructuredOutputsConfig, tokenizer: Any, vocab_size: int) -> Compiler:
    if config.library == "xgrammar":
        from nanoserve.structured.xgrammar import XGrammar

        return Compiler(partial(XGrammar, tokenizer.backend, vocab_size))
    from nanoserve.structured.guidance import Guidance

    return Compiler(partial(Guidance, tokenizer.backend, vocab_size))


def _check(library: str, source: Source) -> None:
    if library == "xgrammar":
        from nanoserve.structured.xgrammar import check
    else:
        from nanoserve.structured.guidance import check
    try:
        check(source)
    except ValueError as error:
        raise ValueError(f"structured_outputs: {source.kind}: {error}") from None


_check_once = lru_cache(maxsize=256)(_check)
