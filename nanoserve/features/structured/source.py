"""Grammars as text: the key by which they are compared, checked, compiled and cached."""

from typing import NamedTuple


class Source(NamedTuple):
    """Grammar as text. Equal ones are compiled once.

    kind: "json" (a schema), "regex", "choice" (a JSON list), "grammar" or "structural_tag".
    text: the grammar.
    whitespace: a regular expression for the whitespace between the parts of JSON; "" allows only
    the one space after each comma and colon.
    """

    kind: str
    text: str
    whitespace: str = ""
