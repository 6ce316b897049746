"""Replace JSON schema keywords that the grammar libraries do not support.

Each function changes the keywords of one schema in place. It drops keywords that constrain nothing,
replaces keywords that others can express, and raises `Unsupported` for the rest.
"""

import re
from typing import Any

_OF_TYPE = {
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
        *("dependencies", "unevaluatedProperties"),
    ),
    "array": (
        *("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains"),
        *("minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    ),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
ASSERTIONS = frozenset(
    (
        *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf"),
        *("not", "if", "then", "else", "const", "enum", "type"),
        *(name for names in _OF_TYPE.values() for name in names),
    )
)
APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
# The formats that the libraries enforce. Any other one is an annotation, as in the standard.
FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LOOKS = re.compile(r"\(\?(?:[=!]|<[=!])|(?<!\\)(?:\\\\)*\\(?:[1-9bB]|k<)")
# Look-aheads in the patterns that zod writes next to a format, which implies them.
_IMPLIED = {
    "email": (r"(?!\.)", r"(?!.*\.\.)"),
    "duration": (r"(?!.*W)", r"(?=\d|T\d)", r"(?=\d)"),
    "hostname": (r"(?=.{1,253}\.?$)",),
}
_LOCAL = ("time", "date-time")


class Unsupported(ValueError):
    """Raised if a keyword cannot be enforced. `keyword` is its name."""

    def __init__(self, keyword: str, why: str = " is not supported") -> None:
        super().__init__(f"{keyword}{why}")
        self.keyword = keyword


def allows_anything(schema: Any) -> bool:
    """Return True if a schema has no keyword that constrains values."""
    if isinstance(schema, dict):
        return not assertions_of(schema)
    return schema is True


def assertions_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that constrain values. A keyword set to null counts as missing.

    Many programs write null for a keyword that is not set.
    """
    kept = {k: v for k, v in schema.items() if k in ASSERTIONS and (v is not None or k == "const")}
    if "format" in kept and not (isinstance(kept["format"], str) and kept["format"] in FORMATS):
        del kept["format"]
    return kept


def dialect_of(root: dict[str, Any]) -> dict[str, str]:
    """Return `$schema` as the libraries spell it, or nothing if they do not know it."""
    for name in ("2020-12", "2019-09", "draft-07", "draft-06", "draft-04"):
        if name in str(root.get("$schema", "")):
            is_new = name[0] == "2"
            start = "https://json-schema.org/draft/" if is_new else "http://json-schema.org/"
            return {"$schema": f"{start}{name}/schema{'' if is_new else '#'}"}
    return {}


def drop_foreign(own: dict[str, Any]) -> None:
    """Drop keywords that apply only to types which the schema does not allow."""
    kinds = own.get("type")
    if isinstance(kinds, str | list):
        for kind, names in _OF_TYPE.items():
            if kind not in kinds and not (kind == "number" and "integer" in kinds):
                for name in names:
                    own.pop(name, None)


def replace_conditions(own: dict[str, Any]) -> None:
    """Replace `if`, `then`, `else` and `not` where their result does not depend on the value."""
    if "not" in own:
        if allows_anything(own["not"]):
            own.setdefault("allOf", [])
            own["allOf"] = [*own["allOf"], False]
        elif own["not"] is not False:
            raise Unsupported("not")
        del own["not"]
    if "if" in own and ("then" in own or "else" in own):
        condition = own["if"]
        branches = {name: own.get(name, True) for name in ("then", "else")}
        if allows_anything(condition) or condition is False:
            chosen = branches["else" if condition is False else "then"]
            own["allOf"] = [*own.get("allOf", []), chosen]
        elif not all(map(allows_anything, branches.values())):
            raise Unsupported("if")
    for name in ("if", "then", "else"):
        own.pop(name, None)


def replace_dependents(own: dict[str, Any]) -> None:
    """Replace `dependentRequired`, `dependentSchemas` and their older form, `dependencies`."""
    required = own.get("required")
    present = set(required) if isinstance(required, list) else set()
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needs in (own.pop(keyword, None) or {}).items():
            if isinstance(needs, list) and (set(needs) <= present or not needs):
                continue
            if isinstance(needs, dict | bool) and allows_anything(needs):
                continue
            if name not in present:
                raise Unsupported(keyword)
            wanted = {"required": needs} if isinstance(needs, list) else needs
            own["allOf"] = [*own.get("allOf", []), wanted]


def replace_unevaluated(own: dict[str, Any]) -> None:
    """Replace `unevaluatedProperties` and `unevaluatedItems` by their plain counterparts."""
    has_others = any(name in own for name in APPLICATORS)
    for keyword, plain in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        schema = own.pop(keyword, True)
        if allows_anything(schema) or (plain in own and not isinstance(own[plain], list)):
            continue
        if has_others:
            raise Unsupported(keyword, " next to allOf, anyOf, oneOf or $ref is not supported")
        own["additionalItems" if isinstance(own.get(plain), list) else plain] = schema


def replace_names(own: dict[str, Any], rule: Any) -> None:
    """Replace `propertyNames` by equivalent `properties` or `patternProperties`.

    rule: the value of `propertyNames`, with its reference resolved.
    """
    own.pop("propertyNames", None)
    wanted = assertions_of(rule) if isinstance(rule, dict) else {}
    if rule is False:
        own["maxProperties"] = 0
        return
    kinds = wanted.pop("type", "string")
    if kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
        own["maxProperties"] = 0
        return
    values = wanted.pop("enum", [wanted.pop("const")] if "const" in wanted else None)
    others = own.get("additionalProperties", True)
    known, patterns = own.get("properties", {}), own.get("patternProperties")
    if values is not None and not wanted and not patterns:
        names = [name for name in values if isinstance(name, str)]
        own["properties"] = {name: known.get(name, others) for name in names}
        own["additionalProperties"] = False
    elif wanted and not known and not patterns and wanted.keys() <= {"minLength", "maxLength"}:
        bounds = wanted.get("minLength", 0), wanted.get("maxLength", "")
        own["patternProperties"] = {f"^(?s:.){{{bounds[0]},{bounds[1]}}}$": others}
        own["additionalProperties"] = False
    elif wanted.keys() == {"pattern"} and not known and not patterns:
        own["patternProperties"] = {wanted["pattern"]: others}
        own["additionalProperties"] = False
    elif wanted or values is not None:
        raise Unsupported("propertyNames", f" with {sorted(wanted) or ['enum']} is not supported")


def replace_in_arrays(own: dict[str, Any]) -> None:
    """Replace `uniqueItems`, `contains`, `minContains`, `maxContains` and `additionalItems`."""
    if not isinstance(own.get("items"), list):
        own.pop("additionalItems", None)  # without a list of items it has no effect
    at_least, at_most = own.pop("minContains", 1), own.pop("maxContains", None)
    contains = own.pop("contains", None)
    if contains is not None and (at_least != 0 or at_most is not None):
        if not allows_anything(contains):
            raise Unsupported("contains")
        own["minItems"] = max(at_least, own.get("minItems", 0))
        if at_most is not None:
            own["maxItems"] = min(at_most, own.get("maxItems", at_most))
    if own.pop("uniqueItems", False) is True:
        most = own.get("maxItems")
        if not isinstance(most, int | float) or most > 1:
            raise Unsupported("uniqueItems")


def replace_in_strings(own: dict[str, Any]) -> None:
    """Remove look-aheads from `pattern` if the format next to it implies them.

    The formats "time" and "date-time" require a time zone, but zod's patterns do not. So they are
    dropped next to a pattern.
    """
    pattern, kind = own.get("pattern"), own.get("format")
    if not isinstance(pattern, str):
        return
    for implied in _IMPLIED.get(kind, ()) if isinstance(kind, str) else ():
        if kind == "hostname" and implied in pattern:
            own["maxLength"] = min(253, own.get("maxLength", 253))
        pattern = pattern.replace(implied, "")
    if kind in _LOCAL:
        del own["format"]
    found = _LOOKS.search(pattern)
    if found is not None:
        del own["pattern"]
        raise Unsupported("pattern", f" has {found[0]!r}, which is not supported")
    own["pattern"] = pattern


def replace_counts(own: dict[str, Any]) -> None:
    """Replace counts such as 2.0, an integer in JSON schema, by Python integers."""
    for name in _COUNTS:
        value = own.get(name)
        if isinstance(value, float) and value.is_integer():
            own[name] = int(value)
