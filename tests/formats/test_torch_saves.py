"""What torch.save writes in rare cases: other protocols, old forms, lazy values, names of other versions of Python."""

import collections
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from formats import pickle_guard, pickle_writer, torch_zip
from formats.errors import CorruptCheckpoint, UnsafeContent
from formats.pickle_records import Global, Opaque
from formats.pickle_scan import NAMED, ORDINARY, UNSAFE, scan_file, scan_pickle
from formats.tensor import read_tensor

_ENUM = b"cmegatron.core.enums\nModelType\n"
_GETATTR = b"c__builtin__\ngetattr\n"


def saved(value: object, path: Path, **options: object) -> Path:
    torch.save(value, path, **options)  # type: ignore[arg-type]
    return path


def verdicts(path: Path) -> dict[str, str]:
    return {name: judged for each in scan_file(path) for name, judged in each.names.items()}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_old_files_of_every_protocol_are_read_and_scanned(protocol: int, tmp_path: Path) -> None:
    value = {"w": torch.arange(6.0).view(2, 3), "n": protocol}
    path = saved(
        value, tmp_path / "x.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=False
    )
    found = torch_zip.read(path)
    assert isinstance(found, dict)
    assert found["n"] == protocol
    assert read_tensor(found["w"]).tobytes() == value["w"].numpy().tobytes()
    assert verdicts(path)["torch._utils._rebuild_tensor_v2"] == ORDINARY


def test_an_old_file_of_a_module_holds_it_as_a_record(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 3)
    path = saved({"model": module}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    found = torch_zip.read(path)
    assert isinstance(found, dict)
    record = found["model"]
    assert (record.module, record.name) == ("torch.nn.modules.linear", "Linear")
    weight = record.state["_parameters"]["weight"]
    assert read_tensor(weight).tobytes() == module.weight.detach().numpy().tobytes()
    assert not any(each.fault for each in scan_file(path))
    assert UNSAFE not in verdicts(path).values()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantized_tensors_of_an_old_file_leave_the_others_readable(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(5), 0.5, 0, dtype)
    value = {"q": quantized, "w": torch.arange(3)}
    found = torch_zip.read(saved(value, tmp_path / "x.pt", _use_new_zipfile_serialization=False))
    assert isinstance(found, dict)
    assert found["q"].name == "_rebuild_qtensor"
    assert read_tensor(found["w"]).tobytes() == value["w"].numpy().tobytes()


def test_an_old_file_gives_one_warning_for_each_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(np.iinfo(np.int8), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    torch_zip.read(path)
    assert len(caplog.messages) == 1


def test_many_names_get_few_warnings(caplog: pytest.LogCaptureFixture) -> None:
    calls = b"".join(b"ctorch\nx%d\n)R" % number for number in range(1000))
    pickle_guard.load(b"\x80\x02](" + calls + b"e.", source="x.pt")
    assert len(caplog.messages) == 11
    assert caplog.messages[-1] == "x.pt: asks to call 990 other names too; megaconv scan lists them"


@pytest.mark.parametrize("zipped", [True, False])
def test_lazy_conjugates_and_negatives_are_refused(zipped: bool, tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    for value in (numbers.conj(), numbers.conj().imag):
        path = saved([value], tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(CorruptCheckpoint, match=r"resolve_neg\(\)\.resolve_conj\(\)"):
            torch_zip.read(path)
    path = saved([numbers.conj().real], tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    (real,) = torch_zip.read(path)  # type: ignore[misc]
    assert read_tensor(real).tobytes() == numbers.real.contiguous().numpy().tobytes()


def test_ranges_and_types_have_the_names_of_python_3(tmp_path: Path) -> None:
    value = [range(2, 9, 3), collections.defaultdict(int), int, str]
    path = saved(value, tmp_path / "x.pt")
    found = torch_zip.read(path)
    assert found == [
        Opaque("builtins", "range", (2, 9, 3)), {}, Global("builtins", "int"), Global("builtins", "str")
    ]  # fmt: skip
    assert verdicts(path)["builtins.range"] == ORDINARY


def test_members_of_enumerations_by_name_are_names() -> None:
    """Python 3.11.2, that of Debian 12, pickles the member of an enumeration so."""
    member = _GETATTR + _ENUM + b"X\x12\0\0\0encoder_or_decoder\x86R"
    found = pickle_guard.load(b"\x80\x02" + member + b".", source="x")
    assert found == Global("megatron.core.enums", "ModelType.encoder_or_decoder")
    scanned = scan_pickle(b"\x80\x02" + member + b".").names
    assert UNSAFE not in scanned.values()
    assert scanned["builtins.getattr"] == NAMED


@pytest.mark.parametrize(
    "arguments",
    [
        b"cos\npath\nX\x06\0\0\0system\x86",
        b"X\x01\0\0\0aX\x06\0\0\0system\x86",
        _ENUM + b"X\x03\0\0\0a.b\x86",
        _ENUM + b"X\x01\0\0\0aN\x87",
    ],
    ids=["another module", "a text", "no name", "three arguments"],
)
def test_other_calls_of_getattr_are_unsafe(arguments: bytes) -> None:
    data = b"\x80\x02" + _GETATTR + arguments + b"R."
    with pytest.raises(UnsafeContent, match=r"builtins\.getattr"):
        pickle_guard.load(data, source="x")
    assert scan_pickle(data).names["builtins.getattr"] == UNSAFE


def test_a_call_of_what_getattr_gives_is_unsafe_in_a_scan() -> None:
    hidden = _GETATTR + b"ctorch.serialization\nos\nX\x06\0\0\0system\x86R"
    data = b"\x80\x02" + hidden + b"X\x02\0\0\0ls\x85R."
    assert scan_pickle(data).names["torch.serialization.os.system"] == UNSAFE
    assert pickle_guard.load(data, source="x") == Opaque(
        "torch.serialization", "os.system", ("ls",)
    )


def test_arrays_of_permuted_axes_are_read() -> None:
    """numpy pickles them with the order of their axes since 2.3, in protocol 5."""
    array = np.arange(24, dtype="u2").reshape(2, 3, 4).transpose(1, 0, 2)
    found = pickle_guard.load(pickle.dumps(array, 5), source="x")
    assert isinstance(found, pickle_guard.NumpyArray)
    values = np.frombuffer(found.data, found.dtype)
    assert np.array_equal(values.reshape(found.shape, order="F" if found.fortran else "C"), array)


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_an_array_is_written_for_the_numpy_that_it_is_of(module: str) -> None:
    """numpy 1.24 has no numpy._core, and a random-number generator's state is carried over with its run."""
    array = np.arange(3, dtype="<u4")
    data = pickle.dumps(array, 2).replace(b"numpy._core.multiarray", module.encode())
    found = pickle_guard.load(data, source="x")
    assert found == pickle_guard.NumpyArray("<u4", (3,), array.tobytes())
    written = pickle_writer.dumps(found).content
    assert written.count(f"c{module}\n_reconstruct\n".encode()) == 1
    assert np.array_equal(pickle.loads(written), array)


@pytest.mark.parametrize("axes", [(0, 1), (0, 1, 1), (0, 1, 9), "abc"])
def test_an_order_of_axes_that_cannot_be_is_refused(axes: object) -> None:
    array = np.arange(24, dtype="u2").reshape(2, 3, 4).transpose(1, 0, 2)
    function, arguments = array.__reduce_ex__(5)
    *others, _ = arguments  # type: ignore[misc]

    class Pickled:
        def __reduce__(self) -> object:
            return function, (*others, axes)

    with pytest.raises(CorruptCheckpoint):
        pickle_guard.load(pickle.dumps(Pickled(), 5), source="x")


def test_generators_are_ordinary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    value = {"numpy": np.random.default_rng(1), "torch": torch.Generator()}
    path = saved(value, tmp_path / "x.pt")
    torch_zip.read(path)
    assert caplog.messages == []
    assert UNSAFE not in verdicts(path).values()
