"""Plugin of mypy: what `nn.Module.__getattr__` finds may be anything.

torch declares `Tensor | Module`, which is wrong for plain attributes: a layer's sizes, a model's
config. Attributes that a class declares keep their types.
"""

from collections.abc import Callable

from mypy.plugin import AttributeContext, Plugin
from mypy.types import AnyType, Type, TypeOfAny, UnionType, get_proper_type

_MODULE = "torch.nn.modules.module.Module."


def _type_of_attribute(context: AttributeContext) -> Type:
    declared = get_proper_type(context.default_attr_type)
    return AnyType(TypeOfAny.explicit) if isinstance(declared, UnionType) else declared


class ModulePlugin(Plugin):
    """Replaces the type of attributes that are found by `nn.Module.__getattr__`."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        return _type_of_attribute if fullname.startswith(_MODULE) else None


def plugin(version: str) -> type[Plugin]:
    return ModulePlugin
