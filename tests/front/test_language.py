"""The language of the package: plain technical English, in sentences."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import nanoserve

PACKAGE = Path(nanoserve.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
# A docstring that begins with one of these is a fragment whose subject is the function's name.
BAD_START = re.compile(r"(Of|Who|Whether|Those|And|As|What|Which|Where|How|If|But|Also)\b")
# Words for which the field has a term: executor, draft token, request, validate, ...
BAD_WORDS = re.compile(
    r"(?<![a-z])(muscle|brain|whoever|somebody|nobody|anybody|told|asked|tells?|asks"
    r"|guess(?:es|ed|ing)?|wishes|misfits?)(?![a-z])",
    re.IGNORECASE,
)
# A file format: traces that were recorded have this key.
ALLOWED = {
    "features/trace/recorder.py": {"guesses"},
    "cli/simulate/replay.py": {"guesses"},
}


def bad_starts(source: str) -> list[str]:
    """Return the first lines of docstrings that begin with such a word."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    texts = (ast.get_docstring(node) or "" for node in nodes)
    return [text.splitlines()[0] for text in texts if BAD_START.match(text)]


def bad_words(source: str) -> set[str]:
    """Return the banned words of docstrings, comments, messages and names."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {word.lower() for token in tokens for word in BAD_WORDS.findall(token.string)}


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_in_plain_english(file: str) -> None:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    assert not bad_starts(source), "begin with a verb, or with what it is"
    assert bad_words(source) <= ALLOWED.get(file, set()), "use the term of the field"


def test_fragments_and_words_are_found() -> None:
    source = '"""Module: fine."""\n\n\ndef _tell(told):\n    """Of whoever calls."""  # no brain\n'
    assert bad_starts(source) == ["Of whoever calls."]
    assert bad_words(source) == {"tell", "told", "whoever", "brain"}
