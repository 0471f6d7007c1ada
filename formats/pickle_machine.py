"""The state of a pickle while it is read, and the operations on it.

Nothing is imported, and nothing is called except `pickle_globals.call`. Time and memory stay proportional to the size
of the pickle.
"""

from collections.abc import Callable, Iterable
from mmap import mmap
from struct import Struct

from formats.ceilings import PICKLE_BYTES, PICKLE_VALUE_BYTES, PICKLE_VALUES
from formats.pickle_errors import MalformedError
from formats.pickle_globals import TensorHook, build, call, is_unusual, resolve
from formats.pickle_keys import KeyCheck
from formats.pickle_records import Opaque

PersistentHook = Callable[[object], object]


class Machine:
    """A stack, a memo, and a position in the bytes. `below` holds the stacks below open marks."""

    by_columns = True
    """True if `pickle_columns` may follow this machine's pickle: its calls do the same as `pickle_globals.call`, and
    nothing else."""

    def __init__(
        self, data: bytes | mmap, offset: int, persistent: PersistentHook, tensor: TensorHook
    ) -> None:
        self.data = data
        self.start = self.position = offset
        self.end = min(len(data), offset + PICKLE_BYTES)
        self.persistent = persistent
        self.tensor = tensor
        self.stack: list[object] = []
        self.below: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.copied = self.made = 0
        self.check_key = KeyCheck()
        self.unusual: set[str] = set()
        """Called names of torch or numpy that are not part of any known checkpoint."""

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
        """Count a container or object before it is made.

        count: the number that it counts as. Raises MalformedError for one too many.
        """
        self.made += count
        self.require_allowed(self.made)

    def require_allowed(self, count: int) -> int:
        """The number of containers and of memo entries that are allowed so far. Raises MalformedError if count is
        larger."""
        allowed = PICKLE_VALUES + (self.position - self.start) // PICKLE_VALUE_BYTES
        if count > allowed:
            raise MalformedError("it has more values than its length allows")
        return allowed

    def to_mark(self) -> list[object]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def resolve(self, module: str, name: str) -> object:
        """The replacement of a name (`pickle_globals.resolve`)."""
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
        """Count the values that a call may copy: two bytes of a pickle are enough to pass the same long value again."""
        for value in values:
            if isinstance(value, (str, bytes, list, tuple, dict, set, frozenset)):
                self.copied += len(value)
        self.require_copies(self.copied)

    def require_copies(self, count: int) -> int:
        """The number of values that may have been passed to calls so far. Raises MalformedError if count is larger."""
        allowed = 64 * (self.position - self.start) + (1 << 20)
        if count > allowed:
            raise MalformedError("it multiplies its contents")
        return allowed

    def set_items(self, target: object, pairs: list[object]) -> None:
        keys, values = pairs[::2], pairs[1::2]
        if isinstance(target, dict):
            for key, value in zip(keys, values, strict=True):
                self.check_key(key)
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
