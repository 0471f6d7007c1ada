"""Writes the pickle of a torch file (protocol 2) with only those opcodes and names that every torch.load accepts.

weights_only=True needs no additions to its allow-list, except argparse.Namespace and numpy's names if the value contains
a Namespace or arrays.
"""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from struct import pack
from typing import Any, NamedTuple

from formats.pickle_records import STORAGE_DTYPES, NumpyArray, Opaque, TorchDtype
from formats.tensor import ITEMSIZE, Shape, byte_count

_TYPED_STORAGES = {
    dtype: name
    for name, dtype in STORAGE_DTYPES.items()
    if dtype in ITEMSIZE and "Untyped" not in name
}


@dataclass(frozen=True)
class Placeholder:
    """A tensor that is written later, as a separate storage. key: the caller's name for it, unique in the file."""

    key: str
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Constant:
    """A small tensor with known bytes (row-major, little-endian): a step counter, a generator's state."""

    shape: Shape
    dtype: str
    data: bytes


class Varying:
    """The place of a number from 0 to 2**31 - 1 that differs between otherwise equal files. A file has at most one."""


class Pickled(NamedTuple):
    content: bytes
    storages: dict[str, Placeholder | Constant]
    """Name of a storage -> its tensor. Names are "0", "1" … in the order of their first use."""
    varying: int | None
    """Offset in content of the four bytes of a Varying, which are 0 there; None without a Varying."""


def dumps(value: object) -> Pickled:
    """The pickle of value, and its tensors.

    value: None, bool, int, float, str, tuple, list, dict, OrderedDict, argparse.Namespace, TorchDtype, NumpyArray,
    Opaque, Placeholder, Constant, Varying.
    An Opaque is written as it was read: a call with its args or, if it has no args, an object with its state.
    Raises TypeError for anything else (subclasses too), and ValueError if two placeholders share a key.
    """
    writer = PickleWriter()
    writer.write(value)
    return Pickled(writer.finish(), writer.storages, writer.varying)


def varying_bytes(number: int) -> bytes:
    """The bytes that replace a Varying."""
    return pack("<i", number)


class PickleWriter:
    """The writer behind `dumps`. For very many records of one form, a caller may put their opcodes into `out` itself."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.storages: dict[str, Placeholder | Constant] = {}
        self.keys: set[str] = set()
        self.memo: dict[Hashable, int] = {}
        self.varying: int | None = None
        """Offset of the Varying in `out`."""

    def finish(self) -> bytes:
        """The complete pickle."""
        self.out += b"."
        return bytes(self.out)

    def write(self, value: object) -> None:
        """Write any value that `dumps` knows. Raises TypeError for others."""
        write = _WRITERS.get(type(value))
        if write is None:
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise TypeError(f"can't write a {name} to a torch file: {value!r:.100}")
        write(self, value)

    def once(self, content: bytes) -> None:
        """Write an immutable value the first time, and fetch it from the reader's memo afterwards."""
        if not self.fetch(content):
            self.out += content
            self.remember(content)

    def fetch(self, key: Hashable) -> bool:
        if key not in self.memo:
            return False
        self.out += self.reference(key)
        return True

    def reference(self, key: Hashable) -> bytes:
        """The opcode that fetches the value that was remembered under this key."""
        number = self.memo[key]
        return b"h" + pack("<B", number) if number < 256 else b"j" + pack("<I", number)

    def remember(self, key: Hashable) -> None:
        """Remember the value that was written last under this key."""
        number = self.memo[key] = len(self.memo)
        self.out += b"q" + pack("<B", number) if number < 256 else b"r" + pack("<I", number)

    def name(self, module: str, name: str) -> None:
        self.once(f"c{module}\n{name}\n".encode())

    def marked(self, values: Iterable[object], end: bytes) -> None:
        self.out += b"("
        for value in values:
            self.write(value)
        self.out += end

    def items(self, mapping: Mapping[object, object]) -> None:
        if mapping:
            self.marked((part for pair in mapping.items() for part in pair), b"u")

    def ordered_dict(self, mapping: Mapping[object, object]) -> None:
        self.name("collections", "OrderedDict")
        self.out += b")R"
        self.items(mapping)

    def text(self, value: str) -> None:
        if not self.fetch(value):
            content = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + pack("<I", len(content)) + content
            self.remember(value)

    def integer(self, value: int) -> None:
        if 0 <= value < 1 << 16:
            self.out += b"K" + pack("<B", value) if value < 256 else b"M" + pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + pack("<i", value)
        else:
            content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(content) > 255:
                raise ValueError(f"can't write a number of {len(content)} bytes to a torch file")
            self.out += b"\x8a" + pack("<B", len(content)) + content

    def varying_integer(self, value: Varying) -> None:
        if self.varying is not None:
            raise ValueError("a torch file has one number that varies at most")
        self.out += b"J"
        self.varying = len(self.out)
        self.out += varying_bytes(0)

    def sequence(self, values: tuple[object, ...]) -> None:
        if 1 <= len(values) <= 3:
            for value in values:
                self.write(value)
            self.out += (b"\x85", b"\x86", b"\x87")[len(values) - 1]
        elif values:
            self.marked(values, b"t")
        else:
            self.out += b")"

    def namespace(self, value: Namespace) -> None:
        self.name("argparse", "Namespace")
        self.out += b")\x81"
        self.write(vars(value))
        self.out += b"b"

    def opaque(self, value: Opaque) -> None:
        """Write an Opaque. The result of a call (a torch.Size, an enumeration member) can't change, so the same record
        is written once."""
        if value.state is None and self.fetch(id(value)):
            return
        self.name(value.module, value.name)
        self.write(value.args)
        self.out += b"R" if value.args else b"\x81"
        if value.state is not None:
            self.write(value.state)
            self.out += b"b"
        else:
            self.remember(id(value))

    def dtype(self, value: TorchDtype) -> None:
        self.name("torch", _known(value.name))

    def encoded(self, value: bytes) -> None:
        """Write bytes as a call of _codecs.encode: protocol 2 has no bytes."""
        self.name("_codecs", "encode")
        self.text(value.decode("latin1"))
        self.text("latin1")
        self.out += b"\x86R"

    def array(self, value: NumpyArray) -> None:
        """Write an array as numpy does: an empty array, then its state."""
        self.name(value.module, "_reconstruct")
        self.name("numpy", "ndarray")
        self.write((0,))
        self.encoded(b"b")
        self.out += b"\x87R("
        self.write(1)
        self.write(value.shape)
        self.name("numpy", "dtype")
        self.write((value.dtype[1:], False, True))
        self.out += b"R"
        self.write((3, value.dtype[0], None, None, None, -1, -1, 0))
        self.out += b"b"
        self.write(value.fortran)
        self.encoded(value.data)
        self.out += b"tb"

    def tensor(self, value: Placeholder | Constant) -> None:
        """Write a tensor. Dtypes without a storage class are stored in untyped storages, as in torch."""
        if isinstance(value, Placeholder):
            if value.key in self.keys:
                raise ValueError(f"two tensors of one file have the key {value.key!r}")
            self.keys.add(value.key)
        typed = _known(value.dtype) in _TYPED_STORAGES
        self.name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self.out += b"("
        self.storage(value)
        self.write(0)  # storage offset
        self.write(value.shape)
        self.write(contiguous_strides(value.shape))
        self.write(False)  # requires_grad
        self.ordered_dict({})  # backward hooks
        if not typed:
            self.dtype(TorchDtype(value.dtype))
        self.out += b"tR"

    def storage(self, value: Placeholder | Constant) -> None:
        name = str(len(self.storages))
        self.storages[name] = value
        self.out += b"("
        self.text("storage")
        if value.dtype in _TYPED_STORAGES:
            self.name("torch", _TYPED_STORAGES[value.dtype])
            size = prod(value.shape)
        else:
            self.name("torch.storage", "UntypedStorage")
            size = byte_count(value.shape, value.dtype)
        for part in (name, "cpu", size):
            self.write(part)
        self.out += b"tQ"


def contiguous_strides(shape: Shape) -> Shape:
    """Strides in elements, as torch counts them: an axis of size 0 counts as 1."""
    return tuple(prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def _known(dtype: str) -> str:
    if dtype not in ITEMSIZE:
        raise TypeError(f"can't write the dtype {dtype!r} to a torch file")
    return dtype


def _plain(content: bytes) -> Callable[[PickleWriter, Any], None]:
    def write(writer: PickleWriter, value: object) -> None:
        writer.out += content

    return write


def _dict(writer: PickleWriter, value: dict[object, object]) -> None:
    writer.out += b"}"
    writer.items(value)


def _list(writer: PickleWriter, value: list[object]) -> None:
    writer.out += b"]"
    writer.marked(value, b"e")


def _bool(writer: PickleWriter, value: bool) -> None:
    writer.out += b"\x88" if value else b"\x89"


def _float(writer: PickleWriter, value: float) -> None:
    writer.out += b"G" + pack(">d", value)


_WRITERS: dict[type, Callable[[PickleWriter, Any], None]] = {
    type(None): _plain(b"N"), bool: _bool, int: PickleWriter.integer, float: _float, str: PickleWriter.text,
    tuple: PickleWriter.sequence, list: _list, dict: _dict, OrderedDict: PickleWriter.ordered_dict,
    Namespace: PickleWriter.namespace, TorchDtype: PickleWriter.dtype, NumpyArray: PickleWriter.array, Opaque: PickleWriter.opaque,
    Placeholder: PickleWriter.tensor, Constant: PickleWriter.tensor, Varying: PickleWriter.varying_integer,
}  # fmt: skip
