"""The places of the host's memory: what each one holds, and the copies of the next step."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.prefix_cache import Prefix, PrefixCache

Key = tuple[Prefix, int]  # with the layer group


@dataclass
class TierStats:
    """Totals since the start. Tokens are counted like those of the prefix cache: once a request."""

    num_stored: int = 0  # blocks copied to the host
    num_loaded: int = 0  # blocks copied back
    num_evicted: int = 0  # blocks dropped from the host for others
    queries: int = 0  # prompt tokens that the pool's prefix cache did not have
    hits: int = 0  # those of them that the host had


class HostPlaces:
    """A cache of KV blocks in `num_places` places; the least recently used block is evicted.

    Some places have to keep their content for a while: those that the next step reads, and those
    whose blocks the sequence needs that is tried next for admission.

    The prefix cache's tree names what a block holds, and the prefixes of all places are kept in
    that tree. So a hit here is proved like a hit in the pool, by comparing tokens and parents.
    """

    def __init__(self, prefix_cache: PrefixCache, num_places: int) -> None:
        self._cache, self.num_places, self.stats = prefix_cache, num_places, TierStats()
        self.clear()

    def clear(self) -> None:
        """Forget everything: a step has failed, the weights have changed, or a user wants it."""
        self._places: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free = list(range(self.num_places))
        # Copies for the next step. A place that is about to be read must not get another content.
        self._to_host: dict[int, int] = {}  # by place
        self._to_device: dict[int, int] = {}  # by block
        self._read: set[int] = set()
        self._wanted: set[int] = set()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    # ------------------------------------------------------------------ places

    def find(self, key: Key) -> int | None:
        """Return the place that holds `key`, which has been used now; None if none does."""
        if key not in self._places:
            return None
        self._places.move_to_end(key)
        return self._places[key]

    def _take(self) -> int | None:
        """Return an empty place, if need be by evicting a block; None if all must be kept."""
        if self._free:
            return self._free.pop()
        for key, place in self._places.items():
            if place not in self._read and place not in self._wanted:
                del self._places[key]
                self._to_host.pop(place, None)
                self._cache.let_go(key[0])
                self.stats.num_evicted += 1
                return place
        return None

    def want(self, keys: Iterable[Key]) -> None:
        """Keep the blocks with these keys, and no longer those of the call before."""
        self._wanted = {self._places[key] for key in keys if key in self._places}

    # ------------------------------------------------------------------ copies

    def copy_out(self, block: int, block_hash: bytes, group: int) -> None:
        """Copy a block to the host with the next step, unless it is there or has no place.

        No step may have changed the block's content yet.
        """
        prefix = self._cache.keep(block_hash)
        key = prefix, group
        if self.find(key) is None and (place := self._take()) is not None:
            self._places[key] = place
            self._to_host[place] = block
        else:
            self._cache.let_go(prefix)

    def copy_in(self, key: Key, block: int) -> None:
        """Copy what the host has for `key` to a block with the next step."""
        place = self.find(key)
        if place is None:
            raise KeyError(f"the host has no block {key}")
        self._to_device[block] = place
        self._read.add(place)

    def take_transfers(self) -> KVTransfers | None:
        """Return the copies of the next step, which begins now; None if there are none."""
        to_host = [(block, place) for place, block in self._to_host.items()]
        to_device = [(place, block) for block, place in self._to_device.items()]
        self._to_host, self._to_device, self._read = {}, {}, set()
        self.stats.num_stored += len(to_host)
        self.stats.num_loaded += len(to_device)
        return KVTransfers(to_host, to_device) if to_host or to_device else None

    def check(self) -> None:
        """Raise `RuntimeError` unless places, copies and prefixes agree. O(places)."""
        used = list(self._places.values())
        problems = {
            "places are lost or used twice": sorted([*used, *self._free])
            != list(range(self.num_places)),
            "a copy goes to a free place": not set(used).issuperset(self._to_host),
            "a place to be read is free": not set(used).issuperset(self._read),
            "the places to be read are not those of the copies": self._read
            != set(self._to_device.values()),
            "a prefix has left the tree": any(
                not self._cache.is_known(prefix) for prefix, _ in self._places
            ),
        }
        found = [problem for problem, is_there in problems.items() if is_there]
        if found:
            raise RuntimeError(f"the host tier is inconsistent: {found}")
