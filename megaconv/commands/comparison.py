"""Compares two checkpoints tensor by tensor, whatever their formats and layouts: canonical name, shape, dtype, value."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from formats.tensor import ITEMSIZE, LazyTensor
from megaconv import registry
from megaconv.engine.fingerprints import read_blocks, tensor_hasher
from megaconv.engine.preparation import open_source
from megaconv.engine.record import SourceCheck, check_source
from megaconv.engine.rounding import numbers
from megaconv.engine.shifted import plain
from megaconv.errors import UsageError
from megaconv.hub import Place, resolve
from megaconv.model.fields import config_differences
from megaconv.model.ir import WEIGHT, Key, Source, TensorInfo, shift_of
from megaconv.model.training import SLOTS
from megaconv.options import LoadOptions
from megaconv.threads import thread_pool


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both."""

    key: Key
    kind: str
    """`only in A`, `only in B`, `shape`, `dtype` or `values`."""
    detail: str
    max_abs: float | None = None


@dataclass(frozen=True, repr=False)
class Diff:
    """same: by tensors alone; config lists (field, in A, in B) where the configurations differ.

    differences: those beyond the tolerance, where one was given.
    """

    tensors: int
    differences: tuple[Difference, ...]
    config: tuple[tuple[str, Any, Any], ...]
    slots: tuple[str, ...] = (WEIGHT,)
    """What was compared."""
    within: int = 0
    """Tensors whose values differ by no more than the tolerance."""

    def __repr__(self) -> str:
        return f"<Diff: {len(self.differences)} of {self.tensors} tensors differ, {len(self.config)} fields of the configuration>"

    def kinds(self) -> dict[str, int]:
        """How many differences there are of each kind of tensor and kind of difference: `layers.*.attn.q.weight, values`."""
        return dict(Counter(f"{kind_of(item.key)}, {item.kind}" for item in self.differences).most_common())

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
                    "max_abs": _json_number(item.max_abs),
                }
                for item in self.differences
            ],
            "config": [{"field": name, "a": left, "b": right} for name, left, right in self.config],
        }


def kind_of(key: Key) -> str:
    """A tensor's name without its numbers: `layers.*.attn.q.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", str(key))


def _json_number(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return value if value is None or isfinite(value) else str(value)


def open_both(
    a: str | Path, b: str | Path, options: LoadOptions, loaders: tuple[str | None, str | None]
) -> tuple[Source, Source]:
    """Both checkpoints; each loader gets those of the options of its own that it knows. Raises CheckpointError.

    Of text alone one of them may be a language model by itself; UsageError where both are.
    """
    places = [resolve(place, metadata_only=options.metadata_only) for place in (a, b)]
    chosen = [registry.choose(place, name) for place, name in zip(places, loaders, strict=True)]
    takers = {f"loader {name} of {side}": found for side, (name, found) in zip("AB", chosen, strict=True)}
    extras = registry.share_options(options.extra, takers)
    sides = list(zip(places, chosen, extras, strict=True))
    wholes = [_is_whole(place, name, replace(options, extra=extra)) for place, (name, _), extra in sides]
    if options.text_only and not any(wholes):
        raise UsageError("--text-only: both are language models by themselves; leave it out")
    left, right = (
        open_source(place, name, replace(options, extra=extra, text_only=options.text_only and whole))[1]
        for (place, (name, _), extra), whole in zip(sides, wholes, strict=True)
    )
    return left, right


def _is_whole(place: Place, loader: str, options: LoadOptions) -> bool:
    """Whether it is a model that sees or hears; only looked at where text alone is asked for."""
    if not options.text_only:
        return False
    looked = replace(options, text_only=False, metadata_only=True, optimizer=False)
    return open_source(place, loader, looked)[1].header.config.whole is not None


def source_checks(a: str | Path, left: Source, b: str | Path, right: Source) -> tuple[SourceCheck, SourceCheck]:
    """What the records of two opened sources say. Raises CorruptCheckpoint where names or shapes are not as recorded."""
    return check_source(resolve(a), left.header.manifest), check_source(resolve(b), right.header.manifest)


def diff_sources(
    left: Source,
    right: Source,
    workers: int,
    advance: Callable[[int], None] = lambda count: None,
    checks: tuple[SourceCheck, SourceCheck] | None = None,
    tolerance: float = 0.0,
) -> Diff:
    """Reads both completely. Slots other than weights are compared where both sides have them.

    tolerance: values that differ by no more than this are equal.
    checks: what the sources' own records say. Raises CorruptCheckpoint where a tensor that was compared is not what its record says.
    """
    checks = checks or (SourceCheck(), SourceCheck())
    in_left, in_right = dict(left.tensors()), dict(right.tensors())
    shared = {key.slot for key in in_left} & {key.slot for key in in_right}
    slots = (WEIGHT, *(slot for slot in SLOTS if slot in shared))
    keys = [key for key in in_left if key.slot in slots]
    keys += [key for key in in_right if key.slot in slots and key not in in_left]
    with thread_pool(workers) as pool:
        found = pool.map(lambda key: _compare(key, in_left, in_right, advance, checks), keys)
        differences = tuple(item for item in found if item is not None)
    for check in checks:
        check.require_intact()
    beyond = tuple(item for item in differences if item.max_abs is None or item.max_abs > tolerance or not tolerance)
    config = tuple(config_differences(left.header.config, right.header.config))
    return Diff(len(keys), beyond, config, slots, len(differences) - len(beyond))


def diff_metadata(left: Source, right: Source) -> Diff:
    """Names, shapes and dtypes alone; reads no tensor."""
    ours = {key: info for key, info in left.header.manifest.items() if key.slot == WEIGHT}
    theirs = {key: info for key, info in right.header.manifest.items() if key.slot == WEIGHT}
    found = [
        item for key in (ours | theirs) if (item := _compare_infos(key, ours.get(key), theirs.get(key))) is not None
    ]
    config = tuple(config_differences(left.header.config, right.header.config))
    return Diff(len(ours | theirs), tuple(found), config)


def _compare_infos(key: Key, left: TensorInfo | None, right: TensorInfo | None) -> Difference | None:
    if left is None or right is None:
        only = left if right is None else right
        assert only is not None
        return Difference(key, "only in A" if right is None else "only in B", f"{list(only.shape)} {only.dtype}")
    if left.shape != right.shape:
        return Difference(key, "shape", f"{list(left.shape)} / {list(right.shape)}")
    return Difference(key, "dtype", f"{left.dtype} / {right.dtype}") if left.dtype != right.dtype else None


def _compare(
    key: Key,
    in_left: Mapping[Key, LazyTensor],
    in_right: Mapping[Key, LazyTensor],
    advance: Callable[[int], None],
    checks: tuple[SourceCheck, SourceCheck],
) -> Difference | None:
    left, right = in_left.get(key), in_right.get(key)
    described = _compare_infos(
        key, *(None if one is None else TensorInfo(tuple(one.shape), one.dtype) for one in (left, right))
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
    if shift_of(left) != shift_of(right):
        left, right = plain(key, left), plain(key, right)
    hashers = [tensor_hasher(left) if check.expects(key) else None for check in checks]
    for ours, theirs in zip(read_blocks(left), read_blocks(right), strict=True):
        for hasher, block in zip(hashers, (ours, theirs), strict=True):
            if hasher is not None:
                hasher.update(block.reshape(-1))
        if not np.array_equal(ours, theirs):
            count, distance = _distance(ours, theirs, left.dtype)
            unequal, largest = unequal + count, max(largest, distance)
        advance(ours.nbytes)
    for check, hasher in zip(checks, hashers, strict=True):
        if hasher is not None:
            check.found(key, hasher.hexdigest())
    if not unequal:
        return None
    total = int(np.prod(left.shape, dtype=np.int64))
    return Difference(key, "values", f"{unequal:,} of {total:,} elements", largest)


def _distance(
    left: "np.ndarray[Any, np.dtype[np.uint8]]", right: "np.ndarray[Any, np.dtype[np.uint8]]", dtype: str
) -> tuple[int, float]:
    """(elements whose bits differ, largest absolute difference of these; NaN counts as infinite)."""
    a, b = (side.reshape(-1, ITEMSIZE[dtype]) for side in (left, right))
    differ = (a != b).any(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        ours, theirs = (numbers(np.ascontiguousarray(side[differ]).reshape(-1), dtype) for side in (a, b))
        distance = np.abs(ours - theirs)
    return int(differ.sum()), float(np.nan_to_num(distance, nan=np.inf, posinf=np.inf).max(initial=0))
