"""What a pickle is read into: plain values, and inert records for everything else.

No record holds a reference to a class or function of the program that wrote the file, only its name.
"""

from dataclasses import dataclass, field

from formats.tensor import Shape

STORAGE_DTYPES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "UntypedStorage": "uint8", "_UntypedStorage": "uint8",
}  # fmt: skip
"""torch's storage classes and the dtype of their elements."""


def _is_small(value: object) -> bool:
    return len(value) <= 256 if isinstance(value, (str, bytes)) else isinstance(value, (int, float, type(None)))


@dataclass(frozen=True)
class TorchDtype:
    """torch.float32 is TorchDtype("float32")."""

    name: str


@dataclass(frozen=True)
class StorageType:
    """torch.FloatStorage is StorageType("float32"); untyped storages hold uint8."""

    dtype: str


@dataclass(frozen=True)
class Global:
    """A class or function that was named but not called."""

    module: str
    name: str
    inert: bool = field(default=False, compare=False)
    """Whether calling it makes an Opaque of which nothing needs to be said."""


@dataclass(eq=False, slots=True)
class Opaque:
    """An object of a class that this reader does not know: how it would be made, never the object itself.

    Equal by value if made from plain numbers and strings alone, as enumeration members are; otherwise by identity.
    """

    module: str
    name: str
    args: tuple[object, ...]
    state: object = None
    """What __setstate__ or the attributes would be given."""
    items: list[object] | None = None
    """Appended values, and (key, value) pairs that were set; None where there are none, as of nearly all."""

    def _identity(self) -> object:
        plain = 1 <= len(self.args) <= 8 and all(_is_small(arg) for arg in self.args)
        return (self.module, self.name, self.args) if plain and self.state is None and not self.items else id(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Opaque) and self._identity() == other._identity())

    def __hash__(self) -> int:
        return hash(self._identity()) if self.args else id(self)


@dataclass
class NumpyDtype:
    """numpy.dtype: a type code such as "u4", and "<", ">" or "|" for the order of its bytes."""

    code: str
    order: str = "<"

    def __str__(self) -> str:
        return self.order + self.code


@dataclass
class NumpyArray:
    """The parts of numpy.frombuffer(data, dtype).reshape(shape)."""

    dtype: str = "|u1"
    shape: Shape = (0,)
    data: bytes = field(default=b"", repr=False)
    fortran: bool = False
    """Whether the first axis is the one whose elements lie side by side."""


@dataclass(frozen=True)
class TensorRecord:
    """A view into a storage. Offset and strides count elements; all that was checked is that they are natural."""

    storage: object
    """What the caller's `persistent` made of the storage's identity."""
    offset: int
    shape: Shape
    strides: Shape
    dtype: str | None = None
    """None: that of the storage."""
