"""Compares two checkpoints of any formats and layouts tensor by tensor: canonical name, shape, dtype, value."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from formats.tensor import ITEMSIZE, Bytes, LazyTensor
from megaconv import registry
from megaconv.commands.comparable import require_same_names, require_weights
from megaconv.engine.fingerprints import read_blocks, tensor_hasher
from megaconv.engine.opening import open_source
from megaconv.engine.source_check import SourceCheck, check_source
from megaconv.errors import UsageError
from megaconv.families import has_text_only
from megaconv.hub import resolve
from megaconv.input import Input, input_at
from megaconv.model.ir import WEIGHT, Key, Source, TensorInfo, shift_of
from megaconv.model.meaning import config_differences
from megaconv.model.training import SLOTS
from megaconv.options import LoadOptions
from megaconv.threads import thread_pool
from megaconv.values.rounding import numbers
from megaconv.values.shifted import add


@dataclass(frozen=True)
class Difference:
    """A difference of one tensor."""

    key: Key
    kind: str
    """`only in A`, `only in B`, `shape`, `dtype` or `values`."""
    detail: str
    max_abs: float | None = None


@dataclass(frozen=True)
class DifferenceGroup:
    """Differences of the same kind in tensors of the same kind."""

    name: str
    """The name with placeholders, `layers.*.attn.q.weight`, or the tensor's own name if there is only one."""
    kind: str
    """The kind of the differences, as in Difference."""
    count: int
    detail: str
    """The common detail; empty if the details vary."""
    max_abs: float | None

    def __str__(self) -> str:
        largest = "" if self.max_abs is None else f"largest difference {self.max_abs:.3g}"
        count = f"{self.count} tensors" if self.count > 1 else ""
        return (
            f"{self.kind:<9}  {', '.join(word for word in (count, self.detail, largest) if word)}"
        )


@dataclass(frozen=True, repr=False)
class Diff:
    """The result of a comparison. `same` considers only tensors.

    differences: those beyond the tolerance, if one was given. config: (field, in A, in B) for each field of the
    configurations that differs.
    """

    tensors: int
    differences: tuple[Difference, ...]
    config: tuple[tuple[str, Any, Any], ...]
    slots: tuple[str, ...] = (WEIGHT,)
    """The slots that were compared."""
    within: int = 0
    """Number of tensors whose values differ by no more than the tolerance."""

    def __repr__(self) -> str:
        return f"<Diff: {len(self.differences)} of {self.tensors} tensors differ, {len(self.config)} fields of the configuration>"

    def kinds(self) -> dict[str, int]:
        """Number of differences by kind of tensor and kind of difference: `layers.*.attn.q.weight, values`."""
        return dict(
            Counter(f"{kind_of(item.key)}, {item.kind}" for item in self.differences).most_common()
        )

    def groups(self) -> list[DifferenceGroup]:
        """The differences grouped in the same way, the largest group first."""
        members: dict[tuple[str, str], list[Difference]] = {}
        for item in self.differences:
            members.setdefault((kind_of(item.key), item.kind), []).append(item)
        found = [_group(name, kind, items) for (name, kind), items in members.items()]
        return sorted(found, key=lambda group: -group.count)

    @property
    def same(self) -> bool:
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.same,
            "tensors": self.tensors,
            "slots": list(self.slots),
            "within_tolerance": self.within,
            "kinds": self.kinds(),
            "differences": [
                {
                    "tensor": str(item.key),
                    "kind": item.kind,
                    "detail": item.detail,
                    "max_abs": item.max_abs,
                }
                for item in self.differences
            ],
            "config": [{"field": name, "a": left, "b": right} for name, left, right in self.config],
        }


def _group(name: str, kind: str, items: Sequence[Difference]) -> DifferenceGroup:
    """name: the group's name, which a group of one tensor doesn't use."""
    details = {item.detail for item in items}
    largest = [item.max_abs for item in items if item.max_abs is not None]
    return DifferenceGroup(
        name=str(items[0].key) if len(items) == 1 else name,
        kind=kind,
        count=len(items),
        detail=details.pop() if len(details) == 1 else "",
        max_abs=max(largest, default=None),
    )


def kind_of(key: Key) -> str:
    """A tensor's name with its numbers replaced: `layers.*.attn.q.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", str(key))


def find_both(
    a: str | Path, b: str | Path, options: LoadOptions, loaders: tuple[str | None, str | None]
) -> tuple[Input, Input]:
    """Both inputs. loaders: names of loaders; None: the loader that recognises the input. Raises CheckpointError."""
    first, second = loaders
    # Both places come first: a missing input ends the command before the other one is examined.
    places = [resolve(place, cache=options.cache) for place in (a, b)]
    return input_at(a, places[0], first, options), input_at(b, places[1], second, options)


def open_both(inputs: tuple[Input, Input], options: LoadOptions) -> tuple[Source, Source]:
    """Both opened checkpoints. Each loader gets the options that it knows. Raises CheckpointError.

    With --text-only, one of them may be a language model. Raises UsageError if both are.
    """
    left, right = inputs
    options = replace(options, own_names=True)
    takers = {
        f"loader {left.loader.name} of A": left.loader,
        f"loader {right.loader.name} of B": right.loader,
    }
    of_left, of_right = registry.share_options(options.extra, takers)
    for_left, for_right = replace(options, extra=of_left), replace(options, extra=of_right)
    if options.text_only:
        for_left, for_right = _where_whole(left, for_left), _where_whole(right, for_right)
        if not for_left.text_only and not for_right.text_only:
            raise UsageError("--text-only: both are language models by themselves; leave it out")
    sources = open_source(left, for_left), open_source(right, for_right)
    return _by_shared_names(inputs, sources, (for_left, for_right))


def _by_shared_names(
    inputs: tuple[Input, Input],
    sources: tuple[Source, Source],
    options: tuple[LoadOptions, LoadOptions],
) -> tuple[Source, Source]:
    """The sources. If one is a multimodal model under its own names (DCP), the other one is read by its own names too."""
    are_unknown = [source.header.config.own_names is not None for source in sources]
    left, right = (
        open_source(found, replace(asked, whole=False))
        if source.header.config.whole is not None and any(are_unknown)
        else source
        for found, source, asked in zip(inputs, sources, options, strict=True)
    )
    return left, right


def _where_whole(found: Input, options: LoadOptions) -> LoadOptions:
    """The options with --text-only only if the input is a multimodal model."""
    looked = replace(options, text_only=False, metadata_only=True, optimizer=False)
    holds_parts = open_source(found, looked).header.config.whole is not None
    is_whole = holds_parts or (isinstance(found.place, Path) and has_text_only(found.place))
    return replace(options, text_only=is_whole)


def source_checks(
    inputs: tuple[Input, Input], sources: tuple[Source, Source]
) -> tuple[SourceCheck, SourceCheck]:
    """Both sources compared with their own records.

    Raises CorruptCheckpoint if names or shapes differ from a record.
    """
    left, right = (
        check_source(found.place, source) for found, source in zip(inputs, sources, strict=True)
    )
    return left, right


def diff_sources(
    left: Source,
    right: Source,
    workers: int,
    advance: Callable[[int], None] = lambda count: None,
    checks: tuple[SourceCheck, SourceCheck] | None = None,
    tolerance: float = 0.0,
) -> Diff:
    """Compare all tensors of two sources. Slots other than weights are compared if both sides have them.

    tolerance: values that differ by no more than this are equal. checks: comparisons with the sources' own records.
    Raises CorruptCheckpoint if a compared tensor differs from its record, UnknownFamily if only one model has a family,
    and UnsupportedInput for a tolerance if the weights of a model aren't read.
    """
    require_same_names(left.header, right.header)
    if tolerance:
        require_weights("--tolerance", left.header, right.header)
    checks = checks or (SourceCheck(), SourceCheck())
    in_left = dict(left.tensors())
    in_right = dict(right.tensors())
    slots = _compared_slots(in_left, in_right)
    keys = [key for key in in_left | in_right if key.slot in slots]

    def compare(key: Key) -> Difference | None:
        return _compare(key, in_left, in_right, advance, checks)

    with thread_pool(workers) as pool:
        differences = [item for item in pool.map(compare, keys) if item is not None]
    for check in checks:
        check.require_intact()
    beyond = [item for item in differences if not _is_within(item, tolerance)]
    return Diff(
        tensors=len(keys),
        differences=tuple(beyond),
        config=tuple(config_differences(left.header.config, right.header.config)),
        slots=slots,
        within=len(differences) - len(beyond),
    )


def _compared_slots(left: Collection[Key], right: Collection[Key]) -> tuple[str, ...]:
    """Weights, and the slots that both sides have."""
    shared = {key.slot for key in left} & {key.slot for key in right}
    return (WEIGHT, *(slot for slot in SLOTS if slot in shared))


def _is_within(difference: Difference, tolerance: float) -> bool:
    """True if only values differ, by no more than a tolerance that was given."""
    if not tolerance or difference.max_abs is None:
        return False
    return difference.max_abs <= tolerance


def diff_metadata(left: Source, right: Source) -> Diff:
    """Compare names, shapes and dtypes. Reads no tensor. Raises UnknownFamily if only one model has a family."""
    require_same_names(left.header, right.header)
    ours = {key: info for key, info in left.header.manifest.items() if key.slot == WEIGHT}
    theirs = {key: info for key, info in right.header.manifest.items() if key.slot == WEIGHT}
    found = [
        item
        for key in (ours | theirs)
        if (item := _compare_infos(key, ours.get(key), theirs.get(key))) is not None
    ]
    config = tuple(config_differences(left.header.config, right.header.config))
    return Diff(len(ours | theirs), tuple(found), config)


def _compare_infos(
    key: Key, left: TensorInfo | None, right: TensorInfo | None
) -> Difference | None:
    if left is None or right is None:
        only = left if right is None else right
        assert only is not None
        kind = "only in A" if right is None else "only in B"
        return Difference(key, kind, f"{list(only.shape)} {only.dtype}")
    if left.shape != right.shape:
        return Difference(key, "shape", f"{list(left.shape)} / {list(right.shape)}")
    if left.dtype != right.dtype:
        return Difference(key, "dtype", f"{left.dtype} / {right.dtype}")
    return None


def _compare(
    key: Key,
    in_left: Mapping[Key, LazyTensor],
    in_right: Mapping[Key, LazyTensor],
    advance: Callable[[int], None],
    checks: tuple[SourceCheck, SourceCheck],
) -> Difference | None:
    left, right = in_left.get(key), in_right.get(key)
    described = _compare_infos(
        key,
        *(
            None if one is None else TensorInfo(tuple(one.shape), one.dtype)
            for one in (left, right)
        ),
    )
    if described is not None or left is None or right is None:
        return described
    return _compare_values(key, left, right, advance, checks)


def _compare_values(
    key: Key,
    left: LazyTensor,
    right: LazyTensor,
    advance: Callable[[int], None],
    checks: tuple[SourceCheck, SourceCheck],
) -> Difference | None:
    unequal, largest = 0, 0.0
    sides = (left, right)
    have_one_shift = shift_of(left) == shift_of(right)
    hashers = [
        tensor_hasher(side) if check.expects(key) else None
        for side, check in zip(sides, checks, strict=True)
    ]
    pairs_of_blocks = zip(read_blocks(left), read_blocks(right), strict=True)
    for stored in pairs_of_blocks:
        # A record has the hash of the stored values if the canonical ones have to be rounded.
        for hasher, block in zip(hashers, stored, strict=True):
            if hasher is not None:
                hasher.update(block.reshape(-1))
        ours, theirs = stored if have_one_shift else map(_plain, sides, stored)
        if not np.array_equal(ours, theirs):
            count, distance = _distance(ours, theirs, left.dtype)
            unequal += count
            largest = max(largest, distance)
        advance(ours.nbytes)
    for check, hasher in zip(checks, hashers, strict=True):
        if hasher is not None:
            check.found(key, hasher.hexdigest())
    if not unequal:
        return None
    total = int(np.prod(left.shape, dtype=np.int64))
    return Difference(key, "values", f"{unequal:,} of {total:,} elements", largest)


def _plain(tensor: LazyTensor, block: Bytes) -> Bytes:
    """The canonical values of a tensor's block, rounded to its dtype."""
    shift = shift_of(tensor)
    return add(block, tensor.dtype, -shift) if shift else block


def _distance(
    left: "np.ndarray[Any, np.dtype[np.uint8]]",
    right: "np.ndarray[Any, np.dtype[np.uint8]]",
    dtype: str,
) -> tuple[int, float]:
    """(number of elements whose bits differ, their largest absolute difference). NaN counts as infinite."""
    a = left.reshape(-1, ITEMSIZE[dtype])
    b = right.reshape(-1, ITEMSIZE[dtype])
    differ = (a != b).any(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        ours = numbers(a[differ].reshape(-1), dtype)
        theirs = numbers(b[differ].reshape(-1), dtype)
        distance = np.abs(ours - theirs)
    without_nan = np.nan_to_num(distance, nan=np.inf, posinf=np.inf)
    return int(differ.sum()), float(without_nan.max(initial=0))
