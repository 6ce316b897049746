"""Random values of the types with which a client library describes its requests."""

import random
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typing_extensions import NotRequired, Required, is_typeddict

_TEXTS = ["", "x", "script: text", "Hallo 🦙", "\u0000", "a" * 70]
_INTS = [0, 1, 2, 16, 100, -1, 2**40]
_FLOATS = [0.0, 0.5, 1.0, 2.0, -1.0]
_ODD = [None, "x", 5, -1, 0.5, True, [], {}, [{}], {"type": "x"}, [[]], "🦙", [None], {"a": {}}]
_DEEPEST = 5


def random_value(rng: random.Random, kind: Any, depth: int = 0) -> Any:
    """A value of a type, of which optional fields are often left out."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Required, NotRequired, typing.Annotated):
        return random_value(rng, args[0], depth)
    if origin in (typing.Union, types.UnionType):
        return random_value(rng, rng.choice(args), depth)
    if origin is Literal:
        return rng.choice(args)
    if is_typeddict(kind):
        return _dictionary(rng, kind, depth)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {rng.choice(_TEXTS): random_value(rng, args[1], depth + 1)}
    if isinstance(origin, type) and issubclass(origin, Iterable):
        number = rng.choice([0, 1, 1, 2]) if depth < _DEEPEST else 0
        return [random_value(rng, args[0], depth + 1) for _ in range(number)]
    simple = {str: _TEXTS, int: _INTS, float: _FLOATS, bool: [True, False], type(None): [None]}
    return rng.choice(simple.get(kind, [{"type": "object"}, {}, "x"]))


def _dictionary(rng: random.Random, kind: Any, depth: int) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    value = {}
    for name, hint in hints.items():
        is_needed = name in kind.__required_keys__
        if is_needed or rng.random() < (0.15 if depth == 0 else 0.3):
            value[name] = random_value(rng, hint, depth + 1)
    return value


def spoiled(rng: random.Random, value: Any) -> Any:
    """The same value with something odd in a random place of it."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice([*value])
        return value | {name: spoiled(rng, value[name])}
    if isinstance(value, Sequence) and not isinstance(value, str) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], spoiled(rng, value[place]), *value[place + 1 :]]
    return rng.choice(_ODD)
