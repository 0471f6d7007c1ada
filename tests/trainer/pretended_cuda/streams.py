"""The pretended GPU's streams and events, and the order of work on memory.

Works of one stream run in their order. Works of two streams have an order only if one stream waits for an event of the
other. An unordered use of the same memory, of which one writes, raises StreamRace, as the results would be undefined.

A copy from the GPU to pinned memory without blocking happens at the last allowed moment: when the host waits for the
copy. Until then the memory holds NaN. A host that reads too early therefore computes something else.

A new thread has the device cuda:0, whatever device its process has. Its first call of CUDA would take memory there. So it has
to choose the device first; otherwise WrongDevice is raised.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tests.trainer.pretended_cuda.record import place


class StreamRace(RuntimeError):
    """Two streams, or a stream and the host, use the same memory without an order."""


class WrongDevice(RuntimeError):
    """A thread calls CUDA without having chosen the device."""


class Device:
    """The device of this thread inside the block, by torch's interface."""

    chosen: ClassVar = threading.local()

    def __init__(self, device: Any) -> None:
        assert torch.device(device).index is not None, "the device of this process has a number"

    def __enter__(self) -> None:
        self.chosen.is_set = True

    def __exit__(self, *_: object) -> None:
        self.chosen.is_set = False

    @classmethod
    def require(cls) -> None:
        """Raise WrongDevice in a thread without a device."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main and not getattr(cls.chosen, "is_set", False):
            raise WrongDevice(f"this thread has not chosen its device @ {place()}")


Times = dict["Stream", int]
"""The number of works of each stream."""


class Stream:
    """A queue of works, by torch's interface."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "side") -> None:
        self.name = name
        self.device = torch.device("cuda", 0) if device is None else torch.device(device)
        self.queued = 0
        self._before: Times = {}
        """The works of other streams after which the next work runs."""

    def __repr__(self) -> str:
        return f"stream {self.name}"

    def __enter__(self) -> "Stream":
        self._outer = STREAMS.current
        STREAMS.current = self
        return self

    def __exit__(self, *_: object) -> None:
        STREAMS.current = self._outer

    def begin(self) -> int:
        """Queue a work and return its number."""
        self.queued += 1
        return self.queued

    def follows(self, other: "Stream", number: int) -> bool:
        """Return whether the next work runs after this work of another stream."""
        return other is self or self._before.get(other, 0) >= number

    def reached(self) -> Times:
        """Return the works before the next one."""
        return {**self._before, self: self.queued}

    def wait_event(self, event: "Event") -> None:
        for stream, number in event.times.items():
            self._before[stream] = max(number, self._before.get(stream, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.times = self.reached()
        return event

    def synchronize(self) -> None:
        STREAMS.host_waits(self.reached())


class Event:
    """A point in a stream, by torch's interface."""

    def __init__(self, **_: Any) -> None:
        self.times: Times = {}

    def record(self, stream: Stream | None = None) -> None:
        (stream or STREAMS.current).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or STREAMS.current).wait_event(self)

    def synchronize(self) -> None:
        Device.require()
        STREAMS.host_waits(self.times)


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy between the GPU and pinned memory, of which the host does not know the end."""

    stream: Stream
    number: int
    pinned: Tensor
    values: Tensor
    """The copied values."""
    to_host: bool
    where: str

    def end(self) -> None:
        """Deliver the values, or check that the host left them until now."""
        if self.to_host:
            self.pinned.copy_(self.values)
        elif not _same(self.pinned, self.values):
            STREAMS.races.append(f"the host changed pinned memory during its copy @ {self.where}")


def _bytes(tensor: Tensor) -> Tensor:
    # A single element may count as contiguous, whatever its stride; only a copy has stride 1.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether all bits are equal."""
    return torch.equal(*(_bytes(x) for x in (one, other)))


@dataclass
class Streams:
    """All streams of the device."""

    default: Stream = field(default_factory=lambda: Stream(name="default"))
    races: list[str] = field(default_factory=list)
    """Races that are found too late to raise."""
    _copies: list[Copy] = field(default_factory=list)
    _of_groups: dict[str, Stream] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.current = self.default

    def of_group(self, name: str) -> Stream:
        """Return the stream of a communicator."""
        return self._of_groups.setdefault(name, Stream(name=name))

    def copy_later(self, pinned: Tensor, values: Tensor, *, to_host: bool) -> None:
        """Queue a copy that does not block. values: on the CPU."""
        number = self.current.begin()
        kept = values.detach().clone()
        if to_host:
            pinned.fill_(torch.nan if pinned.is_floating_point() else 1)
        with self._lock:
            self._copies.append(Copy(self.current, number, pinned, kept, to_host, place()))

    def arriving(self, pinned: Tensor) -> Tensor | None:
        """Return the values that an earlier copy brings to pinned memory; None if there is no copy under way.

        Raises StreamRace if the current stream does not follow the copy.
        """
        with self._lock:
            found = [copy for copy in self._copies if copy.to_host and copy.pinned is pinned]
        if not found:
            return None
        last = found[-1]
        if not self.current.follows(last.stream, last.number):
            raise StreamRace(f"{self.current} reads pinned memory before its copy @ {place()}")
        return last.values

    def host_waits(self, times: Times) -> None:
        """End the copies that the host knows to be complete."""
        with self._lock:
            ended = [copy for copy in self._copies if times.get(copy.stream, 0) >= copy.number]
            self._copies = [copy for copy in self._copies if copy not in ended]
        for copy in ended:
            copy.end()

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        self.host_waits({copy.stream: copy.stream.queued for copy in self._copies})

    def finish(self) -> None:
        """Wait for everything. Raises StreamRace for a race that could not be raised earlier."""
        self.synchronize()
        races, self.races = self.races, []
        if races:
            raise StreamRace("; ".join(races))


STREAMS = Streams()


class Memory:
    """The uses of one storage on the GPU."""

    def __init__(self) -> None:
        self._owner = STREAMS.current
        """The stream whose later allocations may take this memory when it is freed."""
        self._written: tuple[Stream, int] | None = None
        self._read: Times = {}
        self._safe: set[Stream] = {self._owner}

    def record_stream(self, stream: Stream) -> None:
        """Let the allocator wait for the stream before it gives the memory to others."""
        self._safe.add(stream)

    def use(self, stream: Stream, number: int, *, writes: bool) -> None:
        """Note a use by a work. Raises StreamRace."""
        self._require_order(stream, dict([self._written] if self._written else []), "written")
        if not writes:
            self._read[stream] = number
            return
        self._require_order(stream, self._read, "read")
        self._written, self._read = (stream, number), {}

    def _require_order(self, stream: Stream, earlier: Times, verb: str) -> None:
        for other, number in earlier.items():
            if not stream.follows(other, number):
                raise StreamRace(f"{stream} uses memory that {other} has {verb} @ {place()}")

    def __del__(self) -> None:
        uses = {**self._read, **dict([self._written] if self._written else [])}
        for stream, number in uses.items():
            if stream not in self._safe and not self._owner.follows(stream, number):
                STREAMS.races.append(f"memory of {self._owner} is freed while {stream} uses it")


_MEMORIES: WeakValueDictionary[int, Memory] = WeakValueDictionary()


def memory_of(held: Tensor) -> Memory:
    """Return the memory of a tensor. Views share it. Keep the result as long as the tensor."""
    key = held.untyped_storage()._cdata
    found = _MEMORIES.get(key)
    if found is None:
        found = _MEMORIES[key] = Memory()
    return found


@contextmanager
def stream(given: Stream | None) -> Iterator[None]:
    """Replace torch.cuda.stream."""
    with given or STREAMS.current:
        yield
