"""Bounds on grammars, checked before a native library sees one.

The libraries that compile grammars follow references by recursion, in native code. A chain of some
thousand short definitions overflows their stack, and the process is gone without a word: in a
thread of 8 MiB llguidance ends at 900 to 2,500 definitions, whatever depth the brackets have. So
references are followed here first, in a loop, and what is deeper or wider than any schema that
people write is refused.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from nanoserve.features.structured.schema_references import REFERENCES, keys_of
from nanoserve.features.structured.source import Source
from nanoserve.utils.checks import require

# Levels of lists and objects, those behind references included. llguidance takes about 4 kB of
# stack for one, so these are 4 MB; the threads that compile have 64 (see `stacks.py`).
MOST_LEVELS = 1000
# xgrammar takes more than quadratic time: 300 definitions 0.1 s, 2,000 of them 17 s.
MOST_LEVELS_OF_XGRAMMAR = 300
# Properties, and required ones, of one object, and of all objects together. llguidance takes time
# that is quadratic in those of one object: 0.4 s for 2,000, 2.6 s for 5,000.
MOST_NAMES_OF_ONE, MOST_NAMES = 2000, 5000
MOST_RULES = 1000  # of a grammar; llguidance overflows 8 MiB at 2,700
MOST_BRACKETS = 500  # of a grammar, open at the same time

_NAMES = ("properties", "patternProperties", "required")
# "name:", "?name:", "name[lazy]:", "NAME.2:" of Lark, and "name ::=" of GBNF.
_RULE = re.compile(r"^[ \t]*[?!]?[\w-]+[ \t]*(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*(?:::=|:)", re.M)
_SCHEMA = re.compile(r"%json\b\s*(?=\{)")


def check_bounds(source: Source, library: str) -> None:
    """Raise `ValueError` for a grammar that is too deep or too wide for `library` to follow."""
    most_levels = MOST_LEVELS_OF_XGRAMMAR if library == "xgrammar" else MOST_LEVELS
    if source.kind == "json":
        check_schema(json.loads(source.text), most_levels)
    elif source.kind == "structural_tag":
        for structure in json.loads(source.text)["structures"]:
            check_schema(structure["schema"], most_levels)
    elif source.kind == "grammar":
        _check_grammar(source.text, most_levels)


def check_schema(schema: Any, most_levels: int = MOST_LEVELS) -> None:
    """Raise `ValueError` for a JSON schema whose references lead too deep, or with too many names.

    Takes time linear in the size of the schema, and no recursion.
    """
    tree = _Tree(schema)
    for name, counts in tree.num_names.items():
        largest = max(counts, default=0)
        require(
            largest <= MOST_NAMES_OF_ONE,
            f"one of its {name!r} has {largest} names; at most {MOST_NAMES_OF_ONE} are allowed",
        )
        require(
            sum(counts) <= MOST_NAMES,
            f"it has {sum(counts)} names in all of its {name!r} together; at most {MOST_NAMES} are "
            f"allowed",
        )
    if tree.references:
        deepest = tree.deepest()
        require(
            deepest <= most_levels,
            f"its references ($ref) lead {deepest} levels deep, counting each list and object on "
            f"the way; at most {most_levels} are followed",
        )


def _check_grammar(text: str, most_levels: int) -> None:
    num_rules = sum(1 for _ in _RULE.finditer(text))
    require(num_rules <= MOST_RULES, f"it has {num_rules} rules; at most {MOST_RULES} are allowed")
    rest, end = [], 0
    for schema, start, stop in _schemas_in(text):
        check_schema(schema, most_levels)
        rest.append(text[end:start])
        end = stop
    deepest = _most_open("".join([*rest, text[end:]]))
    require(
        deepest <= MOST_BRACKETS,
        f"it has {deepest} brackets open at the same time; at most {MOST_BRACKETS} are allowed",
    )


def _schemas_in(text: str) -> Iterator[tuple[Any, int, int]]:
    """Yield each JSON schema within a grammar, with where it starts and stops."""
    decoder, position = json.JSONDecoder(), 0
    while (found := _SCHEMA.search(text, position)) is not None:
        try:
            schema, position = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"what follows %json is not JSON: {error}") from None
        yield schema, found.end(), position


def _most_open(text: str) -> int:
    """Count brackets that are open at the same time, those within literals included."""
    num_open = most = 0
    for bracket in re.findall(r"[(\[{)\]}]", text):
        num_open = num_open + 1 if bracket in "([{" else max(0, num_open - 1)
        most = max(most, num_open)
    return most


class _Tree:
    """The lists and objects of a schema as a graph: an edge leads to each that one holds or names.

    Nodes are numbered so that whatever holds another one comes before it; the schema itself is 0.
    """

    def __init__(self, schema: Any) -> None:
        self.references: dict[int, list[str]] = {}  # by the node that has them
        self.num_names: dict[str, list[int]] = {name: [] for name in _NAMES}  # of each object
        self._members: list[dict[str, int]] = []  # by key, of a list by index as text
        self._parents: list[int] = []
        self._named: dict[str, int] = {}  # by $id or $anchor
        stack: list[tuple[Any, int, str]] = [(schema, -1, "")]
        while stack:
            value, parent, key = stack.pop()
            node = len(self._members)
            self._members.append({})
            self._parents.append(parent)
            if parent >= 0:
                self._members[parent][key] = node
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            if isinstance(value, dict):
                self._note(value, node)
            for name, inner in pairs:
                if isinstance(inner, dict | list):
                    stack.append((inner, node, str(name)))

    def deepest(self) -> int:
        """Return the most levels that a walk along members and references may go down.

        A library that remembers what it has seen still enters each definition of a circle once, in
        whichever order: those of a circle count with all of their levels.
        """
        targets = {
            node: [found for text in texts if (found := self._find(text)) is not None]
            for node, texts in self.references.items()
        }
        edges = [
            [*members.values(), *targets.get(node, ())]
            for node, members in enumerate(self._members)
        ]
        heights = self._heights()
        is_target = {target for found in targets.values() for target in found}
        levels = [0] * len(edges)
        for group in _strongly_connected(edges):  # what they lead to comes before them
            inside = set(group)
            below = max((levels[e] for n in group for e in edges[n] if e not in inside), default=0)
            own = 1 if len(group) == 1 else sum(heights[n] for n in group if n in is_target)
            for node in group:
                levels[node] = below + own
        return levels[0]

    def _note(self, value: dict[str, Any], node: int) -> None:
        for name in _NAMES:
            inner = value.get(name)
            if isinstance(inner, dict | list):
                self.num_names[name].append(len(inner))
        texts = [text for name in REFERENCES if isinstance(text := value.get(name), str)]
        if texts:
            self.references[node] = texts
        for name, prefix in (("$id", ""), ("id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
            if isinstance(text := value.get(name), str):
                self._named.setdefault(prefix + text, node)

    def _find(self, reference: str) -> int | None:
        """Return the node that is meant. None: the library knows no better, and refuses it."""
        base, _, pointer = reference.partition("#")
        if pointer and not pointer.startswith("/"):
            return self._named.get(f"#{pointer}")
        node = self._named.get(base) if base else 0
        for key in keys_of(pointer):
            if node is None:
                return None
            node = self._members[node].get(key)
        return node

    def _heights(self) -> list[int]:
        """Return how many levels lie in each node, itself included, without references."""
        heights = [1] * len(self._parents)
        for node in range(len(heights) - 1, 0, -1):
            parent = self._parents[node]
            heights[parent] = max(heights[parent], heights[node] + 1)
        return heights


def _strongly_connected(edges: list[list[int]]) -> Iterator[list[int]]:
    """Yield groups of nodes that lead to each other, each after all that it leads to.

    Tarjan's algorithm (SIAM Journal on Computing 1, 1972) with a stack of its own.
    """
    order = [-1] * len(edges)  # in which nodes were entered
    lowest = [0] * len(edges)  # the first entered that is reached, among those not yielded
    is_open = [False] * len(edges)
    path: list[int] = []
    num_entered = 0
    for start in range(len(edges)):
        if order[start] >= 0:
            continue
        walk = [(start, iter(edges[start]))]
        while walk:
            node, rest = walk[-1]
            if order[node] < 0:
                order[node] = lowest[node] = num_entered
                num_entered += 1
                path.append(node)
                is_open[node] = True
            follow = None
            for other in rest:
                if order[other] < 0:
                    follow = other
                    break
                if is_open[other]:
                    lowest[node] = min(lowest[node], order[other])
            if follow is not None:
                walk.append((follow, iter(edges[follow])))
                continue
            walk.pop()
            if walk:
                above = walk[-1][0]
                lowest[above] = min(lowest[above], lowest[node])
            if lowest[node] == order[node]:
                group: list[int] = []
                while not group or group[-1] != node:
                    group.append(path.pop())
                    is_open[group[-1]] = False
                yield group
