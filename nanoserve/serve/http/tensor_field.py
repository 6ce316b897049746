"""Read a tensor from a request field: vLLM's base64 of a file that `torch.save` has written.

Such a file is a zip archive: a pickle, which describes the tensor, and the bytes of its numbers.

A pickle is a program. torch's `weights_only` unpickler calls only what rebuilds tensors, but a
pickle of 300 bytes can keep it busy for years, with the interpreter locked, and torch and zipfile
do not always read the same directory of an archive. So nothing is unpickled here: the pickle must
have the operations with which `torch.save` writes one dense tensor, whose arguments are read.
"""

import base64
import binascii
import io
import math
import pickletools
import re
import zipfile
from typing import TYPE_CHECKING, NamedTuple

from nanoserve.utils.checks import require

if TYPE_CHECKING:
    from torch import Tensor

_OTHER_BYTES = 2**16  # of a file, in addition to its numbers
_MOST_PICKLED = 2**12  # bytes; a tensor takes 150
_MOST_ENTRIES = 64
_ENTRY = b"PK\x01\x02"  # begins each entry of an archive's directory

_DTYPES = {
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
}
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1"}
_WITHOUT_EFFECT = {"PROTO", "BINPUT", "LONG_BINPUT"}  # they number values, for later references
_SHAPE = r"(?:MARK )?((?:INT )*)(?:EMPTY_)?TUPLE\d? "
# rebuild(("storage", type, key, device, size), offset, shape, strides, has_grad, OrderedDict())
_TENSOR = (
    "GLOBAL MARK MARK BINUNICODE GLOBAL BINUNICODE BINUNICODE INT TUPLE BINPERSID INT "
    + 2 * _SHAPE
    + r"NEW(?:TRUE|FALSE) GLOBAL EMPTY_TUPLE REDUCE TUPLE REDUCE "
)
# rebuild_parameter(tensor, has_grad, OrderedDict())
_PARAMETER = r"NEW(?:TRUE|FALSE) (?:LONG_)?BINGET EMPTY_TUPLE REDUCE TUPLE3 REDUCE "
_SAVED = re.compile(rf"(?:GLOBAL )?{_TENSOR}(?:{_PARAMETER})?STOP")
_REBUILD, _REBUILD_PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"


class _Saved(NamedTuple):
    """The description of a tensor in a pickle.

    key: of the archive's entry with its numbers, of which there are `num_stored`. The first one of
    the tensor is at `offset`.
    """

    dtype: str
    key: str
    num_stored: int
    offset: int
    shape: list[int]
    strides: list[int]


def tensor_of(name: str, encoded: str, most_numbers: int) -> "Tensor":
    """Return the tensor in the field `name`, which has at most `most_numbers` float32 numbers.

    Raises `ValueError` for anything but one dense tensor that `torch.save` has written.
    """
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
    try:
        saved, numbers = _read_archive(content, most)
        return _tensor(saved, numbers)
    except Exception as error:  # zipfile's and torch's are of many types
        reason = f"{name}: not one dense tensor that torch.save has written: {str(error)[:200]}"
        raise ValueError(reason) from None


def _read_archive(content: bytes, most: int) -> tuple[_Saved, bytes]:
    """Return the description of the tensor, and the bytes of its numbers."""
    num_entries = content.count(_ENTRY)  # before zipfile makes an object of each
    require(num_entries <= _MOST_ENTRIES, f"an archive of {num_entries} entries")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        for entry in entries.values():
            is_plain = entry.compress_type == zipfile.ZIP_STORED and entry.file_size <= most
            require(is_plain, f"{entry.filename} is compressed, or has {entry.file_size} bytes")
        if "byteorder" in entries:
            order = archive.read(entries["byteorder"])
            require(order == b"little", f"its byte order is {order.decode()}")
        pickled = entries["data.pkl"]
        require(pickled.file_size <= _MOST_PICKLED, f"a pickle of {pickled.file_size} bytes")
        saved = _described(archive.read(pickled))
        return saved, archive.read(entries[f"data/{saved.key}"])


def _described(pickled: bytes) -> _Saved:
    """Return what a pickle says about a tensor; raise `ValueError` for other operations."""
    operations, values = [], []
    for operation, value, _ in pickletools.genops(pickled):
        if operation.name not in _WITHOUT_EFFECT:
            operations.append("INT" if operation.name in _INTEGERS else operation.name)
            values += [] if value is None else [value]
    match = _SAVED.fullmatch(" ".join(operations))
    if match is None:
        raise ValueError("its pickle has other operations")
    if values[0] == _REBUILD_PARAMETER:
        del values[0]
    rebuild, _, kind, key, _, num_stored, offset, *sizes = values
    require(rebuild == _REBUILD, f"it is rebuilt by {rebuild}")
    require(kind in _DTYPES, f"{kind} has other numbers than float32, bfloat16 and float16")
    num_sizes, num_strides = (text.split().count("INT") for text in match.groups())
    shape, strides = sizes[:num_sizes], sizes[num_sizes : num_sizes + num_strides]
    return _Saved(_DTYPES[kind], key, num_stored, offset, shape, strides)


def _tensor(saved: _Saved, numbers: bytes) -> "Tensor":
    """Return the tensor over a copy of its numbers. torch checks the limits of its strides."""
    import torch

    dtype = getattr(torch, saved.dtype)
    num_bytes = saved.num_stored * dtype.itemsize
    require(len(numbers) == num_bytes, f"{len(numbers)} bytes of numbers, not {num_bytes}")
    # A few numbers may be repeated by strides to any shape.
    require(
        math.prod(saved.shape) <= saved.num_stored,
        f"the shape {saved.shape} with {saved.num_stored} numbers; save a contiguous one",
    )
    stored = torch.frombuffer(bytearray(numbers), dtype=dtype)
    return stored.as_strided(saved.shape, saved.strides, saved.offset)
