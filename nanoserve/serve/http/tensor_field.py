"""Read a tensor from a request field: vLLM's base64 of a file that `torch.save` has written.

Such a file is a pickle in a zip archive, and a pickle may run code. torch's `weights_only`
unpickler calls nothing but what rebuilds tensors. Before it reads the file, its size is limited,
and archives with compressed entries are rejected, which could be any size when they are read.
"""

import base64
import binascii
import io
import zipfile
from typing import TYPE_CHECKING

from nanoserve.utils.checks import require

if TYPE_CHECKING:
    from torch import Tensor

_OTHER_BYTES = 2**16  # of a file, in addition to its numbers
_MOST_ENTRIES = 64


def tensor_of(name: str, encoded: str, most_numbers: int) -> "Tensor":
    """Return the tensor in the field `name`, which has at most `most_numbers` float32 numbers.

    Raises `ValueError` for anything but one dense tensor that `torch.save` has written.
    """
    import torch

    most = 4 * most_numbers + _OTHER_BYTES
    size = len(encoded) * 3 // 4
    require(
        size <= most,
        f"{name}: the file has about {size} bytes, and the longest prompt of this model in float32 "
        f"{most}",
    )
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name}: not base64: {error}") from None
    _check_archive(name, content, most)
    try:
        with torch.sparse.check_sparse_tensor_invariants():
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # of many types; a message of torch may be pages long
        raise ValueError(f"{name}: torch cannot load the file: {str(error)[:200]}") from None
    is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    require(
        is_dense and tensor.device.type == "cpu" and not tensor.is_quantized,
        f"{name}: the file must have one dense tensor, not {type(tensor).__name__}",
    )
    # A few stored numbers may be repeated by strides to any shape.
    require(
        tensor.nbytes <= len(content),
        f"{name}: a tensor of the shape {list(tensor.shape)} in a file of {len(content)} bytes; "
        f"save a contiguous one",
    )
    return tensor


def _check_archive(name: str, content: bytes, most: int) -> None:
    """Raise `ValueError` unless `content` is a zip archive without compressed entries."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise ValueError(f"{name}: not a file of torch.save: {error}") from None
    total = sum(entry.file_size for entry in entries)
    is_plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    require(
        is_plain and len(entries) <= _MOST_ENTRIES and total <= most,
        f"{name}: not a file of torch.save, which has no compressed entries: {len(entries)} "
        f"entries of {total} bytes",
    )
