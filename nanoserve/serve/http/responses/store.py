"""The responses that later requests may continue, bounded by their number and their size."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

_LONG = 2**16  # bytes: about a millisecond


class _Entry:
    """A stored response, with its own input items as JSON, after the response that it continues.

    num_users: the index and the entries that continue it, which keep it after it was evicted.
    """

    def __init__(self, parent: "_Entry | None", content: bytes, item_ids: list[str]) -> None:
        self.parent, self.content, self.item_ids = parent, content, item_ids
        self.num_users = 1

    def add_user(self) -> bool:
        """Count a user; return True if there was none, so that this entry was released."""
        self.num_users += 1
        return self.num_users == 1

    def remove_user(self) -> bool:
        """Remove a user; return True if there is none left."""
        self.num_users -= 1
        return self.num_users == 0

    @property
    def value(self) -> dict[str, Any]:
        return json.loads(self.content)


class ResponseStore:
    """Responses by id, in the memory of one process.

    Each is stored once, with the items that its own request has added. The least recently used ones
    are evicted when there are more than `most_responses`, or more than `most_bytes` in all. What is
    evicted or deleted can no longer be continued by its id, but a later response that continues it
    keeps its items. Thread-safe.

    running: the responses that are being generated, by id.
    """

    def __init__(self, most_responses: int, most_bytes: int) -> None:
        self.most_responses, self.most_bytes = most_responses, most_bytes
        self.running: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.num_bytes = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._by_item: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response: dict[str, Any], items: list[dict[str, Any]], parent: Any) -> None:
        """Store a response and the items of its own request.

        parent: the `link` of the response that it continues, or None.
        """
        content = json.dumps({"items": items, "response": response}).encode()
        item_ids = [item["id"] for item in response["output"]]
        with self._lock:
            entry = _Entry(parent, content, item_ids)
            for earlier in _chain(parent):
                if not earlier.add_user():
                    break
                self.num_bytes += len(earlier.content)  # released while this one was generated
            self.num_bytes += len(content)
            self._entries[response["id"]] = entry
            self._by_item |= dict.fromkeys(item_ids, entry)
            while self._entries and self._is_full():
                self._remove(next(iter(self._entries)))

    def get(self, response_id: str) -> dict[str, Any] | None:
        """Return a stored response; None if it is unknown, evicted or deleted."""
        entry = self._use(response_id)
        return None if entry is None else entry.value["response"]

    def link(self, response_id: str) -> Any:
        """Return what `conversation` and `put` take for a response; None if it is not stored."""
        return self._use(response_id)

    def conversation(self, link: Any) -> list[dict[str, Any]]:
        """Return the items up to a response: of all inputs and outputs, without instructions."""
        items: list[dict[str, Any]] = []
        for entry in reversed([*_chain(link)]):
            value = entry.value
            items += value["items"] + value["response"]["output"]
        return items

    def is_long(self, link: Any) -> bool:
        """Return True if the items up to a response are large, so that reading them takes time."""
        return sum(len(entry.content) for entry in _chain(link)) > _LONG

    def input_items(self, response_id: str) -> list[dict[str, Any]] | None:
        """Return the items from which a response was generated; None if it is not stored."""
        entry = self._use(response_id)
        if entry is None:
            return None
        return self.conversation(entry.parent) + entry.value["items"]

    def item(self, item_id: str) -> dict[str, Any] | None:
        """Return an output item of a stored response by its id; None if there is none."""
        entry = self._by_item.get(item_id)
        if entry is None:
            return None
        return next(one for one in entry.value["response"]["output"] if one["id"] == item_id)

    def delete(self, response_id: str) -> bool:
        """Remove a response; return False if it is not stored."""
        with self._lock:
            if response_id not in self._entries:
                return False
            self._remove(response_id)
            return True

    def _use(self, response_id: str) -> "_Entry | None":
        with self._lock:
            entry = self._entries.get(response_id)
            if entry is not None:
                self._entries.move_to_end(response_id)
            return entry

    def _is_full(self) -> bool:
        return len(self._entries) > self.most_responses or self.num_bytes > self.most_bytes

    def _remove(self, response_id: str) -> None:
        removed = self._entries.pop(response_id)
        for item_id in removed.item_ids:
            if self._by_item.get(item_id) is removed:
                del self._by_item[item_id]
        for entry in _chain(removed):
            if not entry.remove_user():
                break
            self.num_bytes -= len(entry.content)


def _chain(entry: "_Entry | None") -> Iterator["_Entry"]:
    """Yield a response, the one that it continues, and so on."""
    while entry is not None:
        yield entry
        entry = entry.parent
