"""Random JSON schemas and regular expressions, as somebody might write them."""

import random
from typing import Any

_NAMES = [
    "name",
    "id",
    "tags",
    "is_active",
    "first name",
    "\u00fcber",
    "a/b",
    'quo"te',
    "\u540d\u524d",
    "$x",
]
_WORDS = ["red", "green", "block table", "\u5757\u8868", 'say "hi"', "tab\there", "back\\slash", ""]
_PATTERNS = [
    "^[a-z]{2,5}$",
    r"^\d{3}-\d{4}$",
    "^(foo|bar)+$",
    "[0-9]",
    r"^\w+@\w+\.com$",
    "^.{0,4}$",
]
_FORMATS = ["date", "uuid", "ipv4", "time"]


class RandomSchema:
    """`schema`: one that can be satisfied. All of it is what llguidance knows."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"schema {seed}")
        self._definitions: dict[str, Any] = {}
        self._num_refs = 0
        self.schema = self._object(0) if self._rng.random() < 0.7 else self._any(0)
        if self._definitions:
            self.schema = self.schema | {"$defs": self._definitions}

    def _any(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        leaves = [self._string, self._integer, self._number, self._constant, self._several]
        if depth >= 3:
            return rng.choice(leaves)(depth)
        nested = [self._object, self._object, self._array, self._tuple, self._either, self._ref]
        return rng.choice([*leaves, *nested])(depth)

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(1, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
        }
        others = rng.choice([False, False, False, "any", "given", "by pattern"])
        if others is False:
            schema["additionalProperties"] = False
        elif others == "given":
            schema["additionalProperties"] = self._any(3)
        elif others == "by pattern":
            schema["additionalProperties"] = False
            schema["patternProperties"] = {"^x-[a-c]{1,3}$": self._any(3)}
        if rng.random() < 0.2:
            schema["description"] = "what nobody need obey"
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema = {"type": "array", "items": self._any(depth + 1)}
        low = self._rng.randint(0, 2)
        if self._rng.random() < 0.8:
            schema |= {"minItems": low, "maxItems": low + self._rng.randint(0, 2)}
        return schema

    def _tuple(self, depth: int) -> dict[str, Any]:
        items = [self._any(depth + 1) for _ in range(self._rng.randint(1, 3))]
        schema = {"type": "array", "prefixItems": items, "items": False}
        return schema | ({"minItems": len(items)} if self._rng.random() < 0.7 else {})

    def _either(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"anyOf": [self._any(depth + 1), self._any(depth + 1)]}
        return schema

    def _ref(self, depth: int) -> dict[str, Any]:
        """To itself too: a list, or a tree."""
        self._num_refs += 1
        name = f"n{self._num_refs}"
        ref = {"$ref": f"#/$defs/{name}"}
        self._definitions[name] = {
            "type": "object",
            "properties": {"value": self._any(3), "next": {"anyOf": [{"type": "null"}, ref]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return ref

    def _string(self, depth: int) -> dict[str, Any]:
        rng, schema = self._rng, {"type": "string"}
        kind = rng.choice(["length", "length", "pattern", "format", "enum", "both"])
        if kind == "enum":
            return schema | {"enum": rng.sample(_WORDS, rng.randint(1, 3))}
        if kind == "format":
            return schema | {"format": rng.choice(_FORMATS)}
        if kind == "pattern":
            return schema | {"pattern": rng.choice(_PATTERNS)}
        if kind == "both":
            return schema | {"pattern": "^[a-z]*$", "minLength": 1, "maxLength": 4}
        low = rng.randint(0, 3)
        return schema | {"minLength": low, "maxLength": low + rng.randint(0, 5)}

    def _integer(self, depth: int) -> dict[str, Any]:
        rng, low = self._rng, self._rng.randint(-1000, 1000)
        schema: dict[str, Any] = {"type": "integer"}
        kind = rng.choice(["range", "exclusive", "multiple"])
        if kind == "range":
            return schema | {"minimum": low, "maximum": low + rng.randint(0, 300)}
        if kind == "exclusive":
            return schema | {
                "exclusiveMinimum": low,
                "exclusiveMaximum": low + 2 + rng.randint(0, 9),
            }
        return schema | {"multipleOf": rng.choice([2, 5, 10]), "minimum": 0, "maximum": 1000}

    def _number(self, depth: int) -> dict[str, Any]:
        low = round(self._rng.uniform(-10, 10), 2)
        # Rounded too: -4.32 + 0.5 is less than -3.82, by less than llguidance looks at.
        high = round(low + self._rng.choice([0.5, 1, 100]), 2)
        return {"type": "number", "minimum": low, "maximum": high}

    def _constant(self, depth: int) -> dict[str, Any]:
        values = [*_WORDS, 0, 1.5, True, None, [1, "a"], {"k": [None]}]
        if self._rng.random() < 0.3:
            return {"const": self._rng.choice(values)}
        return {"enum": self._rng.sample(values, self._rng.randint(1, 4))}

    def _several(self, depth: int) -> dict[str, Any]:
        kinds = self._rng.sample(["string", "integer", "boolean", "null"], 2)
        return {"type": kinds, "maxLength": 4, "maximum": 99}


def random_regex(seed: int) -> str:
    """What Python reads as the engine does, and whatever matches it is a few dozen characters."""
    return _alternatives(random.Random(f"regex {seed}"), 0)


def _alternatives(rng: random.Random, depth: int) -> str:
    branches = [_sequence(rng, depth) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    return "|".join(branches)


def _sequence(rng: random.Random, depth: int) -> str:
    return "".join(_repeated(rng, depth) for _ in range(rng.randint(1, 4)))


def _repeated(rng: random.Random, depth: int) -> str:
    atom, low = _atom(rng, depth), rng.randint(0, 3)
    counts = ["", "", "", "?", "*", "+", f"{{{low}}}", f"{{{low},{low + rng.randint(0, 4)}}}"]
    count = rng.choice([*counts, f"{{{low},}}"])
    return atom + count + (rng.choice(["", "?"]) if count and count != "?" else "")


def _atom(rng: random.Random, depth: int) -> str:
    if depth < 3 and rng.random() < 0.3:
        return (
            rng.choice(["(", "(?:", f"(?P<g{rng.randrange(10**9)}>"])
            + _alternatives(rng, depth + 1)
            + ")"
        )
    literals = [
        "a",
        "block",
        " ",
        "\\.",
        "\\\\",
        "\\+",
        "\u00e9",
        "\u5757",
        "#",
        '"',
        "/",
        "-",
        "_",
        ",",
    ]
    classes = [
        "[a-z]",
        "[^a-z]",
        "[A-Za-z0-9_]",
        r"[\w.-]",
        r"[^\s,]",
        "[\u4e00-\u4e10]",
        "[]x]",
        "[+*/-]",
    ]
    escapes = [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "."]
    return rng.choice([*literals, *classes, *escapes])
