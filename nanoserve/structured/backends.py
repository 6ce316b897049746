"""Who knows grammars, by name; each is imported when the first request asks for it."""

from collections import OrderedDict
from functools import partial
from typing import Any

from xxhash import xxh3_128_digest

from nanoserve.structured.compiler import Compiler
from nanoserve.structured.config import StructuredOutputsConfig
from nanoserve.structured.source import Source

_MOST_KNOWN = 1024
# By library and source, why it cannot be compiled, or None: the last ones that were asked for.
_known: "OrderedDict[tuple[str, str, str, bytes], str | None]" = OrderedDict()


def check(library: str, source: Source) -> None:
    """Raise `ValueError` for what cannot be compiled; without a tokenizer, which takes longer."""
    key = (library, source.kind, source.whitespace, xxh3_128_digest(source.text.encode()))
    if key not in _known:
        _known[key] = _fault(library, source)
        while len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    fault = _known.get(key)
    if fault is not None:
        raise ValueError(f"structured_outputs: {source.kind}: {fault}")


def make_compiler(config: StructuredOutputsConfig, tokenizer: Any, vocab_size: int) -> Compiler:
    if config.backend_name == "xgrammar":
        from nanoserve.structured.xgrammar import XGrammar

        return Compiler(partial(XGrammar, tokenizer.backend, vocab_size))
    from nanoserve.structured.guidance import Guidance

    return Compiler(partial(Guidance, tokenizer.backend, vocab_size))


def _fault(library: str, source: Source) -> str | None:
    if library == "xgrammar":
        from nanoserve.structured.xgrammar import check
    else:
        from nanoserve.structured.guidance import check
    try:
        check(source)
    except ValueError as error:
        return str(error)
    return None
