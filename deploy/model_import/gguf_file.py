"""A GGUF file (version 2 or 3, little-endian), checked against its own size before anything is believed."""

import mmap
import struct
from reprlib import repr

import numpy as np

from .dequantise import FORMATS
from .errors import ImportFailure

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 1 << 20
_MAX_NAME_LENGTH = 1024
_MAX_ALIGNMENT = 1 << 16


class Tensor:
    """One entry of the tensor table. `shape` is row-major: GGUF stores dimensions fastest first."""

    def __init__(self, name, type_id, shape, offset):
        self.name = name
        self.type_id = type_id
        self.shape = shape
        self.offset = offset
        self.num_rows = 1
        for size in shape[:-1]:
            self.num_rows *= size
        _, elements, block_bytes, _ = FORMATS[type_id]
        self.row_bytes = shape[-1] // elements * block_bytes
        self.num_bytes = self.num_rows * self.row_bytes


class _Cursor:
    """Reads forward through the header; never past the end of the file."""

    def __init__(self, data):
        self.data = data
        self.position = 0

    def take(self, num_bytes, what):
        if num_bytes > len(self.data) - self.position:
            raise ImportFailure(
                f"truncated: {what} needs {num_bytes} bytes at offset {self.position}, the file has {len(self.data)}"
            )
        start = self.position
        self.position += num_bytes
        return self.data[start : self.position]

    def scalar(self, code, what):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what):
        raw = self.take(self.scalar("Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ImportFailure(f"{what} at offset {self.position - len(raw)} is not UTF-8: {error.reason}") from None

    def name(self, what):
        text = self.string(what)
        if not 0 < len(text) <= _MAX_NAME_LENGTH:
            raise ImportFailure(f"{what} has {len(text)} characters, allowed are 1 to {_MAX_NAME_LENGTH}")
        return text

    def value(self, kind, what):
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise ImportFailure(f"{what} has value type {kind}, known are 0 to 12")
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if kind == _STRING:
            if count > (len(self.data) - self.position) // 8:
                raise ImportFailure(f"truncated: {what} claims {count} strings, the file has {len(self.data)} bytes")
            return [self.string(what) for _ in range(count)]
        if kind not in _SCALARS:
            raise ImportFailure(f"{what} is an array of value type {kind}; only numbers and strings are allowed")
        code = "<" + _SCALARS[kind]
        return np.frombuffer(self.take(count * struct.calcsize(code), what), code).tolist()


class GgufFile:
    """Metadata as a dict, tensors as a dict by name, and the rows of a tensor as bytes. Holds the file mapped."""

    def __init__(self, path):
        with open(path, "rb") as file:
            file.seek(0, 2)
            if file.tell() < 24:
                raise ImportFailure(f"truncated: a GGUF header has 24 bytes, the file has {file.tell()}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._map)
        magic, version = cursor.take(4, "magic"), cursor.scalar("I", "version")
        if magic != b"GGUF":
            raise ImportFailure(f"not a GGUF file: it begins with {magic!r}")
        if version not in (2, 3):
            raise ImportFailure(f"GGUF version {version}, known are 2 and 3 (little-endian)")
        num_tensors, num_entries = cursor.scalar("Q", "tensor count"), cursor.scalar("Q", "metadata count")
        for count, what in ((num_tensors, "tensors"), (num_entries, "metadata entries")):
            if count > _MAX_ENTRIES:
                raise ImportFailure(f"{count} {what}, the limit is {_MAX_ENTRIES}")
        self.metadata = {}
        for _ in range(num_entries):
            key = cursor.name("metadata key")
            if key in self.metadata:
                raise ImportFailure(f"metadata key {key!r} occurs twice")
            self.metadata[key] = cursor.value(cursor.scalar("I", key), key)
        self.tensors = self._read_tensor_table(cursor, num_tensors)

    def _read_tensor_table(self, cursor, num_tensors):
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= _MAX_ALIGNMENT or alignment % 8:
            raise ImportFailure(f"general.alignment is {repr(alignment)}, expected a multiple of 8 to {_MAX_ALIGNMENT}")
        tensors = {}
        for _ in range(num_tensors):
            tensor = self._read_tensor(cursor)
            if tensor.name in tensors:
                raise ImportFailure(f"tensor {tensor.name!r} occurs twice")
            tensors[tensor.name] = tensor
        data_start = -(-cursor.position // alignment) * alignment
        for tensor in tensors.values():
            if tensor.offset % alignment:
                raise ImportFailure(f"tensor {tensor.name!r} at offset {tensor.offset} is not aligned to {alignment}")
            tensor.offset += data_start
            if tensor.offset + tensor.num_bytes > len(self._map):
                raise ImportFailure(
                    f"truncated: tensor {tensor.name!r} ends at byte {tensor.offset + tensor.num_bytes}, "
                    f"the file has {len(self._map)}"
                )
        return tensors

    @staticmethod
    def _read_tensor(cursor):
        name = cursor.name("tensor name")
        num_dims = cursor.scalar("I", name)
        if not 1 <= num_dims <= 4:
            raise ImportFailure(f"tensor {name!r} has {num_dims} dimensions, allowed are 1 to 4")
        shape = tuple(cursor.scalar("Q", name) for _ in range(num_dims))[::-1]
        type_id, offset = cursor.scalar("I", name), cursor.scalar("Q", name)
        if type_id not in FORMATS:
            known = ", ".join(f"{i} ({f[0]})" for i, f in FORMATS.items())
            raise ImportFailure(f"tensor {name!r} has element type {type_id}, known are {known}")
        type_name, elements, _, _ = FORMATS[type_id]
        if min(shape) == 0 or shape[-1] % elements:
            raise ImportFailure(f"{name!r} has shape {list(shape)}, {type_name} rows are multiples of {elements}")
        return Tensor(name, type_id, shape, offset)

    def rows(self, tensor):
        """uint8 [rows, row bytes], a view of the mapped file."""
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return raw.reshape(tensor.num_rows, tensor.row_bytes)
