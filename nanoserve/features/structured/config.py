"""Options of structured output (`structured_outputs_config={...}`), under vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nanoserve.utils.checks import check_bool, check_choice, check_names, require
from nanoserve.utils.registry import Registry

if TYPE_CHECKING:
    from nanoserve.features.structured.grammar import Backend

GRAMMAR_BACKENDS: "Registry[type[Backend]]" = Registry(
    "grammar backend",
    {
        "guidance": "nanoserve.features.structured.guidance:Guidance",
        "xgrammar": "nanoserve.features.structured.xgrammar:XGrammar",
    },
)
# The package that a backend needs, and the argument of `pip install`.
_PACKAGES = {
    "guidance": ("llguidance", "'nanoserve[guided]'"),
    "xgrammar": ("xgrammar", "xgrammar"),
}


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """Options of structured output for all requests of an engine.

    backend: "auto" selects "guidance" (llguidance). "xgrammar" supports fewer schemas and rejects
        all others. `register_grammar_backend` adds custom backends.
    disable_any_whitespace: if True, JSON has exactly one space after each comma and colon, and no
        other whitespace.
    disable_additional_properties: if True, objects have only the properties that the schema names,
        unless it explicitly allows others, as with vLLM's default backend.
    lenient: if True, keywords of a schema that cannot be enforced are ignored and logged. If False,
        they raise `ValueError`.
    jump_forward: if True, tokens that the grammar forces (jump-forward tokens) are computed
        together in one step. None: True on a CPU, unless the model has recurrent states, and False
        on a GPU, where it has not been tested.

    Raises `ValueError` for unknown names and values.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = True
    disable_additional_properties: bool = True
    lenient: bool = False
    jump_forward: bool | None = None

    @classmethod
    def of(cls, options: "Mapping[str, Any] | StructuredOutputsConfig") -> Any:
        """Return the value passed to `EngineConfig` as a `StructuredOutputsConfig`."""
        if isinstance(options, StructuredOutputsConfig):
            return options
        check_names("structured_outputs_config", options, cls, "{'backend': 'xgrammar'}")
        return cls(**options)

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, ("auto", *GRAMMAR_BACKENDS.names()))
        check_bool("disable_any_whitespace", self.disable_any_whitespace)
        check_bool("disable_additional_properties", self.disable_additional_properties)
        check_bool("lenient", self.lenient)
        if self.jump_forward is not None:
            check_bool("jump_forward", self.jump_forward)

    @property
    def backend_name(self) -> str:
        """The name of the backend. Raises `ValueError` if the package that it needs is missing."""
        name = "guidance" if self.backend == "auto" else self.backend
        if name in _PACKAGES:
            package, extra = _PACKAGES[name]
            is_there = find_spec(package) is not None
            require(is_there, f"structured_outputs needs {package}: pip install {extra}")
        return name


def register_grammar_backend(name: str, location: str) -> None:
    """Register a custom grammar backend; see `nanoserve.features.structured.grammar.Backend`.

    location: "module:Class". The processes that check grammars import it from there.
    """
    GRAMMAR_BACKENDS.register(name, location)
