"""`structured_outputs_config={...}`, under vLLM's names."""

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
# The package that a backend needs, and what to install.
_PACKAGES = {
    "guidance": ("llguidance", "'nanoserve[guided]'"),
    "xgrammar": ("xgrammar", "xgrammar"),
}


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """How grammars are computed.

    backend: "auto" is "guidance" (llguidance); "xgrammar" knows fewer schemas, and refuses others.
        One of your own is added by `register_grammar_backend`.
    disable_any_whitespace: JSON is set out in one way, with a space behind each comma and colon.
    disable_additional_properties: objects of schemas have no other properties than those named,
        unless a schema says so itself, as with vLLM's default backend.
    lenient: keywords of schemas that no output can be made to obey are ignored, and named in the
        log; otherwise they are a `ValueError`.
    jump_forward: tokens that a grammar leaves no choice of are computed together in one step. None
        is on a CPU; nobody has run it on a GPU yet.

    Raises `ValueError` for unknown names and values.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = True
    disable_additional_properties: bool = True
    lenient: bool = False
    jump_forward: bool | None = None

    @classmethod
    def of(cls, options: "Mapping[str, Any] | StructuredOutputsConfig") -> Any:
        """What `EngineConfig` was given."""
        if isinstance(options, cls):
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
        """The backend's name. Raises `ValueError` that names the package which is missing."""
        name = "guidance" if self.backend == "auto" else self.backend
        if name in _PACKAGES:
            package, extra = _PACKAGES[name]
            is_there = find_spec(package) is not None
            require(is_there, f"structured_outputs needs {package}: pip install {extra}")
        return name


def register_grammar_backend(name: str, location: str) -> None:
    """Add a backend of your own, as "module:Class": see `nanoserve.features.structured.grammar.Backend`.

    Processes that check grammars import it from there.
    """
    GRAMMAR_BACKENDS.register(name, location)
