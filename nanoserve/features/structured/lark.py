"""JSON schemas within grammars in llguidance's dialect of Lark."""

import json
from typing import Any

# llguidance's options for JSON with exactly one space after each comma and colon.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: str, options: dict[str, Any]) -> str:
    """Return the right-hand side of a Lark rule for JSON that is valid under a schema.

    schema: a JSON object, as text. options: llguidance's, such as `COMPACT`.
    """
    rest = schema.lstrip()[1:].lstrip()
    own = json.dumps({"x-guidance": options})[:-1]
    return f"%json {own}{', ' if rest != '}' else ''}{rest}"
