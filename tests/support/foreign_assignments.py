"""Assignments to attributes of objects that a function has not made itself.

    x.attr = ...        del x.attr        setattr(x, "attr", ...)        vars(x)["attr"] = ...

`x` may be any expression but `self`, `cls`, or a name that is bound to a new object in the same
function: to a call, a literal or a comprehension. (A call may return an object of somebody else's;
that is not seen here.)
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NEW = (ast.Call, ast.Dict, ast.List, ast.Set, ast.Tuple, ast.ListComp, ast.DictComp, ast.SetComp)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class ForeignAssignment(NamedTuple):
    file: str  # relative to the package
    function: str  # with its class; "" at the top of a module
    target: str  # such as "request.error"
    line: int


def foreign_assignments(package: Path) -> Iterator[ForeignAssignment]:
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, target in _of_scope(tree, "", {"self", "cls"}):
            yield ForeignAssignment(
                path.relative_to(package).as_posix(), name, ast.unparse(target), target.lineno
            )


def _of_scope(scope: ast.AST, name: str, own: set[str]) -> Iterator[tuple[str, ast.expr]]:
    """Find those of one function, class or module, and of what is defined in it."""
    own = own | _new_objects(scope)
    for node in _nodes_of(scope):
        for target in _targets(node):
            owner = target.value
            if not (isinstance(owner, ast.Name) and owner.id in own):
                yield name, target
    for inner in _inner_scopes(scope):
        inner_name = getattr(inner, "name", "lambda")
        own_there = own - _parameters(inner) | {"self", "cls"}
        yield from _of_scope(inner, f"{name}.{inner_name}".lstrip("."), own_there)


def _targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """Return what `node` assigns to, as the attribute that it is."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor | ast.NamedExpr):
        found = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        found = [node.optional_vars]
    elif isinstance(node, ast.Call) and _is_named(node.func, "setattr", "delattr"):
        attribute = node.args[1].value if isinstance(node.args[1], ast.Constant) else "..."
        yield _attribute(node, node.args[0], attribute)
    elif isinstance(node, ast.Call) and _is_update_of_vars(node.func):
        yield _attribute(node, node.func.value.args[0], "...")
    for target in found:
        yield from _attributes(target)


def _attributes(target: ast.expr) -> Iterator[ast.Attribute]:
    if isinstance(target, ast.Attribute):
        yield target
    elif isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _attributes(part)
    elif isinstance(target, ast.Starred):
        yield from _attributes(target.value)
    elif isinstance(target, ast.Subscript) and _is_vars(target.value):
        yield _attribute(target, target.value.args[0], "...")


def _attribute(place: ast.expr, owner: ast.expr, name: str) -> ast.Attribute:
    return ast.copy_location(ast.Attribute(owner, name, ast.Store()), place)


def _is_vars(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and bool(node.args) and _is_named(node.func, "vars")


def _is_update_of_vars(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "update"
        and _is_vars(function.value)
    )


def _is_named(function: ast.expr, *names: str) -> bool:
    return isinstance(function, ast.Name) and function.id in names


def _new_objects(scope: ast.AST) -> set[str]:
    """Return the names that are bound to new objects, and to nothing else."""
    new: set[str] = set()
    others: set[str] = set()
    for node in _nodes_of(scope):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound = new if isinstance(node.value, _NEW) else others
            for target in targets:
                bound |= _pairwise(target, node.value, others)
        elif isinstance(node, ast.For | ast.AsyncFor):
            others |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            bound = new if isinstance(node.context_expr, ast.Call) else others
            bound.add(node.optional_vars.id)
    return new - others


def _pairwise(target: ast.expr, value: ast.expr | None, others: set[str]) -> set[str]:
    """`a, b = A(), b0`: each name with its own value; of others it is not known."""
    if isinstance(target, ast.Name):
        return {target.id}
    if not isinstance(target, ast.Tuple | ast.List):
        return set()
    names = {part.id for part in target.elts if isinstance(part, ast.Name)}
    if not isinstance(value, ast.Tuple) or len(value.elts) != len(target.elts):
        return names if isinstance(value, ast.Call) else set()
    of_old = {
        part.id
        for part, one in zip(target.elts, value.elts, strict=True)
        if isinstance(part, ast.Name) and not isinstance(one, _NEW)
    }
    others |= of_old
    return names - of_old


def _parameters(scope: ast.AST) -> set[str]:
    if not isinstance(scope, _Function):
        return set()
    args = scope.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {arg.arg for arg in named if arg is not None}


def _nodes_of(scope: ast.AST) -> Iterator[ast.AST]:
    """Walk a scope, but not into functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _Function | ast.ClassDef):
            yield child
            yield from _nodes_of(child)


def _inner_scopes(scope: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, _Function | ast.ClassDef):
            yield child
        else:
            yield from _inner_scopes(child)
