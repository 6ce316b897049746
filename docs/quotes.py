"""Quotations of source on pages, read from the files and never copied by hand."""

import ast
import posixpath
from textwrap import dedent
from typing import Any

import facts
import yaml

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def quote(said: str, page: str) -> str:
    """Return Markdown for `::: symbol` with mkdocstrings' options, as plain pages show it.

    page: its path relative to the repository. A quotation is a link to the file and the code;
    with `show_source: false`, as on the page of the API, signature and docstring; with `from:` and
    `to:`, the part between two lines, which are identified by their beginnings.
    """
    symbol, options = symbol_and_options(said)
    file = facts.file_of(symbol)
    if file is None:
        raise ValueError(f"no file defines {symbol}")
    link = posixpath.relpath(file, posixpath.dirname(page))
    if options.get("show_source") is False:
        code = _signatures(symbol, options)
    elif is_piece(options):
        code = _piece(symbol, options)
    else:
        code = _source(symbol, options)
    title = _title(f"[`{name_in_file(symbol)}`]({link})", file, is_piece(options), page)
    return f"{title}\n\n```python\n{code}\n```"


def _title(symbol: str, file: str, is_part: bool, page: str) -> str:
    """Return the line above the code, in the language of the page."""
    if page.startswith("docs/zh/"):
        return f"`{file}` 中的 {symbol}{'（一部分）' * is_part}"
    return f"{'From ' * is_part}{symbol} in `{file}`"


def is_piece(options: dict[str, Any]) -> bool:
    """Return True if a quotation is a part of a function, which mkdocstrings cannot show."""
    return "from" in options or "to" in options


def symbol_and_options(said: str) -> tuple[str, dict[str, Any]]:
    first, _, rest = said.partition("\n")
    return first.split()[1], (yaml.safe_load(dedent(rest)) or {}).get("options", {})


def name_in_file(symbol: str) -> str:
    """`Scheduler.schedule` for `nanoserve.engine.scheduler.Scheduler.schedule`."""
    module = facts.module_of(symbol)
    return symbol.removeprefix(f"{module}.")


def find(symbol: str) -> tuple[ast.stmt, list[str]]:
    """Return the statement that defines a symbol, and the lines of its file."""
    text = (facts.ROOT / facts.file_of(symbol)).read_text(encoding="utf-8")
    body = ast.parse(text).body
    for part in name_in_file(symbol).split("."):
        node = next((each for each in body if part in _names(each)), None)
        if node is None:
            raise ValueError(f"{facts.file_of(symbol)} does not define {symbol}")
        body = getattr(node, "body", [])
    return node, text.splitlines()


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, Definition):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _source(symbol: str, options: dict[str, Any]) -> str:
    node, lines = find(symbol)
    members = options.get("members", [])
    if not members:
        return _text(node, lines)
    head = _head(node, lines)
    parts = [_text(find(f"{symbol}.{member}")[0], lines) for member in members]
    indented = ["\n".join(f"    {line}".rstrip() for line in part.splitlines()) for part in parts]
    return "\n\n".join([head, *indented])


def _piece(symbol: str, options: dict[str, Any]) -> str:
    """Return the lines from one to another, with all of a statement that begins in the last."""
    node, lines = find(symbol)
    for name in ("from", "to"):
        if not isinstance(options.get(name), str):
            raise ValueError(f"{symbol}: give a piece `from:` and `to:`, how two lines begin")
    first, last = (_line(symbol, options[name], node, lines) for name in ("from", "to"))
    if last < first:
        raise ValueError(f"{symbol}: {options['to']!r} comes before {options['from']!r}")
    ends = [
        each.end_lineno
        for each in ast.walk(node)
        if isinstance(each, ast.stmt) and each.lineno == last and not hasattr(each, "body")
    ]
    return dedent("\n".join(lines[first - 1 : max(ends, default=last)]))


def _line(symbol: str, beginning: str, node: ast.stmt, lines: list[str]) -> int:
    """Return the number of the only line of a definition that begins in this way."""
    numbers = range(node.lineno, node.end_lineno + 1)
    found = [number for number in numbers if lines[number - 1].strip().startswith(beginning)]
    if len(found) != 1:
        raise ValueError(f"{symbol}: {len(found)} lines begin with {beginning!r}, and one must")
    return found[0]


def _signatures(symbol: str, options: dict[str, Any]) -> str:
    node, lines = find(symbol)
    parts = [_head(node, lines)]
    for member in options.get("members", []):
        head = _head(find(f"{symbol}.{member}")[0], lines)
        parts.append("\n".join(f"    {line}".rstrip() for line in head.splitlines()))
    return "\n\n".join(parts)


def _text(node: ast.stmt, lines: list[str]) -> str:
    return dedent("\n".join(lines[_first_line(node) - 1 : node.end_lineno]))


def _head(node: ast.stmt, lines: list[str]) -> str:
    """Return a definition up to the end of its docstring."""
    first, *_ = node.body
    has_docstring = ast.get_docstring(node) is not None
    last = first.end_lineno if has_docstring else first.lineno - 1
    return dedent("\n".join(lines[_first_line(node) - 1 : last]))


def _first_line(node: ast.stmt) -> int:
    """Return the number of the first line, decorators included."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
