"""AWQ checkpoints of AutoAWQ and its successors, in the layout "gemm" (Lin et al., 2023).

A linear is `qweight`, int32 [in, out / 8], and `qzeros`, int32 [groups, out / 8], both packed along
the outputs, and `scales` [groups, out]. A word's nibbles, from the lowest, are its outputs 0, 2, 4,
6, 1, 3, 5, 7: a GPU extracts two adjacent outputs with one mask. Zero points are stored unchanged.
"""

from torch import Tensor

from nanoserve.checkpoint.formats.packed import (
    affine_matrix,
    group_of_input,
    num_groups,
    unpack_int32,
)
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.reader import Reader

_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble of each of the eight outputs in a word


class AWQReader(Reader):
    marks = ("qweight",)
    parts = ("qweight", "qzeros", "scales")

    def layout(self, module: str) -> tuple[tuple[int, int], dict[str, tuple[int, ...]]]:
        num_inputs, words = self.matrix_header(module, "qweight", "I32")
        groups = num_groups(num_inputs, self.config.get("group_size", 128))
        self.matrix_header(module, "qzeros", "I32")
        self.matrix_header(module, "scales", "F16", "BF16", "F32")
        wanted: dict[str, tuple[int, ...]] = {
            "qweight": (num_inputs, words),
            "qzeros": (groups, words),
            "scales": (groups, words * 8),
        }
        return (words * 8, num_inputs), wanted

    def weight(self, module: str) -> QuantizedMatrix:
        codes = _outputs(self.part(module, "qweight"))
        size = self.config.get("group_size", 128)
        return affine_matrix(
            codes,
            _outputs(self.part(module, "qzeros")),
            self.part(module, "scales").T,
            4,
            group_of_input(codes.shape[1], size, None, module),
        )


def _outputs(packed: Tensor) -> Tensor:
    """Unpack int32 [n, out / 8] into uint8 [out, n]."""
    nibbles = unpack_int32(packed, 4).unflatten(1, (-1, 8))
    return nibbles[:, :, _NIBBLE_OF_OUTPUT].flatten(1).T.contiguous()
