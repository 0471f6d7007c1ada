"""Writes the pickle of a torch file (protocol 2) with those opcodes and names alone that every torch.load accepts.

weights_only=True needs nothing on its allow-list but argparse.Namespace, and that only where a Namespace was given.
"""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from struct import pack
from typing import Any

from formats.pickle_records import STORAGE_DTYPES, NumpyArray, Opaque, TorchDtype
from formats.tensor import ITEMSIZE, Shape, byte_count

_TYPED_STORAGES = {dtype: name for name, dtype in STORAGE_DTYPES.items() if dtype in ITEMSIZE and "Untyped" not in name}


@dataclass(frozen=True)
class Placeholder:
    """A tensor that is written later, as a storage of its own. key: the caller's name for it, unique in the file."""

    key: str
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Constant:
    """A small tensor whose bytes are known (row-major, little-endian): a step counter, a generator's state."""

    shape: Shape
    dtype: str
    data: bytes


def dumps(value: object) -> tuple[bytes, dict[str, Placeholder | Constant]]:
    """The pickle of value, and its tensors by storage name ("0", "1" … in the order in which they were met).

    value: None, bool, int, float, str, tuple, list, dict, OrderedDict, argparse.Namespace, TorchDtype, NumpyArray, Opaque,
    Placeholder, Constant.
    An Opaque is what it was read from: a call with its args, or without args an object that is given its state.
    Raises TypeError for anything else (subclasses too), ValueError for a key that two placeholders share.
    """
    writer = _Writer()
    writer.write(value)
    return b"\x80\x02" + b"".join(writer.out) + b".", writer.storages


class _Writer:
    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.storages: dict[str, Placeholder | Constant] = {}
        self.keys: set[str] = set()
        self.memo: dict[Hashable, int] = {}

    def write(self, value: object) -> None:
        write = _WRITERS.get(type(value))
        if write is None:
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise TypeError(f"can't write a {name} to a torch file: {value!r:.100}")
        write(self, value)

    def once(self, content: bytes) -> None:
        """Something immutable: written the first time, fetched from the reader's memo afterwards."""
        if not self.fetch(content):
            self.out.append(content)
            self.remember(content)

    def fetch(self, key: Hashable) -> bool:
        number = self.memo.get(key)
        if number is not None:
            self.out.append(b"h" + pack("<B", number) if number < 256 else b"j" + pack("<I", number))
        return number is not None

    def remember(self, key: Hashable) -> None:
        """What was written last."""
        number = self.memo[key] = len(self.memo)
        self.out.append(b"q" + pack("<B", number) if number < 256 else b"r" + pack("<I", number))

    def name(self, module: str, name: str) -> None:
        self.once(f"c{module}\n{name}\n".encode())

    def marked(self, values: Iterable[object], end: bytes) -> None:
        self.out.append(b"(")
        for value in values:
            self.write(value)
        self.out.append(end)

    def items(self, mapping: Mapping[object, object]) -> None:
        if mapping:
            self.marked((part for pair in mapping.items() for part in pair), b"u")

    def ordered_dict(self, mapping: Mapping[object, object]) -> None:
        self.name("collections", "OrderedDict")
        self.out.append(b")R")
        self.items(mapping)

    def text(self, value: str) -> None:
        if not self.fetch(value):
            content = value.encode("utf-8", "surrogatepass")
            self.out.append(b"X" + pack("<I", len(content)) + content)
            self.remember(value)

    def integer(self, value: int) -> None:
        if 0 <= value < 1 << 16:
            self.out.append(b"K" + pack("<B", value) if value < 256 else b"M" + pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            self.out.append(b"J" + pack("<i", value))
        else:
            content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(content) > 255:
                raise ValueError(f"can't write a number of {len(content)} bytes to a torch file")
            self.out.append(b"\x8a" + pack("<B", len(content)) + content)

    def sequence(self, values: tuple[object, ...]) -> None:
        if 1 <= len(values) <= 3:
            for value in values:
                self.write(value)
            self.out.append((b"\x85", b"\x86", b"\x87")[len(values) - 1])
        elif values:
            self.marked(values, b"t")
        else:
            self.out.append(b")")

    def namespace(self, value: Namespace) -> None:
        self.name("argparse", "Namespace")
        self.out.append(b")\x81")
        self.write(vars(value))
        self.out.append(b"b")

    def opaque(self, value: Opaque) -> None:
        """A call's result (a torch.Size, a member of an enumeration) can't change: the same record is written once."""
        if value.state is None and self.fetch(id(value)):
            return
        self.name(value.module, value.name)
        self.write(value.args)
        self.out.append(b"R" if value.args else b"\x81")
        if value.state is not None:
            self.write(value.state)
            self.out.append(b"b")
        else:
            self.remember(id(value))

    def dtype(self, value: TorchDtype) -> None:
        self.name("torch", _known(value.name))

    def encoded(self, value: bytes) -> None:
        """Protocol 2 knows none."""
        self.name("_codecs", "encode")
        self.text(value.decode("latin1"))
        self.text("latin1")
        self.out.append(b"\x86R")

    def array(self, value: NumpyArray) -> None:
        """As numpy 2 writes it: an empty array, then its state."""
        self.name("numpy._core.multiarray", "_reconstruct")
        self.name("numpy", "ndarray")
        self.write((0,))
        self.encoded(b"b")
        self.out.append(b"\x87R(")
        self.write(1)
        self.write(value.shape)
        self.name("numpy", "dtype")
        self.write((value.dtype[1:], False, True))
        self.out.append(b"R")
        self.write((3, value.dtype[0], None, None, None, -1, -1, 0))
        self.out.append(b"b")
        self.write(value.fortran)
        self.encoded(value.data)
        self.out.append(b"tb")

    def tensor(self, value: Placeholder | Constant) -> None:
        """Dtypes without a storage class of their own lie in untyped storages, as torch writes them."""
        if isinstance(value, Placeholder):
            if value.key in self.keys:
                raise ValueError(f"two tensors of one file have the key {value.key!r}")
            self.keys.add(value.key)
        typed = _known(value.dtype) in _TYPED_STORAGES
        self.name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self.out.append(b"(")
        self.storage(value)
        for part in (0, value.shape, contiguous_strides(value.shape), False):
            self.write(part)
        self.ordered_dict({})  # backward hooks
        if not typed:
            self.dtype(TorchDtype(value.dtype))
        self.out.append(b"tR")

    def storage(self, value: Placeholder | Constant) -> None:
        name = str(len(self.storages))
        self.storages[name] = value
        self.out.append(b"(")
        self.text("storage")
        if value.dtype in _TYPED_STORAGES:
            self.name("torch", _TYPED_STORAGES[value.dtype])
            size = prod(value.shape)
        else:
            self.name("torch.storage", "UntypedStorage")
            size = byte_count(value.shape, value.dtype)
        for part in (name, "cpu", size):
            self.write(part)
        self.out.append(b"tQ")


def contiguous_strides(shape: Shape) -> Shape:
    """In elements, as torch counts them: an axis of size 0 counts as 1."""
    return tuple(prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def _known(dtype: str) -> str:
    if dtype not in ITEMSIZE:
        raise TypeError(f"can't write the dtype {dtype!r} to a torch file")
    return dtype


def _plain(content: bytes) -> Callable[[_Writer, Any], None]:
    return lambda writer, value: writer.out.append(content)


def _dict(writer: _Writer, value: dict[object, object]) -> None:
    writer.out.append(b"}")
    writer.items(value)


def _list(writer: _Writer, value: list[object]) -> None:
    writer.out.append(b"]")
    writer.marked(value, b"e")


def _bool(writer: _Writer, value: bool) -> None:
    writer.out.append(b"\x88" if value else b"\x89")


def _float(writer: _Writer, value: float) -> None:
    writer.out.append(b"G" + pack(">d", value))


_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _plain(b"N"), bool: _bool, int: _Writer.integer, float: _float, str: _Writer.text,
    tuple: _Writer.sequence, list: _list, dict: _dict, OrderedDict: _Writer.ordered_dict,
    Namespace: _Writer.namespace, TorchDtype: _Writer.dtype, NumpyArray: _Writer.array, Opaque: _Writer.opaque,
    Placeholder: _Writer.tensor, Constant: _Writer.tensor,
}  # fmt: skip
