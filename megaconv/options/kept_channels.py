"""The channels that an output keeps, of the hidden states and inside MLPs, and the heads of attention and Mamba.

{"keep": {"hidden": [0, 2, 5], "layers.3.mlp": [1, 2], "layers.3.mlp.experts.7": [0, 4], "layers.3.mlp.shared": [3],
          "layers.3.attn": [0, 1]}}
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.wording import counted
from megaconv.errors import UsageError
from megaconv.options.kept_file import Kept, KeptFile, rising
from megaconv.options.values import channel_numbers

HIDDEN = "hidden"
"""The name of the channels of the hidden states."""
_FILE = KeptFile(
    part="channel or head",
    holds="the channels and heads that stay",
    places=re.compile(
        r"hidden|[a-z0-9_.]{1,200}\.(mlp(\.experts\.\d{1,9}|\.shared)?|attn|mamba|linear|kda)",
        re.ASCII,
    ),
    examples=f"{HIDDEN}, layers.3.mlp or layers.3.attn",
    command="megatron-lite rank-channels",
)


@dataclass(frozen=True)
class KeptChannels:
    """The channels that stay."""

    numbers: Kept
    """By `hidden` or the canonical name of an MLP or a mixer."""

    def __str__(self) -> str:
        """A short text that identifies these channels."""
        from hashlib import sha256  # most commands name no channels

        digest = sha256(repr(sorted(self.numbers.items())).encode()).hexdigest()
        return f"channels of {counted(len(self.numbers), 'place')}, sha256 {digest}"


def kept_channels(given: str | Path | Mapping[str, Iterable[int]] | KeptChannels) -> KeptChannels:
    """The channels that stay.

    given: the path of a file, or the numbers by name. Raises UsageError, CorruptCheckpoint for a file that can't be read,
    TypeError for a value of another type.
    """
    if isinstance(given, KeptChannels):
        return given
    if isinstance(given, Mapping):
        return KeptChannels({place: _numbers(given[place], place) for place in _named(given)})
    path = _FILE.path(given)
    if not path.is_file():
        raise UsageError(f"{path}: is no file; write one with `{_FILE.command}`")
    return KeptChannels(_FILE.read(path))


def _named(given: Mapping[str, Iterable[int]]) -> Iterable[str]:
    """The names. Raises UsageError if there are none, or others than of channels."""
    if not given:
        raise UsageError("{}: names no channels or heads; leave the option out to keep all")
    for place in given:
        if not _FILE.places.fullmatch(place):
            raise UsageError(f"{place!r:.80}: expected names such as {_FILE.examples}")
    return given


def _numbers(numbers: Iterable[int], place: str) -> Sequence[int]:
    found = channel_numbers(numbers)
    if not found or min(found) < 0:
        raise UsageError(f"{place}: expected a list of numbers from 0")
    return rising(found, place, _FILE.part)
