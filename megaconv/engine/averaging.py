"""A source whose weights are the average of several models', for --average. The models may have different formats and layouts."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from formats.tensor import LazyTensor
from megaconv.engine.opening import open_source
from megaconv.engine.plan import default_workers
from megaconv.engine.source_check import require_own_base
from megaconv.errors import TensorMismatch, UnsupportedInput, UsageError
from megaconv.input import Input, find_input
from megaconv.model.check import same_names
from megaconv.model.fields import NOT_COMPUTED
from megaconv.model.ir import Header, Key, Source
from megaconv.model.meaning import config_differences
from megaconv.options import ConvertOptions, LoadOptions
from megaconv.options.averaging import OF_DIFFERENCES, SLERP, AverageMethod
from megaconv.options.model_shares import shares_of, weights_of
from megaconv.values.averaged import AveragedTensor
from megaconv.values.blending import blend_of
from megaconv.values.cast import CastSource
from megaconv.values.shifted import PlainSource

_log = logging.getLogger("megaconv")


@dataclass(frozen=True)
class AveragedSource:
    """The blended weights of several models. Everything but the weights is the first model's."""

    sources: Sequence[Source]
    shares: Sequence[float]
    """One for each source, or one for each but the first (blend_of)."""
    method: AverageMethod
    overflow: bool = False
    """True to accept weights that become infinite."""

    @property
    def header(self) -> Header:
        header = self.sources[0].header
        return replace(header, read_otherwise=frozenset(header.manifest))

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        others = [dict(source.tensors()) for source in self.sources[1:]]
        for key, tensor in self.sources[0].tensors():
            rest = tuple(found[key] for found in others)
            blend = blend_of(self.method, self.shares, (tensor, *rest), str(key))
            yield key, AveragedTensor(tensor, rest, blend, str(key), self.overflow)


def averaged(
    source: Source, found: Input, load: LoadOptions, options: ConvertOptions
) -> AveragedSource:
    """Open the models of --average, and average them with the opened input.

    load: the options that the input was opened with. Raises TensorMismatch for models of different tensors,
    UnsupportedInput for adapters and for quantized weights that aren't read, UsageError, ModelsDiffer for a patch on another
    base.
    """
    shares = _shares(options)
    opened: list[Source] = [source]
    _require_weights(found.given, source.header)
    _require_own_base(found, source, options)
    for each in options.averaged:
        other = _open(each.place, load, options)
        _require_weights(each.place, other.header)
        _require_alike(found.given, source.header, each.place, other.header)
        _tell_of_settings(found.given, source.header, each.place, other.header)
        opened.append(other)
    if options.dtype is not None:
        # The conversion casts the average to this dtype. Rounded to the models' dtype first, it would be rounded twice.
        opened = [CastSource(each, "float32") for each in opened]
    if _needs_plain([each.header for each in opened], options.average_method):
        opened = [PlainSource(each, exact=False) for each in opened]
    return AveragedSource(
        opened, shares, options.average_method, "overflow" in options.save.allow_lossy
    )


def _shares(options: ConvertOptions) -> tuple[float, ...]:
    """The shares of all models, or the weights of differences. Raises UsageError."""
    method, count = options.average_method.method, len(options.averaged) + 1
    if method in OF_DIFFERENCES:
        return weights_of(options.averaged, method)
    if method == SLERP and count != 2:
        raise UsageError(f"--method slerp takes two models, found {count}")
    return shares_of(options.averaged)


def _needs_plain(headers: Sequence[Header], chosen: AverageMethod) -> bool:
    """True if numbers that are added to stored values have to be taken off. An arc depends on them."""
    first = headers[0].shifts
    return any(each.shifts != first for each in headers) or (chosen.method == SLERP and bool(first))


def _open(place: str, load: LoadOptions, options: ConvertOptions) -> Source:
    """One of the other models. Raises CheckpointError."""
    found = find_input(place, options.loader, load)
    if options.resume and isinstance(found.place, str):
        raise UsageError(f"--resume: can't detect whether {place} has changed since; leave it out")
    known = {key: value for key, value in load.extra.items() if key in found.loader.options}
    source = open_source(found, replace(load, extra=known))
    _require_own_base(found, source, options)
    return source


def _require_own_base(found: Input, source: Source, options: ConvertOptions) -> None:
    if options.check_source:
        require_own_base(found, source, options.workers or default_workers(writing=False))


def notice_of_average(given: str, options: ConvertOptions) -> str:
    """A line for people: the models that are averaged, their shares, and the method if it isn't the usual one."""
    chosen, shares = options.average_method, _shares(options)
    others = [each.place for each in options.averaged]
    if chosen.method in OF_DIFFERENCES:
        return f"{given} plus differences by {chosen.method}: {_listed(others, shares)}, density {chosen.density:g}"
    by = "" if chosen.is_usual else f" by {chosen.method}"
    return f"average{by} of {_listed([given, *others], shares)}"


def _listed(places: Sequence[str], shares: Sequence[float]) -> str:
    return ", ".join(f"{place} ({share:.4g})" for place, share in zip(places, shares, strict=True))


def _require_weights(place: str, header: Header) -> None:
    """Raise UnsupportedInput for a source that has no weights to average."""
    if header.adapter is not None:
        raise UnsupportedInput(
            f"{place}: is an adapter; whole models are averaged. Merge it first: megaconv merge BASE {place} --save-dir OUT"
        )
    unknown = header.config.own_names
    if unknown is not None and unknown.stays_quantized:
        raise UnsupportedInput(f"{place}: can't be averaged; {unknown.reason}")


def _require_alike(given: str, ours: Header, place: str, theirs: Header) -> None:
    """Raise TensorMismatch unless two models have the same names and shapes."""
    same_names(list(map(str, ours.manifest)), list(map(str, theirs.manifest)), f"--average {place}")
    for key, info in ours.manifest.items():
        shape = theirs.manifest[key].shape
        if shape != info.shape:
            raise TensorMismatch(
                f"--average {place}: {key} has the shape {list(shape)}, and {given} has {list(info.shape)}; only models of the same "
                "shapes can be averaged"
            )


def _tell_of_settings(given: str, ours: Header, place: str, theirs: Header) -> None:
    """Warn of each setting in which a model differs from the first one, whose settings the output has."""
    for name, kept, other in config_differences(ours.config, theirs.config):
        if name not in NOT_COMPUTED:
            _log.warning(
                "%s says %s = %s, %s says %s; the output has the former",
                given,
                name,
                kept,
                place,
                other,
            )
