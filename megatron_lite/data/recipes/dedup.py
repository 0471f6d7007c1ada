"""`megatron_lite data dedup`: removes near-duplicates, found by datatrove's MinHash.

    stage 0  signature of each document: BUCKETS x HASHES minima of hashed n-grams of words
    stage 1  pairs of documents that are equal in a bucket
    stage 2  groups of these pairs; the first document of a group, by file and position, stays
    stage 3  kept and removed documents

Two texts whose sets of n-grams have the similarity s (Jaccard) are found with probability 1 - (1 - s^HASHES)^BUCKETS.
"""

import argparse
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megaconv.errors import UsageError
from megatron_lite.data.packages import package
from megatron_lite.data.recipes.flags import add_common, recipe_places
from megatron_lite.data.recipes.pipeline import (
    PipelineReport,
    ReadFile,
    Run,
    Stage,
    add_run_flags,
    first_and_last,
    is_marked,
    mark,
    perform,
    require_datatrove,
)

DESCRIPTION = "Remove near-duplicates from a corpus (MinHash)."
DUPLICATE = "duplicate"
BUCKETS_AND_HASHES = {0.7: (20, 6), 0.8: (14, 8), 0.9: (9, 13)}
"""Similarity -> buckets and hashes of each, with which 92 % of such pairs are found."""
_LINES = 4096
"""Signatures that are read at once, of each file. datatrove reads 5."""
_PAIR = struct.Struct("<4I")
"""File and position of two documents."""
_POSITION = struct.Struct("<I")

Place = tuple[int, int]
"""Number of a file, and position of a document in it."""


@dataclass(frozen=True)
class KeepFirst:
    """Groups the pairs of duplicates. All documents of a group but the first are listed, in a file for each input file.

    datatrove's own stage keeps any document of a group.
    """

    pairs: Path
    listed: Path

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        by_file: dict[int, list[int]] = {}
        for file, position in self._groups().others():
            by_file.setdefault(file, []).append(position)
        self.listed.mkdir(exist_ok=True)
        for file, positions in by_file.items():
            packed = map(_POSITION.pack, sorted(positions))
            path = self.listed / f"{file:06d}.remove"
            path.write_bytes(b"".join(packed))
        return iter(())

    def _groups(self) -> "Groups":
        groups = Groups()
        for path in sorted(self.pairs.glob("*.dups")):
            for first_file, first, second_file, second in _PAIR.iter_unpack(path.read_bytes()):
                groups.join((first_file, first), (second_file, second))
        return groups


class Groups:
    """Groups of documents, each known by its first one."""

    def __init__(self) -> None:
        self._before: dict[Place, Place] = {}
        """Document -> an earlier one of its group; the first one -> itself."""

    def first(self, place: Place) -> Place:
        """Return the first document of a document's group."""
        path = []
        while (before := self._before.setdefault(place, place)) != place:
            path.append(place)
            place = before
        for each in path:
            self._before[each] = place
        return place

    def join(self, one: Place, other: Place) -> None:
        """Make one group of two."""
        first, later = sorted((self.first(one), self.first(other)))
        self._before[later] = first

    def others(self) -> Iterator[Place]:
        """Yield all documents that aren't the first of their group."""
        yield from (place for place in list(self._before) if self.first(place) != place)


@dataclass(frozen=True)
class MarkDuplicates:
    """Marks the listed documents of a file."""

    listed: Path

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        path = self.listed / f"{rank:06d}.remove"
        content = path.read_bytes() if path.exists() else b""
        positions = {position for (position,) in _POSITION.iter_unpack(content)}
        for position, document in enumerate(data):
            if position in positions and not is_marked(document):
                mark(document, DUPLICATE)
            yield document


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_common(parser)
    add_run_flags(parser)
    add = parser.add_argument_group("near-duplicates").add_argument
    add(
        "--threshold", type=float, choices=tuple(BUCKETS_AND_HASHES), default=0.8, metavar="X",
        help="similarity of two texts that is found with 92 %%: 0.7, 0.8 or 0.9 (0.8)",
    )  # fmt: skip
    add(
        "--prefer", nargs="+", default=(), metavar="PATTERN",
        help="patterns of files whose documents stay: files of the first pattern come first",
    )  # fmt: skip
    add("--ngram", type=int, default=5, metavar="N", help="words that are compared together (5)")
    add("--seed", type=int, default=1, metavar="N", help="of the hash functions (1)")


def run(given: argparse.Namespace) -> PipelineReport:
    """Remove the near-duplicates. Raises CorruptCheckpoint, UsageError, TargetExists."""
    require_datatrove()
    if given.ngram < 1 or given.workers < 1:
        raise UsageError("--ngram and --workers must be 1 or more")
    buckets, hashes = BUCKETS_AND_HASHES[given.threshold]
    options = {
        "recipe": "dedup",
        "buckets": buckets,
        "hashes": hashes,
        "ngram": given.ngram,
        "seed": given.seed,
    }
    places = recipe_places(given)
    places = replace(places, files=preferred_first(places.files, given.prefer))
    task = Run(places, given.workers, given.resume, options)
    minhash = package("datatrove.pipeline.dedup.minhash", "data dedup")
    config = minhash.MinhashConfig(
        n_grams=given.ngram, num_buckets=buckets, hashes_per_bucket=hashes, seed=given.seed
    )
    return perform(task, lambda place: _stages(task, place, minhash, config))


def preferred_first(files: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the files in the order of the first pattern that each matches; then the others. Equal ones keep their order.

    Raises UsageError for a pattern that no file matches.
    """
    matched = [[fnmatch(file, pattern) for pattern in patterns] for file in files]
    for number, pattern in enumerate(patterns):
        if not any(of_file[number] for of_file in matched):
            raise UsageError(f"--prefer {pattern}: matches no file of --input; it may begin with *")
    places = {
        file: of_file.index(True) if any(of_file) else len(patterns)
        for file, of_file in zip(files, matched, strict=True)
    }
    return tuple(sorted(files, key=places.__getitem__))


def _stages(run: Run, place: Path, minhash: Any, config: Any) -> Iterator[Stage]:
    from megatron_lite.data.recipes.signatures import Signatures

    signatures = str(place / "signatures")
    pairs = place / "pairs"
    listed = place / "listed"
    files = len(run.places.files)

    read = ReadFile(run.places.files, run.places.reader)
    yield Stage([read, Signatures(signatures, config)], files)

    compare = minhash.MinhashDedupBuckets(
        signatures, str(pairs), config=config, lines_to_buffer=_LINES
    )
    yield Stage([compare], config.num_buckets)

    yield Stage([KeepFirst(pairs, listed)], 1)

    read, write = first_and_last(run)
    yield Stage([read, MarkDuplicates(listed), write], files)
