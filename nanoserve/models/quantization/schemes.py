"""Quantization schemes, which convert an engine's weights to a number of bits."""

from dataclasses import dataclass, replace

from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.registry import SCHEMES
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.models.quantization.online import quantize_fp8, quantize_int4, quantize_int8
from nanoserve.utils.checks import require

_GROUP_SIZE = 32  # default for int4: larger groups degrade tiny-qwen3


@dataclass(frozen=True)
class Scheme:
    """A conversion of linear weights, applied after they are read from a checkpoint.

    bits: 4 or 8, from the option `quantization`. None keeps a checkpoint's integers, and quantizes
    its other codes (FP8, NF4) to 8 bits.
    is_fp8: weights become 8-bit floats (e4m3).
    """

    bits: int | None
    group_size: int | None = None
    is_fp8: bool = False

    @property
    def most_bits(self) -> int:
        """Largest number of bits of a weight."""
        return self.bits or 8

    def description(self) -> str:
        """Describe how weights are quantized, as far as it is known before they are read."""
        if self.bits is None:
            return f"as stored, or int8 in groups of {_GROUP_SIZE} if they are not integers"
        if self.is_fp8:
            return "e4m3 with a scale per output"
        group_size = (self.group_size or _GROUP_SIZE) if self.bits == 4 else None
        return describe_integers(self.bits, group_size)

    def to_integers(
        self, weight: Tensor | QuantizedMatrix, is_quantized: bool
    ) -> Tensor | QuantizedMatrix:
        """Quantize a weight; integers of the checkpoint are returned unchanged.

        is_quantized: True if the checkpoint stores the weight in fewer bits.
        """
        if isinstance(weight, QuantizedMatrix) or (self.bits is None and not is_quantized):
            return weight
        if self.is_fp8:
            return quantize_fp8(weight)
        if self.bits == 4:
            return quantize_int4(weight, self.group_size or _GROUP_SIZE)
        in_groups = self.bits is None and weight.shape[1] % _GROUP_SIZE == 0
        return quantize_int8(weight, _GROUP_SIZE if in_groups else None)


INT8, INT4, FP8 = Scheme(8), Scheme(4), Scheme(8, is_fp8=True)


def describe_integers(bits: int, group_size: int | None, num_inputs: int | None = None) -> str:
    """Describe integer weights; a group of all inputs, or None, means one scale per output."""
    is_row = group_size in (None, num_inputs)
    return f"int{bits} {'with a scale per output' if is_row else f'in groups of {group_size}'}"


def check_activations(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raise `ValueError` for `quantization_activations` where weights are not quantized."""
    is_quantized = config.quantization or model_config.quantization_config
    require(
        config.quantization_activations is None or bool(is_quantized),
        f"quantization_activations={config.quantization_activations!r} needs quantized weights, "
        f"but these are unquantized: omit it, or set quantization='int8' or 'int4'",
    )


def scheme_of(config: EngineConfig, model_config: ModelConfig) -> Scheme | None:
    """Return the scheme, or None if weights stay floats.

    Raises `ValueError` if the option `quantization` contradicts the checkpoint.
    """
    requested, stored = config.quantization, model_config.quantization_config
    if stored:
        method = stored.get("quant_method")
        require(
            requested in (None, method),
            f"quantization={requested!r} must be {method!r}, the checkpoint's format, or omitted",
        )
        return Scheme(None)
    require(
        requested in (None, *SCHEMES.names()),
        f"quantization={requested!r} is a checkpoint format, but this checkpoint is "
        f"unquantized: use {' or '.join(SCHEMES.names())} to quantize it",
    )
    if requested is None:
        return None
    scheme = SCHEMES.get(requested)
    group_size = config.quantization_group_size
    return scheme if group_size is None else replace(scheme, group_size=group_size)
