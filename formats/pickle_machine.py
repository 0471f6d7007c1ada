"""The state of a pickle that is being read, and what can happen to it.

Nothing is imported, and nothing is called but `pickle_globals.call`. Time and memory stay in proportion to the size of
the pickle.
"""

from collections.abc import Callable, Iterable
from mmap import mmap
from struct import Struct

from formats.ceilings import PICKLE_BYTES, PICKLE_VALUE_BYTES, PICKLE_VALUES
from formats.pickle_globals import MalformedError, TensorHook, build, call, check_key, is_unusual, resolve
from formats.pickle_records import Opaque

PersistentHook = Callable[[object], object]


class Machine:
    """A stack, a memo, and a position in the bytes. The stacks below open marks wait in `below`."""

    by_columns = True
    """Whether it may be followed by columns: it does with a call what `pickle_globals.call` does, and nothing else."""

    def __init__(self, data: bytes | mmap, offset: int, persistent: PersistentHook, tensor: TensorHook) -> None:
        self.data = data
        self.start = self.position = offset
        self.end = min(len(data), offset + PICKLE_BYTES)
        self.persistent = persistent
        self.tensor = tensor
        self.stack: list[object] = []
        self.below: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.copied = self.made = 0
        self.unusual: set[str] = set()
        """What was asked for under torch's or numpy's names and is no part of any checkpoint."""

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if count < 0 or self.position > self.end:
            raise MalformedError("it ends too early")
        return self.data[start : self.position]

    def number(self, layout: Struct) -> int:
        value: int = layout.unpack_from(self.data, self.position)[0]
        self.position += layout.size
        return value

    def line(self) -> bytes:
        stop = self.data.find(b"\n", self.position, self.end)
        content = self.take(stop - self.position)
        self.position += 1
        return content

    def make(self, count: int = 1) -> None:
        """Called before a container or an object is made; count: as how many it counts. Raises MalformedError for one too many."""
        self.made += count
        self.require_allowed(self.made)

    def require_allowed(self, count: int) -> int:
        """How many containers there may be by now, and entries of the memo. Raises MalformedError for more."""
        allowed = PICKLE_VALUES + (self.position - self.start) // PICKLE_VALUE_BYTES
        if count > allowed:
            raise MalformedError("it has more values than its length allows")
        return allowed

    def to_mark(self) -> list[object]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def resolve(self, module: str, name: str) -> object:
        """What stands for a name (`pickle_globals.resolve`)."""
        return resolve(module, name)

    def call(self, function: object, args: object) -> None:
        if not isinstance(args, tuple):
            raise MalformedError("a call without a tuple of arguments")
        self.count_copies(args)
        self.make()
        made = call(function, args, self.tensor)
        if type(made) is Opaque and is_unusual(made):
            self.unusual.add(f"{made.module}.{made.name}")
        self.stack.append(made)

    def build(self, target: object, state: object) -> None:
        self.count_copies((state,))
        build(target, state)

    def count_copies(self, values: Iterable[object]) -> None:
        """A call may copy what it is given, and two bytes are enough to give the same long value again."""
        for value in values:
            if isinstance(value, (str, bytes, list, tuple, dict)):
                self.copied += len(value)
        self.require_copies(self.copied)

    def require_copies(self, count: int) -> int:
        """How many values calls may have been given by now. Raises MalformedError for more."""
        allowed = 64 * (self.position - self.start) + (1 << 20)
        if count > allowed:
            raise MalformedError("it multiplies its contents")
        return allowed

    def set_items(self, target: object, pairs: list[object]) -> None:
        keys, values = pairs[::2], pairs[1::2]
        if isinstance(target, dict):
            for key, value in zip(keys, values, strict=True):
                check_key(key)
                target[key] = value
        elif isinstance(target, Opaque):
            target.items = target.items or []
            target.items += zip(keys, values, strict=True)
        else:
            raise MalformedError(f"keys for a {type(target).__name__}")

    def append(self, target: object, values: list[object]) -> None:
        if isinstance(target, list):
            target += values
        elif isinstance(target, Opaque):
            target.items = target.items or []
            target.items += values
        else:
            raise MalformedError(f"values for a {type(target).__name__}")
