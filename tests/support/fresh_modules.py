"""What a new process would import, without one: to start Python and torch takes a second."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fresh_modules(*packages: str) -> Iterator[None]:
    """Within, nothing of these packages is imported yet; afterwards all modules are as before.

    What is imported within is other objects than what the tests hold: their classes are not equal.
    """
    before = {name: module for name, module in sys.modules.items() if _is_of(name, packages)}
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_of(name, packages)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_of(name: str, packages: tuple[str, ...]) -> bool:
    return name.partition(".")[0] in packages
