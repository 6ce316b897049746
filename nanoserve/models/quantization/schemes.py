"""In how many bits the weights of an engine are kept, and what they become."""

from dataclasses import dataclass, replace

from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.registry import SCHEMES
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.models.quantization.online import quantize_fp8, quantize_int4, quantize_int8
from nanoserve.utils.checks import require

_GROUP_SIZE = 32  # of int4, if none is asked for: with larger ones tiny-qwen3 forgets


@dataclass(frozen=True)
class Scheme:
    """What becomes of a linear's weight that is read from a checkpoint.

    bits: 4 or 8, of what the option `quantization` asks for; None keeps what the checkpoint has,
    and makes 8 bits of its values that are no integers times a scale (FP8, NF4).
    is_fp8: they are to be floats of 8 bits.
    """

    bits: int | None
    group_size: int | None = None
    is_fp8: bool = False

    @property
    def most_bits(self) -> int:
        """That a weight may take."""
        return self.bits or 8

    def in_words(self) -> str:
        """How weights are rounded, as far as that is known before they are read."""
        if self.bits is None:
            return f"as stored, or int8 in groups of {_GROUP_SIZE} if that is no integers"
        if self.is_fp8:
            return "e4m3 with a scale per output"
        return in_words(self.bits, (self.group_size or _GROUP_SIZE) if self.bits == 4 else None)

    def to_integers(
        self, weight: Tensor | QuantizedMatrix, is_quantized: bool
    ) -> Tensor | QuantizedMatrix:
        """`is_quantized`: in the checkpoint, which has it in fewer bits than the others."""
        if isinstance(weight, QuantizedMatrix) or (self.bits is None and not is_quantized):
            return weight
        if self.is_fp8:
            return quantize_fp8(weight)
        if self.bits == 4:
            return quantize_int4(weight, self.group_size or _GROUP_SIZE)
        in_groups = self.bits is None and weight.shape[1] % _GROUP_SIZE == 0
        return quantize_int8(weight, _GROUP_SIZE if in_groups else None)


INT8, INT4, FP8 = Scheme(8), Scheme(4), Scheme(8, is_fp8=True)


def in_words(bits: int, group_size: int | None, num_inputs: int | None = None) -> str:
    """Integers of a weight: a group of all inputs, or None, is a scale for each output."""
    is_row = group_size in (None, num_inputs)
    return f"int{bits} {'with a scale per output' if is_row else f'in groups of {group_size}'}"


def check_activations(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raise `ValueError` for `quantization_activations` where weights are not quantised."""
    is_quantized = config.quantization or model_config.quantization_config
    require(
        config.quantization_activations is None or bool(is_quantized),
        f"quantization_activations={config.quantization_activations!r}, but the weights are plain, "
        f"and activations are floats: leave it out, or give quantization='int8' or 'int4'",
    )


def scheme_of(config: EngineConfig, model_config: ModelConfig) -> Scheme | None:
    """None if weights stay floats.

    Raises `ValueError` for an option that the checkpoint contradicts.
    """
    asked, stored = config.quantization, model_config.quantization_config
    if stored:
        method = stored.get("quant_method")
        require(
            asked in (None, method),
            f"quantization={asked!r}, but the checkpoint's weights are {method!r} already",
        )
        return Scheme(None)
    require(
        asked in (None, *SCHEMES.names()),
        f"quantization={asked!r} is a format that checkpoints have, and this one's weights are "
        f"plain; what can be made of plain ones is {' or '.join(SCHEMES.names())}",
    )
    if asked is None:
        return None
    scheme = SCHEMES.get(asked)
    group_size = config.quantization_group_size
    return scheme if group_size is None else replace(scheme, group_size=group_size)
