"""Records that are followed by columns come out as those that are followed one by one, and so does what is wrong with them."""

import pickle
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Size
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from formats import dcp_metadata
from formats.dcp_metadata import DcpMetadata, Range, StoredChunk, StoredTensor
from formats.pickle_columns import Columns
from formats.pickle_machine import Machine
from formats.pickle_records import Opaque
from formats.pickle_run import run

CLASS = b"cmegatron.core\nRecord\n"


class OneByOne(Machine):
    """A machine whose instructions are followed one after the other."""

    by_columns = False


def machine(data: bytes, kind: type[Machine] = Machine) -> Machine:
    return kind(data, 0, lambda identity: identity, lambda record: record)


def outcome(data: bytes, kind: type[Machine]) -> object:
    """The value or the error, and everything else that a machine is afterwards."""
    made = machine(data, kind)
    try:
        found: object = run(made)
    except Exception as error:
        found = type(error), str(error)
    state = made.position, made.made, made.copied, sorted(made.unusual), len(made.below)
    return _described([found, made.stack, list(made.memo.items())]), state


def _described(value: object) -> list[Any]:
    """Types and values, and which containers and records are one and the same."""
    seen: dict[int, int] = {}

    def describe(part: object) -> Any:
        if isinstance(part, (list, dict, Opaque)):
            if id(part) in seen:
                return "again", seen[id(part)]
            seen[id(part)] = len(seen)
        if isinstance(part, Opaque):
            return (
                "record",
                part.module,
                part.name,
                part.args,
                describe(part.state),
                describe(part.items),
            )
        if isinstance(part, dict):
            return "dict", [(describe(key), describe(entry)) for key, entry in part.items()]
        if isinstance(part, (list, tuple)):
            return type(part), [describe(each) for each in part]
        return type(part), part

    described: list[Any] = [describe(value)]
    return described


def same(data: bytes) -> bool:
    return outcome(data, Machine) == outcome(data, OneByOne)


def followed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of bytes that were followed by columns."""
    bytes_of: list[int] = []
    follow = Columns.follow

    def counted(columns: Columns, start: int, until: int) -> bool:
        found = follow(columns, start, until)
        if found:
            bytes_of.append(columns._machine.position - start)
        return found

    monkeypatch.setattr(Columns, "follow", counted)
    run(machine(data))
    return sum(bytes_of)


def _by_torch(protocol: int) -> bytes:
    """A pickle like Megatron's `.metadata`: all sizes and many names are separate objects, numbers have one to six
    bytes."""
    offsets = [Size([n // 8, n % 8 * 40, n]) for n in range(48)]
    chunks = [ChunkStorageMetadata(offset, Size([1, 40, 300])) for offset in offsets]
    places = {
        MetadataIndex("decoder.weight", offset, index=n or None): _StorageInfo(
            f"__{n % 2}_0.distcp", 3**n % 2**41, 300
        )
        for n, offset in enumerate(offsets)
    }
    states = {
        MetadataIndex(f"{n}._extra_state"): _StorageInfo("__0_0.distcp", 2**31 + n, 9)
        for n in range(30)
    }
    return pickle.dumps({"chunks": chunks, "places": places | states}, protocol)


def _by_us(count: int) -> bytes:
    chunks = tuple(
        StoredChunk((n, 0), (1, 300), Range("__0_0.distcp", 3**n % 2**41, 700))
        for n in range(count)
    )
    objects = {f"{n}._extra_state": Range("__0_0.distcp", 2**31 + n, 9) for n in range(count)}
    metadata = DcpMetadata(
        {"decoder.weight": StoredTensor((count, 300), "bfloat16", chunks)}, objects
    )
    return dcp_metadata.write(metadata, nested_keys=False)


TABLES = {"ours": _by_us(48), "torch, protocol 2": _by_torch(2), "torch, protocol 4": _by_torch(4)}


@pytest.mark.parametrize("name", TABLES)
def test_records_come_out_the_same(name: str) -> None:
    assert same(TABLES[name])


@pytest.mark.parametrize(
    ("data", "share"), [(_by_us(1000), 0.8), (_by_torch(4), 0.5)], ids=["ours", "torch"]
)
def test_most_of_a_table_is_followed_by_columns(
    data: bytes, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert followed(data, monkeypatch) > share * len(data)


INSTRUCTIONS = b"hjNKMJ\x8a)\x81}(ubst\x85\x86\x87R\x94\x8cXq0."
edits = st.lists(
    st.tuples(
        st.integers(0, 1 << 20),
        st.sampled_from(INSTRUCTIONS) | st.integers(0, 255),
        st.integers(-9, 9),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TABLES)), edits)
def test_damaged_records_give_the_same_value_or_error(
    name: str, edited: list[tuple[int, int, int]]
) -> None:
    """edited: a byte is put in the place of another one, and of so many more, or the last so many come once more."""
    data = bytearray(TABLES[name])
    for index, byte, removed in edited:
        index %= len(data)
        data[index : index + 1 + max(removed, 0)] = bytes([byte]) + data[index + removed : index]
    assert same(bytes(data))


INNER = st.sampled_from([
    b"h\x00", b"h\x01", b"j\x02\0\0\0", b"h\x03", b"h\x04", b"h\x05", b"h\x06", b"h\x09", b"h\x0b", b"N", b")\x81", b"}", b"(",
    b"u", b"b", b"t", b"\x85", b"\x86", b"\x87", b"h\x03K\x01\x85\x85R", b"h\x03K\x00J\xff\xff\xff\xff\x86\x85R", b"R", b"\x94",
    b"}(h\x01h\x02ub", b"}(h\x01h\x02h\x02h\x01ub", b"}(h\x01NK#h\x01u", b"}\x94(h\x01K#ub", b"K#", b"K#", b"\x8c\x03abc\x94",
    b"X\3\0\0\0abcr#\0\0\0",
])  # fmt: skip
MEMO = (
    CLASS + b"q\0X\1\0\0\0aq\1X\1\0\0\0bq\2ctorch\nSize\nq\3]q\4}q\5ctorch.nn\nModule\nq\6\x8a\x0a" + b"\1" * 10
    + b"q\7ccollections\nOrderedDict\nq\x08h\1q\x09}q\x0a((("
)  # fmt: skip
"""0 and 6: classes, 1, 2 and 9: texts, 3: Size, 4: a list, 5 and 10: dictionaries, 7: a number, 8: a class that makes something."""


UNUSUAL = {
    "no attributes": b")\x81}bh\0",
    "a key that comes twice": b")\x81}(h\1K#h\1h\2ubh\0",
    "keys that are set at another time": b")\x81}(h\1K#u(h\2K#ubh\0",
    "a key that is too large": b")\x81}(h\7K#ubh\0",
    "a key that grows": b")\x81}(K#h\1ubh\0",
    "a key without a value": b")\x81}(h\1ubh\0",
    "attributes that are no dictionary": b")\x81h\1bh\0",
    "attributes from elsewhere": b")\x81h\x0abh\0",
    "attributes of a dictionary": b")\x81}}(h\1K#ubh\0",
    "attributes for what is below": b")\x81}bbh\0",
    "another function than Size": b")\x81}(h\1h\6K#\x85\x85Rubh\0",
    "a size that is none": b")\x81}(h\1h\3J\xff\xff\xff\xff\x85\x85Rubh\0",
    "a size of two arguments": b")\x81}(h\1h\3K#\x85K#\x85\x86Rubh\0",
    "a name that is shorter than it looks": b")\x81}(h\1\x8c\2abN\x94ubh\0",
    "a kept name that is shorter than it looks": b")\x81}bX\1\0\0\0aKr#\0\0\0h\0",
    "a name kept under another number": b")\x81}bX\2\0\0\0abr#\0\0\0h\0",
    "a name kept under the same number": b")\x81}bX\2\0\0\0abr\x0b\0\0\0h\0",
    "a negative number": b")\x81}(h\1J\xff\xff\xff\xffh\2\x8a\1\xffubh\0",
    "a long without digits": b")\x81}(h\1\x8a\0ubh\0",
    "a class that makes something": b")\x81}(h\1K#ubh\x08)\x81h\0",
    "a class that is a text": b")\x81}(h\1K#ubh\1)\x81h\0",
    "another class": b")\x81}(h\1K#ubh\6",
    "no class": b")\x81}(h\1K#ubh\1",
    "what isn't in the memo": b")\x81}(h\1h\x63ubh\0",
    "what it has put into the memo itself": b")\x81\x94}(h\1h\x0bubh\0",
    "a mark that stays open": b")\x81}(h\1h\0",
    "a mark that isn't there": b")\x81}uh\1h\0",
    "an empty tuple": b")\x81}(h\1(tubh\0",
    "a tuple of what is below": b")\x81\x87h\0",
    "a record as a key": b")\x81}(h\0)\x81K#ubh\0",
    "records that stay on the stack": b")\x81NK#h\4h\0",
}
"""Repetitions in which something is as it mostly isn't. `#` is a number that grows."""


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_repetitions_give_the_same_result(name: str) -> None:
    for count in (9, 200):
        for end in (b".", b"t.", b"\x8c\2a", b")\x81}b."):
            assert same(repeated(UNUSUAL[name], count) + end)


def repeated(item: bytes, count: int) -> bytes:
    return (
        MEMO + b"h\0" + b"".join(item.replace(b"#", b"%c" % (n % 200 + 48)) for n in range(count))
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(INNER, max_size=9),
    st.sampled_from([b"h\0", b"h\0", b"h\6"]),
    st.integers(2, 20),
    st.binary(max_size=9),
)
def test_instructions_in_any_order_give_the_same_value_or_error(
    inner: list[bytes], next_class: bytes, count: int, rest: bytes
) -> None:
    assert same(repeated(b")\x81" + b"".join(inner) + next_class, count) + rest + b".")


def test_repetitions_of_a_record_that_the_memo_would_be_changed_by_are_followed_one_by_one() -> (
    None
):
    """An entry that exists already is replaced, and the next one gets the same number again."""
    data = CLASS + b"q\0]q\x09" + b"h\0" + b")\x81\x94}\x94bh\0" * 20 + b"h\x09h\x03\x86."
    assert same(data)


def test_columns_allow_as_many_values_as_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("formats.pickle_machine.PICKLE_VALUES", 1000)
    data = CLASS + b"q\0h\0" + b")\x81}bh\0" * 20_000 + b"."
    assert outcome(data, Machine) == outcome(data, OneByOne)
    assert "more values than its length allows" in str(outcome(data, Machine))


def test_looking_for_repetitions_that_are_none_takes_no_longer_than_following_them() -> None:
    """Records of ever other kinds, in groups of two: each pair would be an expression of its own."""

    def kinds(n: int) -> bytes:
        return (
            b")\x81}("
            + b"".join(b"h\1K\1" if n >> bit & 1 else b"h\1N" for bit in range(13))
            + b"ubh\0"
        )

    data = CLASS + b"q\0X\1\0\0\0aq\1h\0" + b"".join(kinds(n) * 2 for n in range(1 << 10)) + b"."

    def seconds(kind: type[Machine]) -> float:
        start = process_time()
        run(machine(data, kind))
        return process_time() - start

    assert same(data)
    assert min(seconds(Machine) for _ in range(3)) < 3 * min(seconds(OneByOne) for _ in range(3))
