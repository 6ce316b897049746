"""Schemas of pydantic whose lists and dictionaries stop at their first wrong item.

By default each wrong item of a list becomes an error of its own, and of a union several: a body of
1 MiB made 1.1 GB of them.
"""

from typing import Any

from pydantic_core import core_schema

_KINDS = {"list": core_schema.ListSchema, "dict": core_schema.DictSchema}
# Older versions of pydantic know it of lists alone.
_STOPPING = [name for name, kind in _KINDS.items() if "fail_fast" in kind.__annotations__]


def stops_at_first_error(schema: Any) -> Any:
    """Change a core schema in place, all that it consists of included; returns it."""
    if isinstance(schema, dict):
        if schema.get("type") in _STOPPING:
            schema["fail_fast"] = True
        for inner in schema.values():
            stops_at_first_error(inner)
    elif isinstance(schema, (list, tuple)):
        for inner in schema:
            stops_at_first_error(inner)
    return schema
