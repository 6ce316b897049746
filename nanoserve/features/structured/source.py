"""A grammar as it was given, in the form in which it is compared, compiled and kept."""

from typing import NamedTuple


class Source(NamedTuple):
    """A grammar as text: equal ones are compiled once.

    kind: "json" (a schema), "regex", "choice" (a JSON list), "grammar" or "structural_tag".
    whitespace: a pattern for what may stand between the parts of JSON, "" for nothing but a space
    behind each comma and colon.
    """

    kind: str
    text: str
    whitespace: str = ""
