"""Keywords of JSON schema that the libraries do not know, in words that they do.

Each function takes the keywords of one schema and changes them in place. What asks for nothing is
dropped, what can be said in another way is said so, and the rest is named by an `Unsupported`.
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
# What the libraries enforce. Any other format is an annotation, as it is in the standard.
FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LOOKS = re.compile(r"\(\?(?:[=!]|<[=!])|(?<!\\)(?:\\\\)*\\(?:[1-9bB]|k<)")
# Look-aheads that the format beside them implies: zod writes these.
_IMPLIED = {
    "email": (r"(?!\.)", r"(?!.*\.\.)"),
    "duration": (r"(?!.*W)", r"(?=\d|T\d)", r"(?=\d)"),
    "hostname": (r"(?=.{1,253}\.?$)",),
}
_LOCAL = ("time", "date-time")


class Unsupported(ValueError):
    """A keyword that no output can be made to obey; `keyword` is its name."""

    def __init__(self, keyword: str, why: str = " is not supported") -> None:
        super().__init__(f"{keyword}{why}")
        self.keyword = keyword


def asks_nothing(schema: Any) -> bool:
    """Tell whether anything is valid under a schema, as far as its own keywords say."""
    if isinstance(schema, dict):
        return not assertions_of(schema)
    return schema is True


def assertions_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that ask for something; null, which many programs write, is no value."""
    kept = {k: v for k, v in schema.items() if k in ASSERTIONS and (v is not None or k == "const")}
    if "format" in kept and not (isinstance(kept["format"], str) and kept["format"] in FORMATS):
        del kept["format"]
    return kept


def dialect_of(root: dict[str, Any]) -> dict[str, str]:
    """Return `$schema` as the libraries know it, however it is spelled; nothing if they do not."""
    for name in ("2020-12", "2019-09", "draft-07", "draft-06", "draft-04"):
        if name in str(root.get("$schema", "")):
            is_new = name[0] == "2"
            start = "https://json-schema.org/draft/" if is_new else "http://json-schema.org/"
            return {"$schema": f"{start}{name}/schema{'' if is_new else '#'}"}
    return {}


def drop_foreign(own: dict[str, Any]) -> None:
    """Drop what is said of values of other types than those that are allowed."""
    kinds = own.get("type")
    if isinstance(kinds, str | list):
        for kind, names in _OF_TYPE.items():
            if kind not in kinds and not (kind == "number" and "integer" in kinds):
                for name in names:
                    own.pop(name, None)


def replace_conditions(own: dict[str, Any]) -> None:
    """`if`, `then`, `else` and `not`, where one of them decides alone."""
    if "not" in own:
        if asks_nothing(own["not"]):
            own.setdefault("allOf", [])
            own["allOf"] = [*own["allOf"], False]
        elif own["not"] is not False:
            raise Unsupported("not")
        del own["not"]
    if "if" in own and ("then" in own or "else" in own):
        condition = own["if"]
        branches = {name: own.get(name, True) for name in ("then", "else")}
        if asks_nothing(condition) or condition is False:
            chosen = branches["else" if condition is False else "then"]
            own["allOf"] = [*own.get("allOf", []), chosen]
        elif not all(map(asks_nothing, branches.values())):
            raise Unsupported("if")
    for name in ("if", "then", "else"):
        own.pop(name, None)


def replace_dependents(own: dict[str, Any]) -> None:
    """`dependentRequired`, `dependentSchemas` and their older form, `dependencies`."""
    required = own.get("required")
    present = set(required) if isinstance(required, list) else set()
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needs in (own.pop(keyword, None) or {}).items():
            if isinstance(needs, list) and (set(needs) <= present or not needs):
                continue
            if isinstance(needs, dict | bool) and asks_nothing(needs):
                continue
            if name not in present:
                raise Unsupported(keyword)
            wanted = {"required": needs} if isinstance(needs, list) else needs
            own["allOf"] = [*own.get("allOf", []), wanted]


def replace_unevaluated(own: dict[str, Any]) -> None:
    """`unevaluatedProperties` and `unevaluatedItems`."""
    has_others = any(name in own for name in APPLICATORS)
    for keyword, plain in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        schema = own.pop(keyword, True)
        if asks_nothing(schema) or (plain in own and not isinstance(own[plain], list)):
            continue
        if has_others:
            raise Unsupported(keyword, " beside allOf, anyOf, oneOf or $ref is not supported")
        own["additionalItems" if isinstance(own.get(plain), list) else plain] = schema


def replace_names(own: dict[str, Any], rule: Any) -> None:
    """`propertyNames`, which is `rule`, by properties or patterns that say the same."""
    own.pop("propertyNames", None)
    asked = assertions_of(rule) if isinstance(rule, dict) else {}
    if rule is False:
        own["maxProperties"] = 0
        return
    kinds = asked.pop("type", "string")
    if kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
        own["maxProperties"] = 0
        return
    values = asked.pop("enum", [asked.pop("const")] if "const" in asked else None)
    others = own.get("additionalProperties", True)
    known, patterns = own.get("properties", {}), own.get("patternProperties")
    if values is not None and not asked and not patterns:
        names = [name for name in values if isinstance(name, str)]
        own["properties"] = {name: known.get(name, others) for name in names}
        own["additionalProperties"] = False
    elif asked and not known and not patterns and asked.keys() <= {"minLength", "maxLength"}:
        bounds = asked.get("minLength", 0), asked.get("maxLength", "")
        own["patternProperties"] = {f"^(?s:.){{{bounds[0]},{bounds[1]}}}$": others}
        own["additionalProperties"] = False
    elif asked.keys() == {"pattern"} and not known and not patterns:
        own["patternProperties"] = {asked["pattern"]: others}
        own["additionalProperties"] = False
    elif asked or values is not None:
        raise Unsupported("propertyNames", f" with {sorted(asked) or ['enum']} is not supported")


def replace_in_arrays(own: dict[str, Any]) -> None:
    """`uniqueItems`, `contains` and its counts, and `additionalItems`."""
    if not isinstance(own.get("items"), list):
        own.pop("additionalItems", None)  # as the standard says
    at_least, at_most = own.pop("minContains", 1), own.pop("maxContains", None)
    contains = own.pop("contains", None)
    if contains is not None and (at_least != 0 or at_most is not None):
        if not asks_nothing(contains):
            raise Unsupported("contains")
        own["minItems"] = max(at_least, own.get("minItems", 0))
        if at_most is not None:
            own["maxItems"] = min(at_most, own.get("maxItems", at_most))
    if own.pop("uniqueItems", False) is True:
        most = own.get("maxItems")
        if not isinstance(most, int | float) or most > 1:
            raise Unsupported("uniqueItems")


def replace_in_strings(own: dict[str, Any]) -> None:
    """`pattern`: look-aheads go where the format beside them says the same.

    A format of times asks for a zone, which zod's patterns leave out: there the pattern holds.
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
    """2.0 is an integer in JSON schema."""
    for name in _COUNTS:
        value = own.get(name)
        if isinstance(value, float) and value.is_integer():
            own[name] = int(value)
