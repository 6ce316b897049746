"""Make regular expressions match the same in Python, JavaScript and the grammar library.

A native library compiles the grammar, and the client may validate the output with Python's `re` or
another engine. Where engines differ, the expression is narrowed to what all of them match, or
rejected with an error that names the construct.
"""

import re

from nanoserve.utils.checks import require, shown

# \d matches digits of any script in Python and only ASCII ones in JavaScript, and for \w and \s all
# engines differ. So a positive class has what all engines match, and a negated one excludes what
# any of them matches.
_NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_WIDE = {"d": r"\d", "w": r"\w\p{N}", "s": r"\s\x1c-\x1f\x{FEFF}"}
_TOKENS = re.compile(
    r"(?P<escape>\\.)|(?P<possessive>[*+?}]\+)|(?P<posix>\[:)|(?P<set>&&|--|~~)|(?P<one>.)", re.S
)


def portable(regex: str, has_sets: bool = True) -> str:
    """Return an expression with character classes that all engines agree on.

    has_sets: True if the library supports nested classes and Unicode classes. Raises `ValueError`
    for constructs with different meanings: set operations, POSIX classes, possessive quantifiers.
    """
    parts, is_class, is_negated, first = [], False, False, 0
    for found in _TOKENS.finditer(regex):
        text, kind = found[0], found.lastgroup
        if kind == "escape":
            make = _class_of if has_sets else _flat_class_of
            parts.append(make(text, is_class, is_class and is_negated))
            continue
        if kind == "possessive" and is_class:  # in a class these are two characters
            kind = "one"
        is_operation = kind == "possessive" or (is_class and kind in ("posix", "set"))
        require(
            not is_operation,
            f"{text!r} in {shown(regex)} is not supported, because regex engines interpret it "
            f"differently; put a backslash before it, or rewrite it",
        )
        if not is_class and text.startswith("["):
            is_class, is_negated = True, regex[found.start() + 1 :][:1] == "^"
            first = found.start() + 1 + is_negated
        elif text == "]" and found.start() > first:  # as the first character it is a member
            is_class = False
        elif is_class:
            require(
                text != "[",
                f"'[' inside a class in {shown(regex)} needs a backslash before it",
            )
        parts.append(text)
    return "".join(parts)


def _class_of(escape: str, is_class: bool, is_negated: bool) -> str:
    """Return the class that replaces an escape such as `\\d`.

    is_negated: True inside a negated class.
    """
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
    require(is_known, f"{escape!r} is not supported here; list the characters instead")
    return _NARROW[name] if is_class else f"[{_NARROW[name]}]"
