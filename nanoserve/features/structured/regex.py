"""Regular expressions that mean the same to Python, to JavaScript and to whoever computes them.

A grammar is computed by a library of Rust's, and its output is judged by Python's `re`, or by
whatever a client has. Where these differ, either all of them are obeyed, or it is refused by name.
"""

import re

from nanoserve.utils.checks import require, shown

# A digit of any script is one to Python and none to JavaScript, and on what a letter or a space is
# all differ. So of what is allowed, only what everybody allows; of what is not, what anybody means.
_NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_WIDE = {"d": r"\d", "w": r"\w\p{N}", "s": r"\s\x1c-\x1f\x{FEFF}"}
_TOKENS = re.compile(
    r"(?P<escape>\\.)|(?P<possessive>[*+?}]\+)|(?P<posix>\[:)|(?P<set>&&|--|~~)|(?P<one>.)", re.S
)


def portable(regex: str, has_sets: bool = True) -> str:
    """The same, with classes that everybody agrees on. Raises `ValueError` for what is understood
    in different ways: operations on sets, POSIX classes, possessive quantifiers.

    has_sets: whether whoever computes it knows classes within classes, and Unicode's.
    """
    parts, is_class, is_negated, first = [], False, False, 0
    for found in _TOKENS.finditer(regex):
        text, kind = found[0], found.lastgroup
        if kind == "escape":
            make = _class_of if has_sets else _flat_class_of
            parts.append(make(text, is_class, is_class and is_negated))
            continue
        if kind == "possessive" and is_class:  # two characters of a class
            kind = "one"
        is_operation = kind == "possessive" or (is_class and kind in ("posix", "set"))
        require(
            not is_operation,
            f"{text!r} in {shown(regex)} means one thing here and another there: put a backslash "
            f"before it, or say it in another way",
        )
        if not is_class and text.startswith("["):
            is_class, is_negated = True, regex[found.start() + 1 :][:1] == "^"
            first = found.start() + 1 + is_negated
        elif text == "]" and found.start() > first:  # as the first of a class it is one of it
            is_class = False
        elif is_class:
            require(
                text != "[",
                f"'[' inside of a class in {shown(regex)} needs a backslash before it",
            )
        parts.append(text)
    return "".join(parts)


def _class_of(escape: str, is_class: bool, is_negated: bool) -> str:
    """What stands for an escape such as `\\d`, in a class of what is not allowed, or elsewhere."""
    name = escape[1]
    if name.lower() not in _NARROW:
        return escape
    if name.islower():
        return f"[{(_WIDE if is_negated else _NARROW)[name]}]"
    return f"[^{(_NARROW if is_negated else _WIDE)[name.lower()]}]"


def _flat_class_of(escape: str, is_class: bool, is_negated: bool) -> str:
    name = escape[1]
    if name.lower() not in _NARROW:
        return escape
    is_known = name.islower() and not is_negated
    require(is_known, f"{escape!r} is not supported there: list the characters that are meant")
    return _NARROW[name] if is_class else f"[{_NARROW[name]}]"
