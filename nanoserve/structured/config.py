"""`structured_outputs_config={...}`, under vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from nanoserve.checks import check_bool, check_choice, check_names, require

# What each backend's package is called.
_PACKAGES = {"guidance": "llguidance", "xgrammar": "xgrammar"}


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """How grammars are computed.

    backend: "auto" is "guidance" (llguidance); "xgrammar" knows fewer schemas, and refuses others.
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
        check_choice("backend", self.backend, ("auto", *_PACKAGES))
        check_bool("disable_any_whitespace", self.disable_any_whitespace)
        check_bool("disable_additional_properties", self.disable_additional_properties)
        check_bool("lenient", self.lenient)
        if self.jump_forward is not None:
            check_bool("jump_forward", self.jump_forward)

    @property
    def backend_name(self) -> str:
        """The backend's name. Raises `ValueError` that names the package which is missing."""
        name = "guidance" if self.backend == "auto" else self.backend
        package = _PACKAGES[name]
        extra = "'nanoserve[guided]'" if name == "guidance" else package
        is_there = find_spec(package) is not None
        require(is_there, f"structured_outputs needs {package}: pip install {extra}")
        return name
