"""Classes and functions that are found by name, and imported when they are first needed."""

from collections.abc import Mapping
from importlib import import_module
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """What there is of one kind, by name: models, attention backends, heads, draft methods, ...

    An entry is the thing itself, or "package.module:Name", which is imported by `get`. Other
    processes, such as the ranks of a model, import theirs: they are handed the entries.
    """

    def __init__(self, kind: str, entries: Mapping[str, str | T]) -> None:
        """`kind` says in error messages what the entries are: "architecture"."""
        self.kind = kind
        self._entries = dict(entries)

    def register(self, name: str, entry: str | T) -> None:
        """Add one of your own. To add the same entry again changes nothing.

        Raises `ValueError` for a name that another entry has, and for a text that is no location.
        """
        if self._entries.get(name, entry) != entry:
            raise ValueError(f"{self.kind} {name!r} is registered already")
        if isinstance(entry, str):
            _split(entry)
        self._entries[name] = entry

    def names(self) -> list[str]:
        """Return all names, in the order in which they were registered."""
        return list(self._entries)

    def entries(self) -> dict[str, str | T]:
        """Return what was registered, by name, for another process."""
        return dict(self._entries)

    def entry(self, name: str) -> str | T:
        """Return what was registered. Raises `ValueError`, with all names, for an unknown name."""
        if name not in self._entries:
            raise ValueError(f"{self.kind} {name!r:.80} is none of {self.names()}")
        return self._entries[name]

    def get(self, name: str) -> T:
        """Return the thing itself, which this imports if need be."""
        entry = self.entry(name)
        if not isinstance(entry, str):
            return entry
        module, attribute = _split(entry)
        return getattr(import_module(module), attribute)


def _split(location: str) -> tuple[str, str]:
    module, _, attribute = location.partition(":")
    if not module or not attribute or ":" in attribute:
        raise ValueError(f"{location!r:.80} must be a class or 'package.module:Class'")
    return module, attribute
