"""The recurrent states of one rank: which layers have them, and the memory they take.

They are allocated for all slots at the start, next to the KV blocks. So they limit the number of
running sequences, not their length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from nanoserve.attention.recurrent_state import RecurrentState, RecurrentStateSpec
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.kernels.cpu.memory import map_zeros
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.registry import model_class
from nanoserve.utils.checks import require


@dataclass(frozen=True)
class RecurrentStates:
    """The states of a rank's layers. num_slots: `max_num_seqs` and one for dummy rows."""

    specs: Mapping[int, RecurrentStateSpec] = field(default_factory=dict)
    num_slots: int = 0

    @classmethod
    def of(
        cls, config: EngineConfig, model_config: ModelConfig, context: LayerContext
    ) -> "RecurrentStates":
        """Return the states that the layers of a rank declare (`RecurrentStateSpec`)."""
        if not model_config.recurrent_layers:
            return cls()
        meta = replace(context, device=torch.device("meta"), num_positions=1)
        model = model_class(model_config.architecture)(model_config, meta)
        found = (getattr(module, "state_spec", None) for module in model.modules())
        specs = {spec.layer: spec for spec in found if spec is not None}
        return cls(specs, config.max_num_seqs + 1)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.bytes_per_slot

    @property
    def bytes_per_slot(self) -> int:
        return sum(spec.bytes_per_slot for spec in self.specs.values())

    def rest_of(self, memory_bytes: int) -> int:
        """Return the bytes of memory that the states leave.

        Raises `ValueError` if they take all of it.
        """
        require(
            self.num_bytes < memory_bytes or not self.specs,
            f"the recurrent states of max_num_seqs={self.num_slots - 1} sequences take "
            f"{self.num_bytes} bytes, and a rank has {memory_bytes}: lower max_num_seqs",
        )
        return memory_bytes - self.num_bytes

    def reject_drafts(self) -> None:
        """Raise `ValueError` for draft tokens, which only an extension of a user's own can add."""
        require(
            not self.specs,
            "a step has draft tokens, but the model has recurrent states, which cannot be set back "
            "when draft tokens are rejected: use no extension that adds draft tokens",
        )

    def allocate(self, device: torch.device) -> dict[int, RecurrentState]:
        """Allocate the states, zeroed, and return them by layer.

        On a CPU, the system provides the memory of a slot when it is first used.
        """
        zeros = map_zeros if device.type == "cpu" else partial(torch.zeros, device=device)
        return {layer: spec.allocate(self.num_slots, zeros) for layer, spec in self.specs.items()}

    def describe(self) -> str:
        """Return a part of a log message; "" without states."""
        if not self.specs:
            return ""
        gib = self.num_bytes / 2**30
        return f", recurrent states of {self.num_slots} sequences ({gib:.2f} GiB)"
