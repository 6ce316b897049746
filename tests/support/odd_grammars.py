"""Schemas and grammars at random: mostly possible ones, with some that nobody should write."""

import random
from typing import Any

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_PATTERNS = ("^[a-z]+$", "[0-9]{2,4}", "(a|b)*c", "\\d+-\\d+", "^(x|yz){1,3}$", "[", "(?=a)b", ".*")
_FORMATS = ("date", "date-time", "uuid", "email", "ipv4", "uri", "password", "nonsense")
_NUMBERS = (0, 1, -1, 3, 100, 2**31, 2**53, -(2**53), 0.5, 1e-9, 1e18, 10**25)
_TEXTS = ("a", "", "\u00e9", "\U0001f999", "a b", '"', "\\", "<|im_end|>", "x" * 300)


class OddSchemas:
    """Makes schemas out of one random generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_definitions = rng.choice((0, 0, 1, 3, 10, 40))

    def schema(self) -> dict[str, Any]:
        """Return a whole schema, with definitions that refer to each other as they like."""
        schema = self._any(4)
        if not isinstance(schema, dict):
            schema = {"anyOf": [schema]}
        if self._num_definitions:
            place = self._rng.choice(("$defs", "definitions"))
            self._place = place
            names = range(self._num_definitions)
            schema[place] = {f"d{i}": self._any(self._rng.randint(1, 3)) for i in names}
        return schema

    def _any(self, depth: int) -> Any:
        rng = self._rng
        if rng.random() < 0.03:
            return rng.choice((True, False, {}))
        if self._num_definitions and rng.random() < 0.25:
            place = rng.choice(("$defs", "definitions"))
            number = rng.randrange(self._num_definitions + (rng.random() < 0.02))
            return {"$ref": f"#/{place}/d{number}"}
        if depth > 0 and rng.random() < 0.2:
            word = rng.choice(("anyOf", "allOf", "oneOf"))
            return {word: [self._any(depth - 1) for _ in range(rng.randint(1, 4))]}
        if rng.random() < 0.1:
            values = [
                rng.choice((*_TEXTS, *_NUMBERS, None, True)) for _ in range(rng.randint(1, 5))
            ]
            return {"enum": values} if rng.random() < 0.7 else {"const": values[0]}
        return self._typed(rng.choice(_TYPES), depth)

    def _typed(self, kind: str, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": kind}
        if rng.random() < 0.05:
            schema["type"] = [kind, rng.choice(_TYPES)]
        if rng.random() < 0.1:
            schema[rng.choice(("title", "description", "x-note", "default"))] = rng.choice(_TEXTS)
        if kind == "object" and depth > 0:
            names = [f"p{i}" for i in range(rng.choice((0, 1, 2, 5)))]
            schema["properties"] = {name: self._any(depth - 1) for name in names}
            schema["required"] = [name for name in names if rng.random() < 0.6]
            if rng.random() < 0.5:
                schema["additionalProperties"] = rng.choice((False, True, self._any(depth - 1)))
            if rng.random() < 0.1:
                schema["patternProperties"] = {rng.choice(_PATTERNS): self._any(depth - 1)}
            if rng.random() < 0.1:
                schema[rng.choice(("minProperties", "maxProperties"))] = rng.choice((0, 1, 3, 50))
        elif kind == "array" and depth > 0:
            schema["items"] = self._any(depth - 1)
            if rng.random() < 0.3:
                schema["prefixItems"] = [self._any(depth - 1) for _ in range(rng.randint(1, 3))]
            for word in ("minItems", "maxItems"):
                if rng.random() < 0.3:
                    schema[word] = rng.choice((0, 1, 2, 1000, 10**9))
        elif kind == "string":
            word = rng.choice(("pattern", "format", "minLength", "maxLength", None))
            if word in ("pattern", "format"):
                schema[word] = rng.choice(_PATTERNS if word == "pattern" else _FORMATS)
            elif word is not None:
                schema[word] = rng.choice((0, 1, 20, 5000, 10**10))
        elif kind in ("integer", "number"):
            for word in ("minimum", "maximum", "exclusiveMinimum", "multipleOf"):
                if rng.random() < 0.2:
                    schema[word] = rng.choice(_NUMBERS)
        return schema


def odd_grammar(rng: random.Random) -> str:
    """Return a grammar in Lark's dialect or in GBNF, of up to 40 rules."""
    is_gbnf, number = rng.random() < 0.3, rng.choice((1, 3, 10, 40))
    names = [f"r{i}" for i in range(number)]
    terminals = [] if is_gbnf else [f"T{i}" for i in range(rng.randint(0, 5))]
    literals = ('"a"', '"bc"', '"\\n"', "[a-z]" if is_gbnf else "/[a-z]+/", '""')

    def part(depth: int, words: list[str]) -> str:
        text = rng.choice((*literals, *rng.choices(words, k=3))) if words else rng.choice(literals)
        if depth and rng.random() < 0.4:
            several = " ".join(part(depth - 1, words) for _ in range(rng.randint(1, 3)))
            text = f"({several})" if rng.random() < 0.7 else f"({several} | {text})"
        return text + rng.choice(("", "", "", "?", "*", "+", "{0,3}", "{2,900}"))

    def body(words: list[str]) -> str:
        alternatives = (
            " ".join(part(2, words) for _ in range(rng.randint(1, 4)))
            for _ in range(rng.randint(1, 3))
        )
        return " | ".join(alternatives)

    sign = "::=" if is_gbnf else ":"
    lines = [f"{'root' if is_gbnf else 'start'} {sign} {body(names)}"]
    lines += [f"{name} {sign} {body(names + terminals)}" for name in names]
    lines += [f"{name}: {body(terminals[:i])}" for i, name in enumerate(terminals)]
    text = "\n".join(lines)
    if rng.random() < 0.05:  # torn
        text = text[: rng.randrange(len(text))]
    return text or '"'
