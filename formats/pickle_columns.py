"""Follows repeated records of a pickle together. `.metadata` has thousands of records of one kind.

    (class) )\\x81}(h.j....h.j....ub (class) )\\x81}(h.j....h.j....ub (class) ...

The instructions of such records differ only in their numbers, names and references to the memo. This module carries out
each instruction on a column: a list with the stack value of each repetition. A regular expression finds the
repetitions, and list comprehensions follow them, in a quarter of the time of the loop in `pickle_run`.

It handles only records whose attributes are numbers, names, sizes and earlier entries of the memo. Everything else, and
every error, is left to the loop, which starts at the first repetition. A pickle therefore gives the same value, or the
same error, either way.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from formats.pickle_arrays import naturals
from formats.pickle_errors import MalformedError
from formats.pickle_machine import Machine
from formats.pickle_records import Global, Opaque

Column = list[Any]

_REFERENCE, _NUMBER, _NAME, _KEPT_NAME, _INSTANCE = b"rnsk)"
_OTHERS = b"N}(ubt\x85\x86\x87R\x94"
"""Kinds of instructions. Instructions with operands have letters chosen here; the others have their opcode byte."""
_LONG, _INTEGER4 = b"\x8aJ"
_LONGS = b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(9))
_PATTERNS = (
    {
        _REFERENCE: rb"(h.|j.{4})",
        _NUMBER: rb"(K.|M..|J.{4}|\x8a(?:" + _LONGS + rb"))",
        _NAME: rb"\x8c(.[ -~]*)(?=\x94)",  # the next byte follows every text of Python; lengths are compared later
        _KEPT_NAME: rb"X(.{4}[ -~]*r.{3}\x00)",  # a text and its memo number, as `pickle_writer` writes them; both are compared later
        _INSTANCE: rb"\)\x81",
    }
    | {code: re.escape(bytes([code])) for code in _OTHERS}
)
"""Kind -> pattern of its instructions. The operand is a group."""
_REST = rb"(.+)"
"""Matches everything that fits no instruction in one piece, so that the search doesn't continue inside it."""
_KINDS = re.compile(
    b"|".join(
        [
            *(_PATTERNS[kind] for kind in (_REFERENCE, _NUMBER, _NAME, _KEPT_NAME)),
            rb"(\)\x81|[%b])" % re.escape(_OTHERS),
            _REST,
        ]
    ),
    re.DOTALL,
)
_TWICE = re.compile(rb"(\).{2,}?r)\1", re.DOTALL)
"""The kinds of instructions from an instance to the reference to the next instance's class, followed by the same once
more."""
_WINDOW = 1 << 9
"""Bytes in which repetitions are looked for. The longest records, a chunk's index and place, take 150."""
_FEWEST = 8
"""Minimum number of repetitions; fewer are not worth the overhead."""
_MOST_PATTERNS = 64
"""Maximum number of patterns for one pickle. Compiling one takes as long as following a thousand instructions.
`.metadata` has some ten patterns."""
_PAUSE, _LONGEST_PAUSE = 1 << 7, 1 << 12
"""Bytes to skip after a search that found nothing. The number doubles after each further failure, up to the maximum."""


class Columns:
    """Looks for repetitions in one machine's pickle, and follows them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._patterns: dict[bytes, re.Pattern[bytes]] = {}
        self._pause = _PAUSE
        self.next_look = machine.position if machine.by_columns else machine.end
        """The position before which no search happens."""

    def follow(self, start: int, until: int) -> bool:
        """Follow the repetitions that begin at `start` and end before `until`. Returns False, and changes nothing, if
        there are none.

        The opcodes at `start` make an instance (`)\\x81`) of the class on top of the stack. Afterwards a class is on
        top as well.
        """
        kinds, rows, end = self._rows(start, until)
        if len(rows) >= _FEWEST and _follow(self._machine, kinds, rows, end):
            self._pause = _PAUSE
            return True
        # The pause doubles, so that searching never takes longer than following would.
        self.next_look = max(end, start + self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return False

    def _rows(self, start: int, until: int) -> tuple[bytes, list[tuple[bytes, ...]], int]:
        """(kinds of the repeated instructions, their operands in each repetition, end of the last repetition)."""
        data = self._machine.data
        window = data[start : min(until, start + _WINDOW)]
        found = _TWICE.match(_kinds(window))
        if found is None:
            return b"", [], start
        kinds = found[1]
        if kinds not in self._patterns:
            if len(self._patterns) == _MOST_PATTERNS:
                return b"", [], start
            wanted = b"".join([_PATTERNS[kind] for kind in kinds])
            self._patterns[kinds] = re.compile(wanted + b"|" + _REST, re.DOTALL)
        rows: list[tuple[bytes, ...]] = self._patterns[kinds].findall(data, start, until)
        rest = len(rows[-1][-1])
        return kinds, rows[:-1] if rest else rows, until - rest


def _kinds(data: bytes) -> bytes:
    """The kinds of the instructions at the beginning of data, up to one that can't be repeated."""
    found: list[tuple[bytes, ...]] = _KINDS.findall(data)
    return b"".join(
        [
            b"r" if ref else b"n" if number else b"s" if name else b"k" if kept else code[:1]
            for ref, number, name, kept, code, _ in found
        ]
    )


def _follow(machine: Machine, kinds: bytes, rows: list[tuple[bytes, ...]], end: int) -> bool:
    """Move the machine to `end`. Returns False, and changes nothing, if something is unusual or wrong."""
    *operands, _ = zip(*rows, strict=True)
    try:
        repetitions = _Repetitions(machine, operands)
        for kind in kinds:
            _STEPS[kind](repetitions)
        repetitions.finish(end)
    except (LookupError, TypeError, ValueError):
        return False
    return True


@lru_cache(1 << 14)
def _number(instruction: bytes) -> int:
    """The number that an instruction pushes, or its number in the memo."""
    code, digits = instruction[0], instruction[1:]
    if code == _LONG:
        return int.from_bytes(digits[1:], "little", signed=True)
    return int.from_bytes(digits, "little", signed=code == _INTEGER4)


class _Same(Column):
    """A column in which all values are the same."""


class _Repetitions:
    """The state of a machine for all repetitions at once: its stack holds columns. Only `finish` changes the machine
    itself.

    Raises ValueError, TypeError or LookupError for instructions that can't be repeated or are wrong.
    """

    def __init__(self, machine: Machine, operands: list[tuple[bytes, ...]]) -> None:
        """operands: for each instruction with an operand, its operands in all repetitions."""
        self.machine, self.count = machine, len(operands[0])
        self.operands = iter(operands)
        self.made = self.copied = 0
        self.memoized: list[Column] = []
        self.numbers: list[list[int] | None] = []
        """For each column of `memoized`: the memo numbers that the pickle gives, or None if it gives none."""
        self.instances: list[Column] = []
        self.dicts: list[Column] = []
        self.empty: list[Column] = []
        """The columns of `dicts` that have no key yet."""
        self.below: list[list[Column]] = []
        # A repetition ends with the class that the next one begins with.
        classes = self._referred(operands[-1])
        _require(isinstance(classes, _Same) and classes[0] is machine.stack[-1])
        self.stack: list[Column] = [classes]

    def _referred(self, instructions: tuple[bytes, ...]) -> Column:
        memo, first = self.machine.memo, instructions[0]
        if instructions.count(first) == self.count:
            return _Same([memo[_number(first)]] * self.count)
        return [memo[number] for number in map(_number, instructions)]

    def reference(self) -> None:
        self.stack.append(self._referred(next(self.operands)))

    def number(self) -> None:
        self.stack.append([*map(_number, next(self.operands))])

    def name(self) -> None:
        names = next(self.operands)
        _require(all(len(name) == 1 + name[0] for name in names))
        self.stack.append([name[1:].decode() for name in names])

    def kept_name(self) -> None:
        """Push a text with an explicit memo number, unlike `memoize`. Only the next free number is accepted."""
        names = next(self.operands)
        self.stack.append([name[4:-5].decode() for name in names])
        _require(all(int.from_bytes(name[:4], "little") == len(name) - 9 for name in names))
        self.memoize()
        self.numbers[-1] = [int.from_bytes(name[-4:], "little") for name in names]

    def none(self) -> None:
        self.stack.append(_Same([None] * self.count))

    def instance(self) -> None:
        classes = self.stack.pop()
        kind = classes[0]
        _require(isinstance(classes, _Same) and type(kind) is Global and kind.inert)
        self.stack.append([Opaque(kind.module, kind.name, ()) for _ in classes])
        self.instances.append(self.stack[-1])
        self.made += 1

    def empty_dict(self) -> None:
        self.stack.append([{} for _ in range(self.count)])
        self.dicts.append(self.stack[-1])
        self.empty.append(self.stack[-1])
        self.made += 1

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []
        self.made += 1

    def set_items(self) -> None:
        """Set the items of dictionaries. All repetitions must have the same keys, each once.

        One dictionary is copied for all repetitions, and values that differ are set in the copies.
        """
        items = self._to_mark()
        key_columns = items[::2]
        value_columns = items[1::2]
        target = self.stack[-1]
        pairs = [(keys[0], values) for keys, values in zip(key_columns, value_columns, strict=True)]
        _require(_among(target, self.empty))
        _require(all(isinstance(keys, _Same) for keys in key_columns))
        for key, _ in pairs:
            self.machine.check_key(key)
        first = {key: values[0] for key, values in pairs}
        _require(len(first) == len(pairs))
        self.empty = [column for column in self.empty if column is not target]
        # In place: the column may also be among the columns for the memo.
        target[:] = [first.copy() for _ in target]
        for key, values in pairs:
            if not isinstance(values, _Same):
                for made, value in zip(target, values, strict=True):
                    made[key] = value

    def build(self) -> None:
        states = self.stack.pop()
        _require(_among(states, self.dicts) and _among(self.stack[-1], self.instances))
        for made, state in zip(self.stack[-1], states, strict=True):
            made.state = state
        self.copied += sum(map(len, states))

    def tuple_of_marked(self) -> None:
        items = self._to_mark()
        _require(len(items) > 0)
        self.stack.append([*zip(*items, strict=True)])

    def tuple_of_last(self, size: int) -> None:
        _require(len(self.stack) >= size)
        self.stack[-size:] = [[*zip(*self.stack[-size:], strict=True)]]
        self.made += 1

    def _to_mark(self) -> list[Column]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def call(self) -> None:
        """Call torch.Size with a tuple. It is the only call that records contain in great numbers."""
        arguments, functions = self.stack.pop(), self.stack.pop()
        _require(isinstance(functions, _Same) and functions[0] == _SIZE)
        self.stack.append([naturals(*each) for each in arguments])
        self.copied += sum(map(len, self.stack[-1]))
        self.made += 1

    def memoize(self) -> None:
        self.memoized.append(self.stack[-1])
        self.numbers.append(None)

    def finish(self, end: int) -> None:
        """Move the machine to the end of the last repetition. The records are then on its stack, with a class on top."""
        machine = self.machine
        memo = machine.memo
        start = len(memo)
        stop = start + self.count * len(self.memoized)
        added = range(start, stop)
        _require(not self.below and memo.keys().isdisjoint(added))
        # Each repetition memoizes the same values in the same order, so one value's numbers have equal distances.
        for first, numbers in enumerate(self.numbers, start):
            expected = [*range(first, stop, len(self.numbers))]
            _require(numbers is None or numbers == expected)
        *made, classes = self.stack
        memo.update(zip(added, _in_turn(self.memoized), strict=True))
        machine.stack[-1:] = [*_in_turn(made), classes[0]]
        machine.made += self.made * self.count
        machine.copied += self.copied
        machine.position = end


_SIZE = Global("torch", "Size")


def _require(holds: bool) -> None:
    if not holds:
        raise MalformedError("nothing that can be repeated")


def _among(column: Column, columns: list[Column]) -> bool:
    return any(column is each for each in columns)


def _in_turn(columns: list[Column]) -> Iterator[object]:
    """The values of all columns for the first repetition, then for the second one, and so on."""
    return chain.from_iterable(zip(*columns, strict=True))


_BY_KIND: dict[bytes, Callable[[_Repetitions], None]] = {
    b"r": _Repetitions.reference, b"n": _Repetitions.number, b"s": _Repetitions.name, b")": _Repetitions.instance,
    b"N": _Repetitions.none, b"}": _Repetitions.empty_dict, b"(": _Repetitions.mark, b"u": _Repetitions.set_items,
    b"b": _Repetitions.build, b"t": _Repetitions.tuple_of_marked, b"\x85": partial(_Repetitions.tuple_of_last, size=1),
    b"\x86": partial(_Repetitions.tuple_of_last, size=2), b"\x87": partial(_Repetitions.tuple_of_last, size=3),
    b"R": _Repetitions.call, b"\x94": _Repetitions.memoize, b"k": _Repetitions.kept_name,
}  # fmt: skip
_STEPS = {kind[0]: step for kind, step in _BY_KIND.items()}
