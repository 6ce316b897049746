"""JSON schemas within grammars in llguidance's dialect of Lark."""

import json
from typing import Any

# JSON in one way, with a space behind each comma and colon.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: str, options: dict[str, Any]) -> str:
    """Return what a rule consists of whose text is JSON by a schema, which is an object as text."""
    rest = schema.lstrip()[1:].lstrip()
    own = json.dumps({"x-guidance": options})[:-1]
    return f"%json {own}{', ' if rest != '}' else ''}{rest}"
