"""Check bounds on grammars before a native library compiles them.

The libraries that compile grammars follow references by recursion, in native code. A chain of about
a thousand short definitions overflows their stack, which ends the process without an error message:
with a stack of 8 MiB, llguidance crashes at 900 to 2,500 definitions, at any nesting depth of the
text. So references are followed here first, in a loop, and a schema that is far deeper or wider
than practical ones is rejected.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from nanoserve.features.structured.grammar import Source
from nanoserve.features.structured.schema_references import REFERENCES, keys_of
from nanoserve.utils.checks import require

# Levels of lists and objects, including those reached through references. llguidance takes about
# 4 kB of stack per level, 4 MB in all; the compiling threads have 64 MiB (see `start_thread`).
MOST_LEVELS = 1000
# xgrammar takes more than quadratic time: 0.1 s for 300 definitions, 17 s for 2,000.
MOST_LEVELS_OF_XGRAMMAR = 300
# Properties, and required ones, of one object, and of all objects together. llguidance takes time
# quadratic in those of one object: 0.4 s for 2,000, 2.6 s for 5,000.
MOST_NAMES_OF_ONE, MOST_NAMES = 2000, 5000
MOST_RULES = 1000  # of a grammar; llguidance overflows a stack of 8 MiB at 2,700
MOST_BRACKETS = 500  # nested brackets in a grammar

_NAMES = ("properties", "patternProperties", "required")
# Rules: "name:", "?name:", "name[lazy]:", "NAME.2:" in Lark, and "name ::=" in GBNF.
_RULE = re.compile(r"^[ \t]*[?!]?[\w-]+[ \t]*(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*(?:::=|:)", re.M)
_SCHEMA = re.compile(r"%json\b\s*(?=\{)")


def check_bounds(source: Source, library: str) -> None:
    """Raise `ValueError` for a grammar that is too deep or too wide for `library` to compile."""
    most_levels = MOST_LEVELS_OF_XGRAMMAR if library == "xgrammar" else MOST_LEVELS
    if source.kind == "json":
        check_schema(json.loads(source.text), most_levels)
    elif source.kind == "structural_tag":
        for structure in json.loads(source.text)["structures"]:
            check_schema(structure["schema"], most_levels)
    elif source.kind == "grammar":
        _check_grammar(source.text, most_levels)


def check_schema(schema: Any, most_levels: int = MOST_LEVELS) -> None:
    """Raise `ValueError` for a JSON schema with too many names, or references that lead too deep.

    The check takes time linear in the size of the schema, and does not recurse.
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
            f"allowed in all",
        )
    if tree.references:
        deepest = tree.deepest()
        require(
            deepest <= most_levels,
            f"its references ($ref) lead {deepest} levels deep, counting each list and object on "
            f"the path; at most {most_levels} levels are allowed",
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
    """Yield each JSON schema within a grammar, with its start and end positions."""
    decoder, position = json.JSONDecoder(), 0
    while (found := _SCHEMA.search(text, position)) is not None:
        try:
            schema, position = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the text after %json is not JSON: {error}") from None
        yield schema, found.end(), position


def _most_open(text: str) -> int:
    """Return the most brackets open at the same time, including brackets within literals."""
    num_open = most = 0
    for bracket in re.findall(r"[(\[{)\]}]", text):
        num_open = num_open + 1 if bracket in "([{" else max(0, num_open - 1)
        most = max(most, num_open)
    return most


class _Tree:
    """A graph of the lists and objects of a schema, with edges to members and referenced schemas.

    Nodes are numbered so that parents come before their members; the schema itself is node 0.
    """

    def __init__(self, schema: Any) -> None:
        self.references: dict[int, list[str]] = {}  # by node
        self.num_names: dict[str, list[int]] = {name: [] for name in _NAMES}  # one per object
        self._members: list[dict[str, int]] = []  # by key; in a list, by index as text
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
        """Return the most levels that recursion along members and references may reach.

        A library that remembers visited definitions still enters each definition of a circle once,
        in any order. So all levels of all definitions of a circle are counted.
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
        for group in _strongly_connected(edges):  # successors come first
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
        """Return the node that a reference refers to, or None if there is none.

        References without a target are rejected by the library.
        """
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
        """Return the number of levels in each node, including itself, without references."""
        heights = [1] * len(self._parents)
        for node in range(len(heights) - 1, 0, -1):
            parent = self._parents[node]
            heights[parent] = max(heights[parent], heights[node] + 1)
        return heights


def _strongly_connected(edges: list[list[int]]) -> Iterator[list[int]]:
    """Yield the strongly connected components of a graph, each after its successors.

    edges: the successors of each node. This is Tarjan's algorithm (SIAM Journal on Computing 1,
    1972) with an explicit stack instead of recursion.
    """
    order = [-1] * len(edges)  # the order in which nodes were entered
    lowest = [0] * len(edges)  # the first entered node that is reached and not yielded yet
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
