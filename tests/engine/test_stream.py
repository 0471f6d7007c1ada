"""The queue: what each side may do, and that whatever ends one side ends the other at once with the first cause."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from formats.output import PlainFile
from formats.tensor import Box, Bytes, LazyTensor, read_tensor
from loaders import hf as loader
from megaconv import registry
from megaconv.engine import conversion
from megaconv.engine.plan import OutputPlan
from megaconv.engine.stream import MAX_WAITING, ArrayTensor, Stream, as_lazy
from megaconv.errors import Cancelled, CheckpointError, TensorMismatch
from megaconv.loader import Loader
from megaconv.model.ir import Header, Key, Source, TensorInfo
from megaconv.options import ConvertOptions, LoadOptions, SaveOptions
from megaconv.saver import Saver
from savers import core as saver
from tests.models import write_llama
from tests.runs import unchanged

A, B, C = Key("a"), Key("b"), Key("c")


class Keys(CheckpointError):
    """The first cause, in tests."""


class Lazy:
    """A lazy tensor of zeros."""

    def __init__(self, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> None:
        self.shape, self.dtype = shape, dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        out[:] = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def header(model: Path) -> Header:
    """Three tensors of [2, 3] float32."""
    return replace(
        loader.open(model, LoadOptions()).header,
        manifest=dict.fromkeys((A, B, C), TensorInfo((2, 3), "float32")),
    )


def run_threads(*sides: Callable[[], object]) -> list[BaseException | None]:
    """The error of each function, or None. Fails if one of them still runs after five seconds."""
    raised: list[BaseException | None] = [None] * len(sides)

    def call(index: int) -> None:
        try:
            sides[index]()
        except BaseException as error:
            raised[index] = error

    threads = [
        threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(sides))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads), "a side hangs"
    return raised


def later(action: Callable[[], None]) -> None:
    """When the other side waits already."""
    time.sleep(0.1)
    action()


# The order of things.


def test_the_stream_keeps_the_order_of_tensors(header: Header) -> None:
    stream = Stream(1 << 20)
    taken: list[Key] = []

    def put() -> None:
        stream.put_header(header)
        for key in (A, B, C):
            stream.put(key, Lazy())
        stream.end(3)

    assert run_threads(put, lambda: taken.extend(key for ((key, _),) in stream)) == [None, None]
    assert taken == [A, B, C]


def test_the_largest_tensor_of_those_that_wait_is_taken_first(header: Header) -> None:
    stream = Stream(1 << 20)
    shapes = {A: (2, 3), B: (2, 3), C: (4, 3)}
    stream.put_header(
        replace(
            header, manifest={key: TensorInfo(shape, "float32") for key, shape in shapes.items()}
        )
    )
    for key, shape in shapes.items():
        stream.put(key, Lazy(shape))
    stream.end(3)
    assert [key for ((key, _),) in stream] == [C, A, B]


def test_several_takers_share_the_tensors_out(header: Header) -> None:
    keys = [Key(f"t{number}") for number in range(500)]
    stream, taken = Stream(1 << 20), list[Key]()

    def put() -> None:
        stream.put_header(
            replace(header, manifest=dict.fromkeys(keys, TensorInfo((2, 3), "float32")))
        )
        for key in keys:
            stream.put(key, Lazy())
        stream.end(len(keys))

    def take() -> None:
        taken.extend(key for ((key, _),) in stream)

    assert run_threads(put, take, take, take) == [None] * 4
    assert sorted(taken) == sorted(keys)


def test_the_saver_waits_for_the_header(header: Header) -> None:
    stream, seen = Stream(1), list[Header]()
    assert (
        run_threads(
            lambda: seen.append(stream.header()), lambda: later(lambda: stream.put_header(header))
        )
        == [None] * 2
    )
    assert seen == [header]


def test_a_tensor_before_the_header_is_an_error() -> None:
    with pytest.raises(TensorMismatch, match="a: a tensor came before the header"):
        Stream(1).put(A, Lazy())


def test_an_end_without_a_header_is_an_error() -> None:
    with pytest.raises(TensorMismatch, match="without a header"):
        Stream(1).end(0)


# The manifest.


@pytest.fixture
def stream(header: Header) -> Stream:
    """A stream with its header. It waits for the tensors a, b and c."""
    stream = Stream(1 << 20)
    stream.put_header(header)
    return stream


def test_a_tensor_that_was_not_in_the_manifest_is_named(stream: Stream) -> None:
    with pytest.raises(TensorMismatch, match=r"^x: .*doesn't list"):
        stream.put(Key("x"), Lazy())


def test_a_slot_that_was_not_in_the_manifest_is_named(stream: Stream) -> None:
    with pytest.raises(TensorMismatch, match=r"^a \(exp_avg\): .*doesn't list"):
        stream.put(Key("a", "exp_avg"), Lazy())


def test_a_doubled_tensor_is_named(stream: Stream) -> None:
    stream.put(A, Lazy())
    with pytest.raises(TensorMismatch, match=r"^a: .*twice"):
        stream.put(A, Lazy())


@pytest.mark.parametrize(
    "tensor", [Lazy((3, 2)), Lazy((6,)), Lazy((2, 3, 1)), Lazy(dtype="bfloat16"), np.zeros((2, 3))]
)
def test_a_tensor_that_is_not_as_declared_is_named_with_both_descriptions(
    stream: Stream, tensor: Any
) -> None:
    shape, dtype = list(tensor.shape), str(tensor.dtype)
    with pytest.raises(TensorMismatch) as error:
        stream.put(A, tensor)
    assert str(error.value) == f"a: declared as [2, 3] float32, sent as {shape} {dtype}"


def test_missing_tensors_are_named(stream: Stream) -> None:
    stream.put(B, Lazy())
    with pytest.raises(TensorMismatch, match=r"without 2 tensors of its manifest: a, c$"):
        stream.end(1)


def test_an_error_about_many_missing_tensors_names_some_and_counts_the_rest(header: Header) -> None:
    stream = Stream(1)
    stream.put_header(
        replace(
            header, manifest={Key(f"t{number}"): TensorInfo((1,), "int8") for number in range(1000)}
        )
    )
    with pytest.raises(
        TensorMismatch, match=r"without 1,000 tensors .*: t0, t1, .*, t7 and 992 more$"
    ):
        stream.end(0)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_wrong_count_is_an_error(stream: Stream, count: int) -> None:
    for key in (A, B, C):
        stream.put(key, Lazy())
    with pytest.raises(TensorMismatch, match=f"{count} sent tensors, but 3 arrived"):
        stream.end(count)


@pytest.mark.parametrize("nothing", [None, 7, "a word", [1.0, 2.0], b"bytes"])
def test_something_that_is_no_tensor_is_an_error(stream: Stream, nothing: object) -> None:
    with pytest.raises(TensorMismatch, match="is not a tensor"):
        stream.put(A, nothing)


# Plain tensors.


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 3, 4), (0, 4), (4, 0)], ids=str)
def test_numpy_and_torch_tensors_come_out_bit_for_bit(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for tensor in (values, torch.from_numpy(np.array(values))):
        lazy = as_lazy(tensor)
        assert (lazy.shape, lazy.dtype) == (shape, "float32")
        assert read_tensor(lazy).tobytes() == values.tobytes()


def test_views_come_out_in_their_own_order() -> None:
    values = np.arange(12, dtype=np.int32).reshape(3, 4).T
    assert read_tensor(as_lazy(values)).tobytes() == values.tobytes()
    assert read_tensor(as_lazy(torch.from_numpy(values))).tobytes() == values.tobytes()


def test_a_dtype_that_numpy_lacks_passes_bit_for_bit() -> None:
    tensor = torch.randn(3, 4, requires_grad=True).to(torch.bfloat16)
    lazy = as_lazy(tensor)
    assert lazy.dtype == "bfloat16"
    assert read_tensor(lazy).tobytes() == tensor.detach().view(torch.uint8).numpy().tobytes()


def test_any_rectangle_of_a_plain_tensor_can_be_read() -> None:
    values = np.arange(20, dtype=np.int16).reshape(4, 5)
    out = np.empty((2, 3 * 2), np.uint8)
    as_lazy(values).read_into(Box(1, 3, 2, 5), out)
    assert out.tobytes() == values[1:3, 2:5].tobytes()


# Bounds.


def put_all(
    stream: Stream, header: Header, tensor: Callable[[], object], count: int
) -> Callable[[], None]:
    keys = [Key(f"t{number}") for number in range(count)]
    info = tensor()
    stream.put_header(
        replace(header, manifest=dict.fromkeys(keys, TensorInfo(info.shape, str(info.dtype))))
    )  # type: ignore[attr-defined]

    def put() -> None:
        for key in keys:
            stream.put(key, tensor())
        stream.end(count)

    return put


def waiting_after_a_while(stream: Stream, put: Callable[[], None]) -> int:
    """Tensors that the loader could put before it had to wait."""
    sender = threading.Thread(target=run_threads, args=(put,), daemon=True)
    sender.start()
    time.sleep(0.2)
    assert sender.is_alive(), "the loader never waits"
    waiting = len(stream._waiting)
    stream.fail(Keys())
    sender.join(5)
    assert not sender.is_alive()
    return waiting


def test_lazy_tensors_are_bounded_by_their_number(header: Header) -> None:
    stream = Stream(1)
    assert waiting_after_a_while(stream, put_all(stream, header, Lazy, 1000)) == MAX_WAITING


def test_plain_tensors_are_bounded_by_their_bytes(header: Header) -> None:
    stream = Stream(10_000)
    assert (
        waiting_after_a_while(
            stream, put_all(stream, header, lambda: np.zeros(1000, np.float32), 1000)
        )
        == 2
    )


def test_a_plain_tensor_counts_until_the_saver_is_done_with_it(header: Header) -> None:
    stream = Stream(4000)
    put = put_all(stream, header, lambda: np.zeros(1000, np.float32), 3)
    sender = threading.Thread(target=put, daemon=True)
    sender.start()
    items = iter(stream)
    next(items)
    time.sleep(0.1)
    assert not stream._waiting, "a second tensor was put while the first one was still held"
    assert len(list(items)) == 2
    sender.join(5)
    assert not sender.is_alive()


def test_a_tensor_larger_than_the_budget_passes_alone(header: Header) -> None:
    stream = Stream(10)
    put = put_all(stream, header, lambda: np.zeros(1000, np.float32), 5)
    taken: list[LazyTensor] = []
    assert run_threads(put, lambda: taken.extend(tensor for ((_, tensor),) in stream)) == [
        None,
        None,
    ]
    assert len(taken) == 5


# Ends.


def test_a_failure_wakes_a_loader_that_waits_for_room(header: Header) -> None:
    stream = Stream(1)
    put = put_all(stream, header, Lazy, 1000)
    first = Keys("the disk is full")
    raised, _ = run_threads(put, lambda: later(lambda: stream.fail(first)))
    assert isinstance(raised, Cancelled)
    assert raised.__cause__ is first


@pytest.mark.parametrize("with_header", [False, True])
def test_a_failure_wakes_savers_that_wait(header: Header, with_header: bool) -> None:
    stream = Stream(1)
    if with_header:
        stream.put_header(header)
    first = Keys("the file is broken")
    *raised, _ = run_threads(
        stream.header,
        lambda: list(stream),
        lambda: list(stream),
        lambda: later(lambda: stream.fail(first)),
    )
    for error in raised[with_header:]:
        assert isinstance(error, Cancelled)
        assert error.__cause__ is first


def test_only_the_first_cause_is_kept(stream: Stream) -> None:
    first = Keys("first")
    for error in (Cancelled("never"), first, Keys("second"), KeyboardInterrupt()):
        stream.fail(error)
    assert stream.error is first


def test_after_a_failure_nothing_can_be_put_or_taken(stream: Stream, header: Header) -> None:
    stream.put(A, Lazy())
    stream.fail(Keys("first"))
    for action in (
        lambda: stream.put_header(header),
        lambda: stream.put(B, Lazy()),
        lambda: stream.end(1),
        stream.header,
        lambda: list(stream),
    ):
        with pytest.raises(Cancelled):
            action()


# Both sides in a conversion, one of which dies.


class Dying:
    """A source whose tensors come until one of them kills it."""

    def __init__(self, model: Path, error: BaseException, after: int, *, in_reading: bool) -> None:
        self._source, self._error, self._after, self._in_reading = (
            loader.open(model, LoadOptions()),
            error,
            after,
            in_reading,
        )
        self.header = self._source.header

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        for index, (key, tensor) in enumerate(self._source.tensors()):
            if index == self._after:
                if not self._in_reading:
                    raise self._error
                yield key, Broken(tensor, self._error)
            else:
                yield key, tensor


class Broken:
    """A tensor that dies when it is read."""

    def __init__(self, tensor: LazyTensor, error: BaseException) -> None:
        self.shape, self.dtype, self._error = tensor.shape, tensor.dtype, error

    def read_into(self, box: Box, out: Bytes) -> None:
        raise self._error


class Shy(PlainFile):
    """A file whose headers can't be made."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(b"content")
        self._error = error

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        raise self._error


def convert(
    monkeypatch: pytest.MonkeyPatch,
    source: Source,
    plan: Callable[[Header, SaveOptions], OutputPlan],
    target: Path,
) -> None:
    """Run a conversion between a loader and a saver of our own; both sides have to be gone within seconds."""

    loader = Loader(
        name="ours", description="", detect=lambda path: True, open=lambda path, options: source
    )
    saver = Saver(name="ours", description="", plan=plan)
    monkeypatch.setattr(registry, "loader", lambda name: loader)
    monkeypatch.setattr(registry, "saver", lambda name: saver)
    before, started = set(threading.enumerate()), time.monotonic()
    beside = target.parent.parent / f"{target.parent.name}-source"
    beside.mkdir(exist_ok=True)
    try:
        conversion.convert(
            beside, target, "ours", ConvertOptions(loader="ours", max_memory=1 << 20)
        )
    finally:
        while set(threading.enumerate()) - before and time.monotonic() - started < 5:
            time.sleep(0.01)
        assert not set(threading.enumerate()) - before, "a thread stayed behind"
        assert time.monotonic() - started < 5


CAUSES = [
    Keys("the first cause"),
    RuntimeError("a bug in a plugin"),
    MemoryError(),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", CAUSES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("in_reading", [False, True])
@pytest.mark.parametrize("after", [0, 20, 38])
def test_a_loader_that_dies_ends_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    tmp_path: Path,
    error: BaseException,
    in_reading: bool,
    after: int,
) -> None:
    with unchanged(tmp_path), pytest.raises(type(error)) as raised:
        convert(
            monkeypatch,
            Dying(model, error, after, in_reading=in_reading),
            saver.plan,
            tmp_path / "out",
        )
    assert raised.value is error


@pytest.mark.parametrize("error", CAUSES, ids=lambda error: type(error).__name__)
def test_a_saver_that_dies_in_its_plan_ends_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, error: BaseException
) -> None:
    def plan(header: Header, options: SaveOptions) -> OutputPlan:
        raise error

    with unchanged(tmp_path), pytest.raises(type(error)) as raised:
        convert(monkeypatch, loader.open(model, LoadOptions()), plan, tmp_path / "out")
    assert raised.value is error


@pytest.mark.parametrize("error", CAUSES, ids=lambda error: type(error).__name__)
def test_a_saver_that_dies_at_its_last_file_ends_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, error: BaseException
) -> None:
    def plan(header: Header, options: SaveOptions) -> OutputPlan:
        planned = saver.plan(header, options)
        return replace(planned, files={**planned.files, "last": Shy(error)})

    with unchanged(tmp_path), pytest.raises(type(error)) as raised:
        convert(monkeypatch, loader.open(model, LoadOptions()), plan, tmp_path / "out")
    assert raised.value is error


@pytest.mark.parametrize("error", CAUSES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("number", [0, 17])
def test_a_saver_that_dies_while_it_writes_ends_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, error: BaseException, number: int
) -> None:
    class Regions(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise error

    def plan(header: Header, options: SaveOptions) -> OutputPlan:
        """identity() walks the regions before any of them is used for writing."""
        planned = saver.plan(header, options)
        key = list(planned.placements)[number]
        broken = [place._replace(regions=Regions()) for place in planned.placements[key]]
        monkeypatch.setattr(OutputPlan, "identity", lambda self, source: source)
        return replace(planned, placements={**planned.placements, key: broken})

    with unchanged(tmp_path), pytest.raises(type(error)) as raised:
        convert(monkeypatch, loader.open(model, LoadOptions()), plan, tmp_path / "out")
    assert raised.value is error


@pytest.mark.parametrize(
    "key", [Key("layers.2.mlp.up.weight"), Key("embed.weight"), Key("head.weight")]
)
@pytest.mark.parametrize(
    "fault", ["missing", "doubled", "unknown", "misshapen", "of another dtype"]
)
def test_a_loader_that_breaks_its_word_ends_the_run_and_the_tensor_is_named(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, key: Key, fault: str
) -> None:
    source = loader.open(model, LoadOptions())

    class Liar:
        header = source.header

        def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
            for name, tensor in source.tensors():
                if name != key:
                    yield name, tensor
                    continue
                if fault == "doubled":
                    yield from [(key, tensor)] * 2
                elif fault == "unknown":
                    yield Key(f"{key.name}.2"), tensor
                elif fault == "misshapen":
                    yield key, Lazy((1, *tensor.shape), tensor.dtype)
                elif fault == "of another dtype":
                    yield key, Lazy(tensor.shape, "float32")

    with unchanged(tmp_path), pytest.raises(TensorMismatch, match=key.name.replace(".", r"\.")):
        convert(monkeypatch, Liar(), saver.plan, tmp_path / "out")


@pytest.mark.parametrize("partly", [False, True])
def test_a_plan_that_leaves_a_tensor_out_is_noticed(
    partly: bool, monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """Bytes of a record that nobody writes would be zeros in a file that looks complete."""

    def plan(header: Header, options: SaveOptions) -> OutputPlan:
        planned, key = saver.plan(header, options), Key("layers.2.mlp.up.weight")
        left = [place._replace(regions=()) for place in planned.placements[key]] if partly else []
        return replace(planned, placements={**planned.placements, key: left})

    with unchanged(tmp_path), pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up\.weight"):
        convert(monkeypatch, loader.open(model, LoadOptions()), plan, tmp_path / "out")


def test_a_plan_that_writes_a_place_twice_is_noticed(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    def plan(header: Header, options: SaveOptions) -> OutputPlan:
        planned = saver.plan(header, options)
        key = Key("layers.2.mlp.up.weight")
        return replace(
            planned, placements={**planned.placements, key: [*planned.placements[key]] * 2}
        )

    with (
        unchanged(tmp_path),
        pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.linear_fc1\.weight"),
    ):
        convert(monkeypatch, loader.open(model, LoadOptions()), plan, tmp_path / "out")


def test_tensors_in_memory_make_the_same_output_as_lazy_ones(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    source = loader.open(model, LoadOptions())

    class Plain:
        header = source.header

        def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
            for key, tensor in source.tensors():
                yield key, ArrayTensor(read_tensor(tensor), tensor.shape, tensor.dtype)

    for name, kind in (("lazy", source), ("plain", Plain())):
        convert(monkeypatch, kind, saver.plan, tmp_path / name)
    lazy, plain = (conversion_files(tmp_path / name) for name in ("lazy", "plain"))
    assert lazy == plain
    assert len(lazy) == 4


def conversion_files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }
