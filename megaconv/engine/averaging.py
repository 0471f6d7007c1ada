"""A source whose weights are the average of several models', for --average. The models may have different formats and layouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from formats.tensor import LazyTensor
from megaconv.engine.other_models import (
    open_other,
    require_checked_patch,
    require_weights,
    tell_of_settings,
)
from megaconv.errors import TensorMismatch, UsageError
from megaconv.input import Input
from megaconv.model.check import same_names
from megaconv.model.ir import Header, Key, Source
from megaconv.model.shared_names import require_shared_names
from megaconv.options import ConvertOptions, LoadOptions
from megaconv.options.averaging import OF_DIFFERENCES, SLERP, AverageMethod
from megaconv.options.model_shares import ModelShare, shares_of, weights_of
from megaconv.values.averaged import AveragedTensor
from megaconv.values.blending import blend_of
from megaconv.values.cast import CastSource
from megaconv.values.shifted import PlainSource


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
    UnknownFamily for a multimodal model under its own names beside one in parts, UnsupportedInput for adapters and for
    quantized weights that aren't read, UsageError, ModelsDiffer for a patch on another base.
    """
    shares = _shares(options)
    opened: list[Source] = [source]
    require_weights(found.given, source.header, "averaged")
    require_checked_patch(found, source, options)
    if source.header.config.own_names is not None:
        load = replace(load, whole=False)  # a multimodal model by its own names, as the input
    for each in options.averaged:
        other = open_other(each.place, load, options)
        require_weights(each.place, other.header, "averaged")
        _require_alike(found.given, source.header, each.place, other.header)
        tell_of_settings(found.given, source.header, each.place, other.header)
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


def averaged_models(given: str, options: ConvertOptions) -> list[ModelShare]:
    """All models of an average with their shares. The model that differences are added to has none. given: the input."""
    shares: Sequence[float | None] = _shares(options)
    if options.average_method.method in OF_DIFFERENCES:
        shares = [None, *shares]
    places = [given, *(each.place for each in options.averaged)]
    return [ModelShare(*pair) for pair in zip(places, shares, strict=True)]


def notice_of_average(given: str, options: ConvertOptions) -> str:
    """A line for people: the models that are averaged, their shares, and the method if it isn't the usual one."""
    chosen = options.average_method
    models = averaged_models(given, options)
    listed = ", ".join(f"{place} ({share:.4g})" for place, share in models if share is not None)
    if chosen.method in OF_DIFFERENCES:
        return f"{given} plus differences by {chosen.method}: {listed}, density {chosen.density:g}"
    by = "" if chosen.is_usual else f" by {chosen.method}"
    return f"average{by} of {listed}"


def _require_alike(given: str, ours: Header, place: str, theirs: Header) -> None:
    """Raise TensorMismatch or UnknownFamily unless two models have the same names and shapes."""
    require_shared_names(given, ours, place, theirs)
    same_names(list(map(str, ours.manifest)), list(map(str, theirs.manifest)), f"--average {place}")
    for key, info in ours.manifest.items():
        shape = theirs.manifest[key].shape
        if shape != info.shape:
            raise TensorMismatch(
                f"--average {place}: {key} has the shape {list(shape)}, and {given} has {list(info.shape)}; only models of the same "
                "shapes can be averaged"
            )
