"""The only classes and functions that a pickle can call: a fixed table from names to this package's harmless
replacements.

A name outside the table is never imported. A call of such a name makes an Opaque record if the name belongs to a
framework that writes checkpoints. Any other call raises UnsafeCallError.
"""

import re
from argparse import Namespace
from collections.abc import Callable
from functools import lru_cache
from pathlib import PurePosixPath, PureWindowsPath

from formats.pickle_arrays import (
    as_tuple,
    build_array,
    naturals,
    numpy_1_empty,
    numpy_dtype,
    numpy_empty,
    numpy_from_buffer,
    numpy_scalar,
    tensor_v1,
    tensor_v2,
    tensor_v3,
)
from formats.pickle_errors import MalformedError, UnsafeCallError
from formats.pickle_keys import KeyCheck
from formats.pickle_records import (
    NUMPY_1_MODULE,
    NUMPY_MODULE,
    STORAGE_DTYPES,
    Global,
    NumpyArray,
    NumpyDtype,
    Opaque,
    StorageType,
    TensorRecord,
    TorchDtype,
)

TensorHook = Callable[[TensorRecord], object]


_FRAMEWORKS = {
    "torch", "numpy", "megatron", "transformer_engine", "transformer_engine_torch", "omegaconf", "nemo", "lightning",
    "pytorch_lightning", "deepspeed", "apex", "modelopt",
}  # fmt: skip
_HARMLESS = {
    "builtins": {"object", "range", "slice"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fp16.loss_scaler": {"DynamicLossScaler", "LossScaler"},
    "fractions": {"Fraction"},
    "io": {"BytesIO", "StringIO"},
    "signal": {"Signals", "Handlers"},
    "types": {"SimpleNamespace"},
    "uuid": {"UUID"},
}  # fmt: skip
"""Classes of the standard library, and of Megatron-LM's first release (fp16), that may become Opaque records."""

_ORDINARY = re.compile(
    r"""torch\.(device|Generator|_C\.Generator|distributed\.remote_device\._remote_device|serialization\._get_layout|_utils\._rebuild_\w+|torch_version\.TorchVersion)
    |torch\.(nn|optim|amp|cuda\.amp|distributed\.(checkpoint|tensor|_tensor|_shard|fsdp|device_mesh|_mesh_layout))\.(_*[a-z]\w*\.)*(_?[A-Z]\w*\.)*_?[A-Z]\w*
    |numpy\.random\._pickle\.__\w+_ctor|numpy\.random\.bit_generator\.__pyx_unpickle_\w+|numpy\.random\.([a-z_]\w*\.)*[A-Z]\w*|numpy\.dtypes\.\w+|numpy\.ma\.core\._mareconstruct
    |torch\.distributed\.checkpoint\.metadata\._MEM_FORMAT_ENCODING""",
    re.VERBOSE,
)
"""Names of torch and numpy that checkpoints use: functions by name, and classes of some modules. A module begins with a small
letter and a class with a capital one, so that a name matches in one way only, and a long one takes no longer."""

_DTYPE = re.compile(r"bool|(b?float|q?u?int|complex|bits)\d\w*")
_RENAMED = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "_io": "io",
    "pathlib._local": "pathlib",
}
_RENAMED_BUILTINS = {"xrange": "range", "long": "int", "unicode": "str"}
"""Python pickles these names as Python 2 had them, up to protocol 2, in which torch saves."""


def resolve(module: str, name: str) -> object:
    """The replacement of a name: a TorchDtype, StorageType, Opaque (signals) or Global.

    The spellings of different versions of Python and numpy give the same replacement.
    """
    if max(len(module), len(name)) > 1024 or not (module + name).isprintable():
        raise MalformedError("a class whose name is not a name")
    module = _RENAMED.get(module, module)
    if module == "builtins":
        name = _RENAMED_BUILTINS.get(name, name)
    if module.startswith("numpy.core.") and (module, name) not in _VALUES:
        module = "numpy._core." + module.removeprefix("numpy.core.")
    if module == "torch" and _DTYPE.fullmatch(name):
        return TorchDtype(name)
    if module.partition(".")[0] == "torch" and name in STORAGE_DTYPES:
        return StorageType(STORAGE_DTYPES[name])
    if module == "signal" and re.fullmatch("SIG[A-Z0-9]+", name):
        # Python up to 3.10 names the member, later versions call the class.
        return Opaque("signal", "Signals", (name,))
    return Global(module, name, _is_inert(module, name))


def _is_inert(module: str, name: str) -> bool:
    stand_ins = (_TENSORS, _WRAPPERS, _BY_TYPE, _VALUES, {("copyreg", "_reconstructor")})
    return (
        not any((module, name) in known for known in stand_ins)
        and _is_record(module, name)
        and not _is_unusual(f"{module}.{name}")
    )


def _is_record(module: str, name: str) -> bool:
    return module.partition(".")[0] in _FRAMEWORKS or name in _HARMLESS.get(module, ())


def call(function: object, args: tuple[object, ...], tensor: TensorHook) -> object:
    """The result of a call, made without calling it. tensor: a hook that converts a TensorRecord to the value in its
    place.

    Raises UnsafeCallError. Raises MalformedError (or a TypeError or ValueError of Python) for arguments that don't fit.
    """
    if type(function) is not Global:
        raise MalformedError(
            f"a call of something that is not a function ({type(function).__name__})"
        )
    key = function.module, function.name
    if key in _TENSORS:
        return tensor(_TENSORS[key](*args))
    if key in _WRAPPERS:
        return args[0]
    if key in _BY_TYPE:
        _require_rebuilding(args[0])
        made = call(args[0], as_tuple(args[2]), tensor)
        if type(made) is Opaque and len(args) > 3:
            made.state = args[3]  # the place of a DTensor's part in the whole
        return made
    if key == ("copyreg", "_reconstructor"):
        return call(args[0], (), tensor)
    if key in _VALUES:
        return _VALUES[key](*args)
    found = member(function, args)
    if found is not None:
        return found
    if _is_record(*key):
        return Opaque(*key, args)
    what = f"{function.module}.{function.name}"
    raise UnsafeCallError(
        f"asks to call {what}; the file is a program, not a checkpoint; nothing was executed"
    )


def member(function: Global, args: tuple[object, ...]) -> object | None:
    """The name in a class that a call of getattr asks for; None for another call.

    Python 3.11.0 to 3.11.3 pickles a member of an enumeration so, and protocol 2 a class in a class. Nothing is looked up.
    """
    if (function.module, function.name) != ("builtins", "getattr") or len(args) != 2:
        return None
    owner, name = args
    if type(owner) is not Global or not _is_record(owner.module, owner.name):
        return None
    is_name = isinstance(name, str) and name.isidentifier()
    return resolve(owner.module, f"{owner.name}.{name}") if is_name else None


def _require_rebuilding(function: object) -> None:
    """Raise MalformedError for a function that copies its arguments: the caller counts those of the outer call alone."""
    if type(function) is Global and (function.module, function.name) in _VALUES:
        raise MalformedError("a tensor that is rebuilt by a function of Python or numpy")


def is_unusual(record: Opaque) -> bool:
    """True if an object is made by a function or class of torch or numpy that no known checkpoint needs. It may be
    meant to run code."""
    return _is_unusual(f"{record.module}.{record.name}")


@lru_cache(1 << 10)  # a model has very many objects of a few classes
def _is_unusual(name: str) -> bool:
    return name.startswith(("torch.", "numpy.")) and _ORDINARY.fullmatch(name) is None


def build(target: object, state: object) -> None:
    """Give an object its attributes."""
    if type(target) is Opaque:
        target.state = state
    elif (
        type(target) is Namespace and type(state) is dict and all(type(key) is str for key in state)
    ):
        vars(target).update(state)
    elif type(target) is NumpyArray:
        build_array(target, as_tuple(state))
    elif type(target) is NumpyDtype:
        _, order, base, names, *_ = as_tuple(state)
        if order not in ("<", ">", "|", "=") or base is not None or names is not None:
            raise MalformedError("a numpy array that is not plain numbers")
        target.order = "<" if order == "=" else str(order)
    elif type(target) is not dict:
        # An OrderedDict may have attributes (`_metadata` of a state dict). They are not needed.
        raise MalformedError(f"attributes for a {type(target).__name__}")


def _dict(pairs: object = (), /) -> dict[object, object]:
    if isinstance(pairs, dict):
        return dict(pairs)
    made = {}
    check_key = KeyCheck()
    for pair in _list(pairs):
        key, value = _list(pair)
        check_key(key)
        made[key] = value
    return made


def _list(values: object = (), /) -> list[object]:
    if not isinstance(values, (list, tuple, set, frozenset)):
        raise MalformedError(f"a list was expected, not a {type(values).__name__}")
    return list(values)


def _set(values: object = (), /) -> set[object]:
    members = _list(values)
    check_key = KeyCheck()
    for member in members:
        check_key(member)
    return set(members)


def _frozenset(values: object = (), /) -> frozenset[object]:
    return frozenset(_set(values))


def _encode(text: object, codec: object) -> bytes:
    """Bytes as Python pickles them in protocol 2: text and the codec latin1."""
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise MalformedError("_codecs.encode with anything but text and latin1")
    return text.encode("latin1")


def _bytes(content: object = b"", codec: object = "latin1", /) -> bytes:
    return content if type(content) is bytes else _encode(content, codec)


def _complex(real: object, imaginary: object, /) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise MalformedError("a complex number that is not made of two floats")
    return complex(real, imaginary)


def _path(flavour: type[PurePosixPath] | type[PureWindowsPath]) -> Callable[..., str]:
    def join(*parts: object) -> str:
        names = [part for part in parts if isinstance(part, str)]
        if len(names) != len(parts):
            raise MalformedError("a path that is not made of strings")
        return flavour(*names).as_posix()

    return join


_TENSORS: dict[tuple[str, str], Callable[..., TensorRecord]] = {
    ("torch._utils", "_rebuild_tensor"): tensor_v1,
    ("torch._utils", "_rebuild_tensor_v2"): tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): tensor_v3,
}
_WRAPPERS = {
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_parameter_with_state"),
}
"""Functions called with (tensor, ...), of which only the tensor is used."""
_BY_TYPE = {("torch._tensor", "_rebuild_from_type_v2"), ("torch._tensor", "_rebuild_from_type")}
"""Functions called with (function, class, arguments, attributes), for tensors with attributes."""
_VALUES: dict[tuple[str, str], Callable[..., object]] = {
    ("_codecs", "encode"): _encode,
    ("argparse", "Namespace"): Namespace,
    ("builtins", "bytearray"): _bytes,
    ("builtins", "bytes"): _bytes,
    ("builtins", "complex"): _complex,
    ("builtins", "dict"): _dict,
    ("builtins", "frozenset"): _frozenset,
    ("builtins", "list"): _list,
    ("builtins", "set"): _set,
    ("collections", "Counter"): _dict,
    ("collections", "OrderedDict"): _dict,
    ("collections", "defaultdict"): lambda factory=None: {},
    ("collections", "deque"): lambda values=(), length=None: _list(values),
    ("numpy", "dtype"): numpy_dtype,
    (NUMPY_MODULE, "_reconstruct"): numpy_empty,
    (NUMPY_1_MODULE, "_reconstruct"): numpy_1_empty,
    ("numpy._core.multiarray", "scalar"): numpy_scalar,
    ("numpy._core.numeric", "_frombuffer"): numpy_from_buffer,
    ("pathlib", "Path"): _path(PurePosixPath),
    ("pathlib", "PosixPath"): _path(PurePosixPath),
    ("pathlib", "PurePath"): _path(PurePosixPath),
    ("pathlib", "PurePosixPath"): _path(PurePosixPath),
    ("pathlib", "PureWindowsPath"): _path(PureWindowsPath),
    ("pathlib", "WindowsPath"): _path(PureWindowsPath),
    ("torch", "Size"): naturals,
}


_CLASS = re.compile(
    r"(megatron|transformer_engine|transformer_engine_torch|omegaconf|nemo|lightning|pytorch_lightning|deepspeed|apex|modelopt"
    r"|transformers|accelerate|trl|peft)(\._*[a-z]\w*)*\.(_?[A-Z]\w*\.)*_?[A-Z]\w*"
    r"|deepspeed\.utils\.tensor_fragment\.fragment_address"
)
"""Classes of packages that write checkpoints. The pattern follows the usual spelling of class names."""


def is_ordinary(module: str, name: str) -> bool:
    """True if checkpoints use this name, as `resolve` gives it: this module reads it, or it is a class of a known
    package."""
    key = module, name
    is_read = any(key in table for table in (_TENSORS, _WRAPPERS, _BY_TYPE, _VALUES))
    if is_read or name in _HARMLESS.get(module, ()) or key == ("copyreg", "_reconstructor"):
        return True
    full = f"{module}.{name}"
    return any(pattern.fullmatch(full) for pattern in (_ORDINARY, _CLASS))


def called_by(function: Global, args: tuple[object, ...]) -> list[Global]:
    """A function that is called, and the functions that it is asked to call."""
    key = function.module, function.name
    inner = args[:1] if key in _BY_TYPE or key == ("copyreg", "_reconstructor") else ()
    return [function, *(each for each in inner if type(each) is Global)]
