"""Registries of classes and functions by name, which are imported on first use."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of entries of one kind, such as models, attention backends or heads, by name.

    An entry is the object itself, or "package.module:Name", which `get` imports. Other processes,
    such as the ranks of a model, receive the entries and import the objects themselves.
    """

    def __init__(self, kind: str, entries: Mapping[str, str | T]) -> None:
        """`kind` names the entries in error messages, for example "architecture"."""
        self.kind = kind
        self._entries = dict(entries)

    def register(self, name: str, entry: str | T) -> None:
        """Add an entry. Adding the same entry again changes nothing.

        Raises `ValueError` if another entry has this name, and for a string that is not a location.
        """
        if self._entries.get(name, entry) != entry:
            raise ValueError(f"{self.kind} {name!r} is already registered with another entry")
        if isinstance(entry, str):
            _split(entry)
        self._entries[name] = entry

    def names(self) -> list[str]:
        """Return all names, in the order in which they were registered."""
        return list(self._entries)

    def entries(self) -> dict[str, str | T]:
        """Return all entries by name, to be sent to another process."""
        return dict(self._entries)

    def entry(self, name: str) -> str | T:
        """Return the entry. Raises `ValueError`, with all known names, for an unknown name."""
        if name not in self._entries:
            raise ValueError(f"{self.kind} {name!r:.80} is not one of {self.names()}")
        return self._entries[name]

    def get(self, name: str) -> T:
        """Return the object of an entry, imported if necessary."""
        entry = self.entry(name)
        if not isinstance(entry, str):
            return entry
        return import_location(entry)


def import_location(location: str) -> Any:
    """Import and return the object at "package.module:Name"."""
    module, attribute = _split(location)
    return getattr(import_module(module), attribute)


def _split(location: str) -> tuple[str, str]:
    module, _, attribute = location.partition(":")
    if not module or not attribute or ":" in attribute:
        raise ValueError(f"{location!r:.80} must be a class or 'package.module:Class'")
    return module, attribute
