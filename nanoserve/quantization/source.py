"""Where weights come from: a plain view of a checkpoint, whatever its files store instead."""

from typing import Protocol

from torch import Tensor

from nanoserve.quantization.matrix import QuantizedMatrix


class WeightSource(Protocol):
    """What `open_quantized` (`quantization/formats/registry.py`) returns. Threads may share it."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a plain checkpoint of this model would have, and its shape.

        Names are those of plain checkpoints, as "model.layers.0.self_attn.q_proj.weight"; what a
        format keeps in its place (packed codes, scales, zero points) is not among them.
        """

    def read(self, name: str) -> Tensor | QuantizedMatrix:
        """The whole of one of them; a linear's weight is [out, in].

        What the file does not quantise has the dtype that it is stored in. Values that are no
        integers times a scale (FP8, NF4) are a float32 tensor, exactly what the format's own
        library computes before it rounds to the model's dtype. Raises `ValueError` for another
        name, and for contents that contradict each other.
        """
