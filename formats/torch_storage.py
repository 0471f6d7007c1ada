"""Storages of torch files, and the tensors that are views into them."""

from dataclasses import dataclass
from math import prod

from formats.entry_check import EntryCheck
from formats.errors import CorruptCheckpoint
from formats.pickle_errors import MalformedError
from formats.pickle_records import StorageType, TensorRecord
from formats.pickle_writer import contiguous_strides
from formats.tensor import ITEMSIZE, FileTensor, InputFile, LazyTensor, Shape, StridedTensor

_QUANTIZED = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}


def itemsize(dtype: str) -> int:
    """Bytes of an element of a storage. Tensors of quantized elements can't be read, but lie in files beside others."""
    return _QUANTIZED.get(dtype) or ITEMSIZE[dtype]


@dataclass(frozen=True)
class StorageId:
    """The identity of a storage in a pickle: ("storage", type, name, device, elements), and in old files a view."""

    dtype: str
    name: str
    elements: int
    view: object = None

    @classmethod
    def parse(cls, identity: object, source: str) -> "StorageId":
        """Parse a persistent identity; the device is ignored. Raises CorruptCheckpoint for anything else."""
        match identity:
            case ("storage", StorageType(dtype), str(name), _, int(elements), *view) if (
                elements >= 0 and len(view) < 2
            ):
                return cls(dtype, name, elements, *view)
        raise CorruptCheckpoint(
            f"{source}: refers to something that is not a storage; was it written by torch.save?"
        )

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * itemsize(self.dtype)


@dataclass(frozen=True)
class Storage:
    """A range of a file that tensors are views of."""

    file: InputFile
    offset: int
    nbytes: int
    dtype: str
    """Dtype of tensors that have none in their record."""
    check: EntryCheck | None = None


def lazy_tensor(record: TensorRecord) -> LazyTensor:
    """The tensor that a record describes. Raises CorruptCheckpoint if it is not inside its storage."""
    storage = record.storage
    if not isinstance(storage, Storage):
        raise MalformedError("a tensor without a storage")
    file, shape, dtype = storage.file, record.shape, record.dtype or storage.dtype
    what = f"{file.path}: a tensor {list(shape)} of {dtype:.40}"
    if dtype not in ITEMSIZE:
        raise CorruptCheckpoint(
            f"{what}: tensors of this type can't be read; convert it before it is saved"
        )
    if record.negated:
        raise CorruptCheckpoint(
            f"{what} is a lazy negative or conjugate of other numbers; save it with .resolve_neg().resolve_conj()"
        )
    item_bytes = ITEMSIZE[dtype]
    start = storage.offset + record.offset * item_bytes
    if not prod(shape):
        return FileTensor(file, storage.offset, shape, dtype)
    extent = 1
    for size, stride in zip(shape, record.strides, strict=True):
        extent += (size - 1) * stride
    if (record.offset + extent) * item_bytes > storage.nbytes:
        raise CorruptCheckpoint(
            f"{what} reaches past the end of its storage of {storage.nbytes} bytes; save it again"
        )
    strides = _without_single(shape, record.strides)
    if strides == _without_single(shape, contiguous_strides(shape)):
        return FileTensor(file, start, shape, dtype, storage.check)
    if prod(shape) * item_bytes > storage.nbytes:
        raise CorruptCheckpoint(
            f"{what} has more elements than its storage; save it with .contiguous()"
        )
    return StridedTensor(file, start, shape, dtype, strides, storage.check)


def _without_single(shape: Shape, strides: Shape) -> Shape:
    """Replace the strides of axes of size 1, which have no meaning, by 1."""
    return tuple(stride if size > 1 else 1 for size, stride in zip(shape, strides, strict=True))
