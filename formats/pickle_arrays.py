"""Tensors and numpy arrays in pickles: the records that the calls of torch and numpy which rebuild them give."""

import re
from math import prod
from typing import Any, cast

from formats.ceilings import AXES, AXIS
from formats.lazy_numpy import np
from formats.pickle_errors import MalformedError
from formats.pickle_records import (
    NUMPY_1_MODULE,
    NumpyArray,
    NumpyDtype,
    TensorRecord,
    TorchDtype,
)
from formats.tensor import Shape

_NUMPY_CODE = re.compile(r"[?b]|b1|[iu][1248]|f[248]|c(8|16)|[SUV]\d{1,4}")


def as_tuple(value: object) -> tuple[object, ...]:
    """The value. Raises MalformedError unless it is a tuple."""
    if type(value) is not tuple:
        raise MalformedError(f"a tuple was expected, not a {type(value).__name__}")
    return value


def naturals(values: object) -> Shape:
    """The value. Raises MalformedError unless it is a tuple of natural numbers."""
    sizes = as_tuple(values)
    if len(sizes) > AXES:
        raise MalformedError(f"a shape of more than {AXES} axes")
    for size in sizes:
        if type(size) is not int or not 0 <= size < AXIS:
            raise MalformedError("a shape, stride or offset that is not made of natural numbers")
    return cast(Shape, sizes)


def tensor_v1(storage: object, offset: object, shape: object, strides: object) -> TensorRecord:
    """The result of torch._utils._rebuild_tensor."""
    return _tensor(storage, offset, shape, strides, None)


def tensor_v2(
    storage: object, offset: object, shape: object, strides: object,
    grad: object, hooks: object, metadata: object = None,
) -> TensorRecord:  # fmt: skip
    """The result of torch._utils._rebuild_tensor_v2."""
    return _tensor(storage, offset, shape, strides, metadata)


def tensor_v3(
    storage: object, offset: object, shape: object, strides: object,
    grad: object, hooks: object, dtype: object, metadata: object = None,
) -> TensorRecord:  # fmt: skip
    """The result of torch._utils._rebuild_tensor_v3."""
    if type(dtype) is not TorchDtype:
        raise MalformedError("a tensor without a dtype")
    return _tensor(storage, offset, shape, strides, metadata, dtype.name)


def _tensor(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    metadata: object,
    dtype: str | None = None,
) -> TensorRecord:
    """A checked record. metadata: the last argument of the functions that have it; otherwise None."""
    (start,), sizes, steps = naturals((offset,)), naturals(shape), naturals(strides)
    if len(sizes) != len(steps):
        raise MalformedError("a tensor with more axes than strides, or fewer")
    return TensorRecord(storage, start, sizes, steps, dtype, _is_negated(metadata))


def _is_negated(metadata: object) -> bool:
    """True if a tensor's metadata has the bit `conj` or `neg`. Both together could be computed, but nobody saves them."""
    return isinstance(metadata, dict) and any(metadata.get(bit) for bit in ("conj", "neg"))


def numpy_dtype(code: object, align: object = False, copy: object = True, /) -> NumpyDtype:
    if not isinstance(code, str) or not _NUMPY_CODE.fullmatch(code):
        raise MalformedError(
            f"a numpy array of {code[:20] if isinstance(code, str) else 'something'}, not of numbers"
        )
    return NumpyDtype(code, "|" if np.dtype(code).itemsize == 1 else "<")


def numpy_empty(kind: object, shape: object, code: object, /) -> NumpyArray:
    """An array without its state, as numpy 2 makes it."""
    return NumpyArray()


def numpy_1_empty(kind: object, shape: object, code: object, /) -> NumpyArray:
    """An array of numpy 1. It is written again for numpy 1: releases before 1.26 don't have numpy 2's name."""
    return NumpyArray(module=NUMPY_1_MODULE)


def numpy_from_buffer(
    data: object, dtype: object, shape: object, order: object, axes: object = None, /
) -> NumpyArray:
    """An array as numpy pickles it in protocol 5. axes: the order "K" of permuted axes, since numpy 2.3."""
    array = NumpyArray()
    build_array(array, (None, shape, dtype, order == "F", data))
    if order == "K" and axes is not None:
        stored = np.frombuffer(array.data, array.dtype).reshape(array.shape)
        values = stored.transpose(cast(Any, as_tuple(axes)))
        array.shape, array.data = values.shape, values.tobytes()
    return array


def build_array(array: NumpyArray, state: tuple[object, ...]) -> None:
    _, shape, dtype, fortran, data = state
    if type(dtype) is not NumpyDtype or type(data) is not bytes or type(fortran) not in (bool, int):
        raise MalformedError("a numpy array that is not plain numbers")
    sizes = naturals(shape)
    if prod(sizes) * np.dtype(str(dtype)).itemsize != len(data):
        raise MalformedError(f"a numpy array {list(sizes)} of {dtype} in {len(data)} bytes")
    array.dtype, array.shape, array.data, array.fortran = str(dtype), sizes, data, bool(fortran)


def numpy_scalar(dtype: object, data: object, /) -> object:
    """A Python number. Text and raw bytes stay a record."""
    if (
        type(dtype) is not NumpyDtype
        or type(data) is not bytes
        or len(data) != np.dtype(str(dtype)).itemsize
    ):
        raise MalformedError("a numpy number of the wrong length")
    if dtype.code[0] in "SUV":
        return NumpyArray(str(dtype), (), data)
    number: object = np.frombuffer(data, str(dtype))[0].item()
    return number
