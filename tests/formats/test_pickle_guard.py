"""The inert pickle reader: data that it accepts, data that it refuses, and its guarantees."""

import os
import pickle
import sys
import time
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from io import BytesIO
from itertools import product
from pathlib import PurePosixPath, PureWindowsPath
from signal import SIGTERM

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from formats.errors import CheckpointError, CorruptCheckpoint, UnsafeContent
from formats.pickle_errors import UnsafeCallError
from formats.pickle_guard import (
    Global,
    NumpyArray,
    Opaque,
    StorageType,
    TensorRecord,
    TorchDtype,
    load,
    load_at,
)
from formats.pickle_machine import Machine
from formats.pickle_opcodes import HANDLERS
from formats.pickle_run import run
from formats.pickle_scan import scan_pickle

PROTOCOLS = range(6)

numbers = st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False)
scalars = st.none() | numbers | st.text() | st.binary()
keys = st.text() | st.integers(-(2**40), 2**40) | st.tuples(st.text(), st.integers(0, 9))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.frozensets(keys)
    ),
    max_leaves=20,
)


def read(data: bytes) -> object:
    return load(data, lambda identity: identity, source="x.pt")


def refuse(data: bytes, message: str | None = None) -> None:
    with pytest.raises(CorruptCheckpoint, match=message) as error:
        read(data)
    assert str(error.value).startswith("x.pt: ")


def line(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


@settings(max_examples=150, deadline=None)
@given(values, st.sampled_from(PROTOCOLS))
def test_plain_values_come_back_as_they_were(value: object, protocol: int) -> None:
    assert read(pickle.dumps(value, protocol)) == value


def test_the_types_of_plain_values_come_back() -> None:
    value = [True, 1, 1.0, "é", b"\xff", (1,), [2], {3: 4}, {5}, frozenset({6}), None, 2j]
    for protocol in PROTOCOLS:
        loaded = read(pickle.dumps(value, protocol))
        assert loaded == value
        assert isinstance(loaded, list)
        assert [type(part) for part in loaded] == [type(part) for part in value]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_containers_of_the_standard_library_become_plain_ones(protocol: int) -> None:
    value = [
        OrderedDict(b=1, a=2),
        defaultdict(list, x=[1]),
        Counter("aab"),
        deque([1, 2], 5),
        bytearray(b"\x00\xff"),
    ]
    assert read(pickle.dumps(value, protocol)) == [
        {"b": 1, "a": 2},
        {"x": [1]},
        {"a": 2, "b": 1},
        [1, 2],
        b"\x00\xff",
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_empty_values_come_back(protocol: int) -> None:
    value = [b"", "", (), [], {}, set(), frozenset(), 0, np.zeros(0)]
    assert read(pickle.dumps(value, protocol)) == [*value[:-1], NumpyArray("<f8", (0,), b"")]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_namespace_stays_a_namespace(protocol: int) -> None:
    value = Namespace(
        hidden_size=32, params_dtype=torch.bfloat16, layers=[1, None], path=PurePosixPath("/a/b")
    )
    expected = Namespace(
        hidden_size=32, params_dtype=TorchDtype("bfloat16"), layers=[1, None], path="/a/b"
    )
    assert read(pickle.dumps(value, protocol)) == expected


def test_a_namespace_takes_nothing_but_named_attributes() -> None:
    refuse(line("argparse", "Namespace") + b")\x81}K\x01K\x02sb.", "attributes for a Namespace")
    refuse(line("argparse", "Namespace") + b")\x81]b.", "attributes for a Namespace")


def test_paths_become_strings_whatever_the_python_that_wrote_them() -> None:
    assert read(pickle.dumps(PurePosixPath("a/b"))) == "a/b"
    assert read(pickle.dumps(PureWindowsPath("c:/a/b"))) == "c:/a/b"
    assert read(line("pathlib._local", "PosixPath") + b"(\x8c\x01/\x8c\x01atR.") == "/a"
    refuse(line("pathlib", "PosixPath") + b"(K\x01tR.", "path")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("module", ["numpy.core", "numpy._core"])
def test_numpy_arrays_become_records_and_numbers_python_numbers(protocol: int, module: str) -> None:
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    value = {
        "a": array,
        "big": array.astype(">u4"),
        "f": np.asfortranarray(array),
        "n": np.float32(0.5),
        "b": np.True_,
    }
    loaded = read(
        _renamed(pickle.dumps(value, protocol), b"numpy._core", module.encode(), protocol)
    )
    assert isinstance(loaded, dict)
    assert loaded["a"] == NumpyArray("<u4", (2, 3), array.tobytes())
    assert loaded["big"] == NumpyArray(">u4", (2, 3), array.astype(">u4").tobytes())
    assert loaded["f"] == NumpyArray("<u4", (2, 3), array.tobytes("F"), fortran=True)
    assert loaded["n"] == 0.5
    assert loaded["b"] is True


def _renamed(data: bytes, old: bytes, new: bytes, protocol: int) -> bytes:
    """The pickle as another version of numpy spells it; protocol 4 counts the letters of names, and those in frames."""
    if protocol < 4:
        return data.replace(old, new)
    for file in (b".multiarray", b".numeric"):
        data = data.replace(
            b"\x8c%c" % len(old + file) + old + file, b"\x8c%c" % len(new + file) + new + file
        )
    return data[:2] + data[11:]


def test_numpy_arrays_of_objects_are_refused() -> None:
    refuse(pickle.dumps(np.array([{}, []], object), 2), "numpy array of O8")
    refuse(pickle.dumps(np.zeros(2, [("a", "f4")]), 2), "not plain numbers")


def test_a_numpy_array_of_the_wrong_length_is_refused() -> None:
    good = pickle.dumps(np.zeros(7, np.uint8), 4)
    refuse(good.replace(b"K\x07\x85", b"K\x08\x85"), r"numpy array \[8\] of \|u1 in 7 bytes")


def test_numpy_text_stays_a_record() -> None:
    assert read(pickle.dumps(np.str_("ab"), 2)) == NumpyArray("<U2", (), "ab".encode("utf-32-le"))


def test_bytes_in_memory_files_stay_bytes() -> None:
    for protocol in (2, 4):
        loaded = read(pickle.dumps(BytesIO(b"PK\3\4 nested"), protocol))
        assert isinstance(loaded, Opaque)
        assert (loaded.module, loaded.name) == ("io", "BytesIO")
        assert loaded.state == (b"PK\3\4 nested", 0, None)


def test_enumerations_are_equal_by_class_and_value() -> None:
    one, again, two = (
        read(line("megatron.core.enums", "ModelType") + b"K%c\x85R." % n) for n in (1, 1, 2)
    )
    assert one == again != two
    assert {one: "x"}[again] == "x"
    assert one == Opaque("megatron.core.enums", "ModelType", (1,))


def test_other_records_are_equal_only_to_themselves() -> None:
    data = (
        line("torch.distributed.checkpoint.metadata", "MetadataIndex")
        + b")\x81}\x8c\x03fqn\x8c\x01asb."
    )
    first, second = read(data), read(data)
    assert first != second
    assert len({first, second}) == 2
    assert len({hash(record) for record in [read(data) for _ in range(50)]}) > 1
    assert isinstance(first, Opaque)
    assert first.state == {"fqn": "a"}


def test_signals_of_any_python_become_records() -> None:
    assert read(pickle.dumps(SIGTERM, 2)) == Opaque("signal", "Signals", (15,))
    assert read(line("signal", "SIGTERM") + b".") == Opaque("signal", "Signals", ("SIGTERM",))


def test_unknown_classes_of_frameworks_become_records_and_are_not_imported() -> None:
    data = (
        line("megatron.no_such_module", "Recipe") + b"(K\x01tR}\x8c\x01aK\x02sbK\x05aK\x06K\x07s."
    )
    before = set(sys.modules)
    loaded = read(data)
    assert isinstance(loaded, Opaque)
    assert loaded.args == (1,)
    assert loaded.state == {"a": 2}
    assert loaded.items == [5, (6, 7)]
    assert set(sys.modules) == before


def test_standard_library_values_become_records() -> None:
    loaded = read(pickle.dumps(date(2024, 1, 2), 4))
    assert loaded == Opaque("datetime", "date", (b"\x07\xe8\x01\x02",))


def test_a_class_that_is_only_named_is_a_name() -> None:
    assert read(line("os", "system") + b".") == Global("os", "system")
    assert read(line("torch", "Tensor") + b".") == Global("torch", "Tensor")


def test_a_name_that_is_not_a_name_is_refused() -> None:
    refuse(line("os\x1b[31m", "system") + b".", "not a name")
    refuse(line("os", "s" * 2000) + b".", "not a name")
    refuse(b"K\x01K\x02\x93.", "not a string")


def test_dtypes_and_storages_become_names() -> None:
    dtypes = [torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16]
    assert read(pickle.dumps(dtypes)) == [
        TorchDtype(str(dtype).removeprefix("torch.")) for dtype in dtypes
    ]
    assert read(line("torch.cuda", "HalfStorage") + b".") == StorageType("float16")
    assert read(line("torch.storage", "UntypedStorage") + b".") == StorageType("uint8")
    assert read(pickle.dumps(torch.Size((2, 3)))) == (2, 3)
    pair = torch.bfloat16, torch.float32
    assert read(pickle.dumps({pair: 1})) == {(TorchDtype("bfloat16"), TorchDtype("float32")): 1}


TENSOR_ARGS = b"(\x8c\x01SK\x03K\x02K\x04\x86K\x05K\x01\x86"
TENSOR = line("torch._utils", "_rebuild_tensor") + TENSOR_ARGS + b"tR"
V3 = line("torch._utils", "_rebuild_tensor_v3")


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (TENSOR + b".", None),
        (line("torch._utils", "_rebuild_tensor_v2") + TENSOR_ARGS + b"\x89}tR.", None),
        (line("torch._utils", "_rebuild_tensor_v2") + TENSOR_ARGS + b"\x89}}tR.", None),
        (V3 + TENSOR_ARGS + b"\x89}" + line("torch", "float8_e5m2") + b"tR.", "float8_e5m2"),
    ],
)
def test_tensors_become_records(data: bytes, dtype: str | None) -> None:
    assert read(data) == TensorRecord("S", 3, (2, 4), (5, 1), dtype)


def test_parameters_and_tensors_with_attributes_are_their_tensors() -> None:
    tensor = line("torch._utils", "_rebuild_tensor_v2") + TENSOR_ARGS + b"\x89}tR"
    expected = TensorRecord("S", 3, (2, 4), (5, 1))
    assert (
        read(line("torch._utils", "_rebuild_parameter") + b"(" + tensor + b"\x89}tR.") == expected
    )
    assert (
        read(line("torch._utils", "_rebuild_parameter_with_state") + b"(" + tensor + b"\x89}}tR.")
        == expected
    )
    by_type = (
        line("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + line("torch._utils", "_rebuild_tensor_v2")
    )
    assert read(by_type + line("torch", "Tensor") + TENSOR_ARGS + b"\x89}t}tR.") == expected


def test_a_hook_says_what_takes_the_place_of_a_tensor() -> None:
    data = b"]" + line("torch._utils", "_rebuild_tensor_v2") + TENSOR_ARGS + b"\x89}tRa."
    assert load(data, source="x.pt", tensor=lambda record: record.shape) == [(2, 4)]


def test_quantized_tensors_of_torch_become_records() -> None:
    loaded = read(line("torch._utils", "_rebuild_qtensor") + b"(K\x01tR.")
    assert loaded == Opaque("torch._utils", "_rebuild_qtensor", (1,))


@pytest.mark.parametrize(
    "args",
    [
        b"(\x8c\x01SJ\xff\xff\xff\xffK\x02\x85K\x01\x85\x89}t",
        b"(\x8c\x01SK\x00J\xff\xff\xff\xff\x85K\x01\x85\x89}t",
        b"(\x8c\x01SK\x00K\x02\x85J\xff\xff\xff\xff\x85\x89}t",
        b"(\x8c\x01SK\x00K\x02\x85)\x89}t",
        b"(\x8c\x01SK\x00K\x02K\x01\x85\x89}t",
        b"(\x8c\x01SK\x00\x88\x85K\x01\x85\x89}t",
        b"(\x8c\x01SK\x00\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01\x85K\x01\x85\x89}t",
        b"(" + b"K\x01" * 65 + b"t(\x8c\x01SK\x00h\x00h\x00\x89}t",
        b"K\x01\x85",
    ],
    ids=["offset", "shape", "stride", "axes", "no tuple", "bool", "2^64", "65 axes", "too few"],
)
def test_tensors_that_cannot_be_are_refused(args: bytes) -> None:
    refuse(line("torch._utils", "_rebuild_tensor_v2") + args + b"R.")


def test_pickles_in_a_row_are_read_one_by_one() -> None:
    data = pickle.dumps([1], 2) + pickle.dumps("two", 2) + b"storages"
    first, end = load_at(data, 0, None, "x.pt")
    second, after = load_at(data, end, None, "x.pt")
    assert (first, second, data[after:]) == ([1], "two", b"storages")


def test_bytes_after_a_pickle_are_refused() -> None:
    refuse(pickle.dumps(1) + b"?", "1 bytes too many")


def test_persistent_identities_need_a_hook() -> None:
    assert load(b"K\x07Q.", lambda identity: [identity], source="x.pt") == [7]
    with pytest.raises(CorruptCheckpoint, match="storages outside"):
        load(b"K\x07Q.", source="x.pt")


# ---- programs ----

COMMAND = "touch executed"


class Reduces:
    def __init__(self, function: object, *args: object) -> None:
        self.reduced = function, args

    def __reduce__(self) -> object:
        return self.reduced


ARGUMENT = b"X" + len(COMMAND).to_bytes(4, "little") + COMMAND.encode()
PROGRAMS = {
    "os.system": line("os", "system") + ARGUMENT + b"\x85R.",
    "builtins.eval": pickle.dumps(Reduces(eval, f"__import__('os').system('{COMMAND}')"), 4),
    "builtins.exec": pickle.dumps({"model": [Reduces(exec, "open('executed', 'w')")]}, 2),
    "builtins.getattr": pickle.dumps(Reduces(getattr, "a", "upper"), 2),
    "builtins.__import__": line("__builtin__", "__import__") + b"\x8c\x02os\x85R.",
    "subprocess.Popen": line("subprocess", "Popen") + ARGUMENT + b"\x85\x81.",
    "posix.system": b"(" + ARGUMENT + b"iposix\nsystem\n.",
    "nt.system": b"(" + line("nt", "system") + ARGUMENT + b"o.",
    "shutil.rmtree": b"\x80\x04\x8c\x06shutil\x8c\x06rmtree\x93\x8c\x01/\x85R.",
    "importlib.import_module": line("importlib", "import_module") + b"\x8c\x02os\x85}\x92.",
    "functools.partial": line("functools", "partial") + line("os", "system") + ARGUMENT + b"\x86R.",
    "operator.attrgetter": line("operator", "attrgetter") + b"\x8c\x06system\x85R.",
    "types.CodeType": line("types", "CodeType") + b")R.",
    "io.open": line("_io", "open") + b"\x8c\x08executed\x8c\x01w\x86R.",
    "marshal.loads": line("marshal", "loads") + b"C\x01x\x85R.",
    "webbrowser.open": line("webbrowser", "open") + b"\x8c\x01x\x85R.",
    "my_module.MyConfig": line("my_module", "MyConfig") + b")\x81.",
    "torchish.Thing": line("torchish", "Thing") + b")\x81.",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pickle_that_calls_something_is_refused_and_not_executed(
    name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with pytest.raises(UnsafeContent) as error:
        read(PROGRAMS[name])
    what = "the file is a program, not a checkpoint; nothing was executed"
    assert str(error.value) == f"x.pt: asks to call {name}; {what}"
    assert not os.listdir(".")  # noqa: PTH208


def test_calls_hidden_in_other_calls_are_not_executed(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    system = line("os", "system")
    for data in (
        line("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + system
        + b"N"
        + ARGUMENT
        + b"\x85}tR.",
        line("copy_reg", "_reconstructor")
        + b"("
        + system
        + line("__builtin__", "object")
        + b"NtR.",
    ):
        with pytest.raises(UnsafeContent):
            read(data)
    assert read(line("collections", "defaultdict") + system + b"\x85R.") == {}
    assert isinstance(read(line("torch", "anything") + b"(" + system + ARGUMENT + b"tR."), Opaque)
    assert not os.listdir(".")  # noqa: PTH208


@pytest.mark.parametrize("opcode", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"])
def test_extensions_are_refused(opcode: bytes) -> None:
    with pytest.raises(UnsafeContent, match="extension"):
        read(opcode + b".")


# ---- broken pickles ----

BROKEN = {
    "empty": (b"", "ends too early"),
    "no stop": (b"K\x01", "ends too early"),
    "unknown opcode": (b"\xff.", "no such instruction"),
    "buffers outside": (b"\x97.", "no such instruction"),
    "protocol 6": (b"\x80\x06N.", "protocol"),
    "nothing on the stack": (b".", "IndexError"),
    "no mark": (b"t.", "IndexError"),
    "tuple of missing values": (b"K\x01\x87.", "not there"),
    "negative length": (b"T\xff\xff\xff\xff.", "ends too early"),
    "length beyond the end": (b"X\xff\xff\xff\x7fabc.", "ends too early"),
    "huge length": (b"\x8e" + b"\xff" * 8 + b".", "ends too early"),
    "no line end": (b"cos", "ends too early"),
    "not utf-8": (b"X\x01\x00\x00\x00\xff.", "UnicodeDecodeError"),
    "unknown memo": (b"h\x07.", "KeyError"),
    "long number": (b"\x8b\x00\x01\x00\x00" + b"\x01" * 256 + b".", "a number of 256 bytes"),
    "negative long": (b"\x8b\xff\xff\xff\xff.", "ends too early"),
    "long digits": (b"I" + b"1" * 5000 + b"\n.", "a number of 5000 digits"),
    "no digits": (b"Iabc\n.", "ValueError"),
    "append to a tensor": (TENSOR + b"K\x01a.", "values for a TensorRecord"),
    "set item of a tensor": (TENSOR + b"K\x01K\x02s.", "keys for a TensorRecord"),
    "state of a tensor": (TENSOR + b"}b.", "attributes for a TensorRecord"),
    "set item of a list": (b"]K\x00K\x01s.", "keys for a list"),
    "append to a dict": (b"}K\x01a.", "values for a dict"),
    "members of a list": (b"](K\x01\x90.", "members for a list"),
    "key without a value": (b"}(K\x01u.", "ValueError"),
    "a list as a key": (b"}]K\x01s.", "can't be one"),
    "a list in a set": (b"\x8f(]\x90.", "can't be one"),
    "a tuple of tuples as a key": (b"})\x85\x85K\x01s.", "can't be one"),
    "a huge number as a key": (b"}\x8a\x0a" + b"\x01" * 10 + b"K\x01s.", "too large"),
    "state of a number": (b"K\x01}b.", "attributes for a int"),
    "call of a number": (b"K\x01)R.", "call of something"),
    "call without a tuple": (line("collections", "OrderedDict") + b"]R.", "without a tuple"),
    "obj without a class": (b"(o.", "ValueError"),
    "wrong arguments": (line("collections", "OrderedDict") + b"K\x01\x85R.", "a list was expected"),
    "another codec": (line("_codecs", "encode") + b"\x8c\x01a\x8c\x05rot13\x86R.", "latin1"),
    "a complex of text": (line("builtins", "complex") + b"\x8c\x011\x85R.", "TypeError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pickle_is_refused(name: str) -> None:
    refuse(*BROKEN[name])


def test_every_beginning_of_a_pickle_is_refused() -> None:
    value = {"a": [1, 2.5, "x", b"y" * 300, 2**70], "n": np.zeros(3), "ns": Namespace(a=1)}
    for protocol in PROTOCOLS:
        data = pickle.dumps(value, protocol)
        for end in range(len(data)):
            refuse(data[:end])


def test_a_huge_memo_index_costs_nothing() -> None:
    assert read(b"]r\xff\xff\xff\xffK\x01aj\xff\xff\xff\xff0.") == [1]
    assert read(b"]p999999999999\n0g999999999999\n.") == []


def _quickly(data: bytes, message: str | None) -> None:
    start = time.process_time()
    refuse(data, message)
    assert time.process_time() - start < 3


def test_lists_that_multiply_are_refused() -> None:
    levels = [b"q%c0](" % n + b"h%c" % n * 10 + b"e" for n in range(60)]
    _quickly(b"]" + b"".join(levels) + b".", "nested too deeply")


def test_a_million_references_to_a_long_list_are_refused_quickly() -> None:
    _quickly(
        b"](" + b"K\x01" * 100_000 + b"eq\x000](" + b"h\x00" * 100_000 + b"e.", "nested too deeply"
    )


def test_deep_nesting_is_refused() -> None:
    _quickly(b"]" + b"\x85" * 100_000 + b".", "nested too deeply")
    _quickly(b"]" * 100_000 + b"a" * 99_999 + b".", "nested too deeply")
    _quickly(b"(" * 100_000 + b"t" * 100_000 + b".", "nested too deeply")


def test_deep_keys_are_refused() -> None:
    _quickly(b"})" + b"\x85" * 100_000 + b"K\x01s.", "can't be one")


def test_deep_rebuilding_is_refused() -> None:
    by_type = line("torch._tensor", "_rebuild_from_type_v2") + b"q\x000"
    args = b"N" + b"".join([b"q\x010(h\x00Nh\x01}t"] * 100_000)
    _quickly(by_type + b"h\x00" + args + b"R.", None)


def test_a_container_that_contains_itself_is_refused() -> None:
    refuse(b"]q\x00h\x00a.", "contains itself")
    refuse(b"}q\x00\x8c\x01ah\x00\x85s.", "contains itself")


def test_cycles_inside_a_record_are_its_own_business() -> None:
    data = line("omegaconf.dictconfig", "DictConfig") + b")\x81q\x00}\x8c\x07_parenth\x00sb."
    loaded = read(data)
    assert isinstance(loaded, Opaque)
    assert loaded.state == {"_parent": loaded}
    assert "Opaque" in repr(loaded)


def test_calls_that_copy_the_same_text_again_and_again_are_refused() -> None:
    text = b"X" + (1_000_000).to_bytes(4, "little") + b"a" * 1_000_000 + b"q\x000"
    call = line("_codecs", "encode") + b"q\x010\x8c\x06latin1q\x020("
    _quickly(text + call + b"h\x01h\x00h\x02\x86R" * 10_000 + b"t.", "multiplies")
    _quickly(
        text + b"(" + line("pathlib", "PosixPath") + b"(" + b"h\x00" * 10_000 + b"tRt.",
        "multiplies",
    )


def test_keys_with_equal_hashes_are_refused() -> None:
    prime = 2**61 - 1
    numbers = [(prime * n).to_bytes(12, "little") for n in range(1, 20_000)]
    _quickly(
        b"}(" + b"".join(b"\x8a\x0c" + number + b"N" for number in numbers) + b"u.", "too large"
    )


def test_many_tuples_and_complex_numbers_of_one_hash_are_refused() -> None:
    prime = sys.hash_info.modulus
    of_one_hash = [3 + prime * n for n in range(7)]
    tuples = list(product(of_one_hash, repeat=4))
    assert len(set(map(hash, tuples))) == 1
    # Python itself makes a set of them in a time by the square of their number.
    complexes = [complex(sys.hash_info.imag * n, -n) for n in range(2, 3000)]
    assert len(set(map(hash, complexes))) == 1
    for keys in (tuples, complexes):
        _quickly(pickle.dumps(set(keys), 4), "hashes are equal")
        _quickly(pickle.dumps(frozenset(keys), 2), "hashes are equal")
        _quickly(pickle.dumps(dict.fromkeys(keys), 0), "hashes are equal")
        _quickly(pickle.dumps(OrderedDict.fromkeys(keys), 2), "hashes are equal")


def test_a_key_of_many_dictionaries_is_counted_once() -> None:
    value = [{(1, -1): "a", (1, -2): "b"}] * 2000
    assert read(pickle.dumps([dict(each) for each in value[:900]], 2)) == value[:900]


def test_records_of_numbers_have_hashes_that_a_file_cannot_choose() -> None:
    prime = sys.hash_info.modulus
    records = [Opaque("torch", "device", (prime * n,)) for n in range(1000)]
    assert len(set(map(hash, records))) == 1000


def test_sets_that_are_copied_again_and_again_are_refused() -> None:
    members = b"\x8f(" + b"".join(b"M" + number.to_bytes(2, "little") for number in range(60_000))
    copies = line("builtins", "list") + b"q\x010" + b"h\x01h\x00\x85R" * 3000
    _quickly(members + b"\x90q\x000(" + copies + b"t.", "multiplies")


def test_a_tensor_that_is_rebuilt_by_a_function_of_python_is_refused() -> None:
    by_type = line("torch._tensor", "_rebuild_from_type_v2") + b"(" + line("builtins", "list")
    refuse(by_type + line("torch", "Tensor") + b"]\x85}tR.", "rebuilt by a function")


def test_names_of_many_parts_are_judged_quickly() -> None:
    for module in (b"torch.nn.", b"megatron."):
        names = b"".join(b"c" + module + b"_A." * 300 + b"%06d\nx-\n" % n for n in range(2000))
        start = time.process_time()
        read(b"(" + names + b"t.")
        assert scan_pickle(b"(" + names + b"t.").fault == ""
        assert time.process_time() - start < 3
    dtypes = b"".join(b"ctorch\nfloat" + b"1" * 900 + b"%d-\n" % n for n in range(2000))
    start = time.process_time()
    read(b"(" + dtypes + b"t.")
    assert time.process_time() - start < 3


VALID = pickle.dumps(
    {
        "args": Namespace(hidden=32, dtype=torch.bfloat16, signal=SIGTERM),
        "rng": [np.zeros(4, np.uint32), {1, 2}, frozenset({"a"}), np.float64(1.5)],
        "model": OrderedDict(a=1, b=(1, 2, 3), c=BytesIO(b"x")),
        "number": [2**70, -5, 300, 70000, 1.5, None, True],
    },
    2,
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_any_changed_byte_gives_a_value_or_our_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(VALID)
    for index, byte in changes:
        data[index] = byte
    with suppress(CheckpointError):
        read(bytes(data))


CHUNKS = pickle.dumps(
    {
        MetadataIndex(f"layer.{n}", torch.Size((n, 0)), n): _StorageInfo(
            f"__{n}_0.distcp", 300 * n, 2**40 + n
        )
        for n in range(4)
    }
)


def by_handlers(data: bytes) -> object:
    """The object that the handlers alone make of a pickle, without the shortcuts of the loop."""
    machine = Machine(data, 0, lambda identity: identity, lambda record: record)
    while machine.position < machine.end:
        machine.position += 1
        code = data[machine.position - 1]
        if code == ord("."):
            return machine.stack.pop()
        HANDLERS[code](machine)
    raise ValueError("no end")


def by_loop(data: bytes) -> object:
    return run(Machine(data, 0, lambda identity: identity, lambda record: record))


def outcome(reader: Callable[[bytes], object], data: bytes) -> str:
    try:
        return repr(reader(data))
    except Exception as error:
        return "unsafe" if isinstance(error, UnsafeCallError) else "refused"


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([VALID, CHUNKS]),
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=4),
)
def test_the_loop_does_without_calls_what_the_handlers_do(
    data: bytes, changes: list[tuple[int, int]]
) -> None:
    changed = bytearray(data)
    for index, byte in changes:
        changed[index % len(changed)] = byte
    assert outcome(by_loop, bytes(changed)) == outcome(by_handlers, bytes(changed))


def test_the_loop_and_the_handlers_read_records_alike() -> None:
    assert "Opaque" in outcome(by_loop, CHUNKS)
    assert outcome(by_loop, CHUNKS) == outcome(by_handlers, CHUNKS)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_our_error(data: bytes) -> None:
    with suppress(CheckpointError):
        read(data + b".")


def test_a_long_pickle_is_read_quickly() -> None:
    args = Namespace(**{f"argument_{n}": [n, str(n), None, 1.5] for n in range(700)})
    data = pickle.dumps({"args": args, "rng": tuple(range(2**31, 2**31 + 625))}, 2)
    start = time.process_time()
    read(data)
    assert time.process_time() - start < 0.1
