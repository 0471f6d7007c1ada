"""The values that a pickle is read into: plain values, and inert records for everything else.

No record holds a reference to a class or function of the program that wrote the file. It holds only the name.
"""

from dataclasses import dataclass, field

from formats.tensor import Shape

STORAGE_DTYPES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8", "_UntypedStorage": "uint8",
}  # fmt: skip
"""torch's storage class -> dtype of its elements."""


def _is_small(value: object) -> bool:
    return (
        len(value) <= 256
        if isinstance(value, (str, bytes))
        else isinstance(value, (int, float, type(None)))
    )


@dataclass(frozen=True)
class TorchDtype:
    """A dtype of torch: torch.float32 is TorchDtype("float32")."""

    name: str


@dataclass(frozen=True)
class StorageType:
    """A storage class of torch: torch.FloatStorage is StorageType("float32"). Untyped storages hold uint8."""

    dtype: str


@dataclass(frozen=True)
class Global:
    """A class or function that was named but not called."""

    module: str
    name: str
    inert: bool = field(default=False, compare=False)
    """True if calling it makes an Opaque without a warning."""


@dataclass(eq=False, repr=False, slots=True)
class Opaque:
    """An object of a class that this reader does not know. It records how the object would be made, and never holds the
    object itself.

    Two records are equal by value if they are made only from plain numbers and strings, as enumeration members are.
    Otherwise they are equal by identity.
    """

    module: str
    name: str
    args: tuple[object, ...]
    state: object = None
    """The argument of __setstate__, or the attributes."""
    items: list[object] | None = None
    """Appended values, and (key, value) pairs that were set; None if there are none, as in nearly all records."""

    @property
    def _has_plain_args(self) -> bool:
        return 1 <= len(self.args) <= 8 and all(_is_small(arg) for arg in self.args)

    def __repr__(self) -> str:
        """The class, and plain arguments. Attributes may hold one another, or multiply to any length."""
        args = self.args if self._has_plain_args else "..."
        return f"Opaque({self.module}.{self.name}, {args})"

    def _identity(self) -> object:
        if not self._has_plain_args or self.state is not None or self.items:
            return id(self)
        # The hash of a text differs in each process: nobody can make many records of one hash.
        return self.module, self.name, repr(self.args)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Opaque) and self._identity() == other._identity()
        )

    def __hash__(self) -> int:
        return hash(self._identity()) if self.args else id(self)


@dataclass
class NumpyDtype:
    """numpy.dtype: a type code such as "u4", and a byte order "<", ">" or "|"."""

    code: str
    order: str = "<"

    def __str__(self) -> str:
        return self.order + self.code


NUMPY_MODULE, NUMPY_1_MODULE = "numpy._core.multiarray", "numpy.core.multiarray"


@dataclass
class NumpyArray:
    """The parts of numpy.frombuffer(data, dtype).reshape(shape)."""

    dtype: str = "|u1"
    shape: Shape = (0,)
    data: bytes = field(default=b"", repr=False)
    fortran: bool = False
    """True if the elements along the first axis are contiguous."""
    module: str = field(default=NUMPY_MODULE, compare=False, repr=False)
    """The module of numpy by which a reader makes the array. It has another name in numpy 1."""


@dataclass(frozen=True)
class TensorRecord:
    """A view into a storage. Offset and strides count elements. They are only known to be natural numbers."""

    storage: object
    """The result of the caller's `persistent` hook for the storage's identity."""
    offset: int
    shape: Shape
    strides: Shape
    dtype: str | None = None
    """The dtype; None for that of the storage."""
    negated: bool = False
    """True for a view whose values are the negative or conjugate numbers of the stored ones."""
