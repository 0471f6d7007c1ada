"""Models that are made of another model's tensors: of some of its layers, with other tokens, with experts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from formats.wording import counted
from megaconv.errors import UnsupportedInput, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key, Source, TensorInfo, main_dtype
from megaconv.options.kept_file import Kept


@runtime_checkable
class DerivedSource(Source, Protocol):
    """A model that is made of another one's tensors."""

    @property
    def whole(self) -> Source:
        """The model that it is made of."""
        ...

    @property
    def origins(self) -> Mapping[Key, Key]:
        """Tensors that have another name than in that model -> their name there."""
        ...

    @property
    def notices(self) -> Sequence[str]:
        """Lines for people: how it differs from that model."""
        ...


def require_known(header: Header, place: str, asked: str) -> None:
    """Raise UnsupportedInput for a model of which nothing can be derived. asked: the option, for the message."""
    if header.adapter is not None:
        raise UnsupportedInput(f"{asked}: {place} is an adapter; expected a model")
    if header.config.own_names is not None:
        reason = header.config.own_names.reason
        raise UnsupportedInput(f"{asked}: needs a model of a known family; {reason}")


def require_language_model(header: Header, place: str, asked: str) -> None:
    """Raise UnsupportedInput for all but a known language model. Parameters: as above."""
    require_known(header, place, asked)
    if header.config.whole is not None:
        raise UnsupportedInput(f"{asked}: {place} is a multimodal model; add --text-only")


def require_within(kept: Kept, count: int, part: str, asked: str, place: str) -> None:
    """Raise UsageError for a number that there isn't. count: of all parts. part: such as `expert`. Others: as above."""
    for name, numbers in kept.items():
        if max(numbers) >= count:
            raise UsageError(
                f"{asked}: {name} of {place} has no {part} {max(numbers)!s:.20}; its {part}s are 0 to {count - 1}"
            )


def same_number(kept: Kept, part: str, asked: str) -> int:
    """The number of parts that all keep. Raises UsageError if the numbers differ. Parameters: as above."""
    by_size = sorted(kept, key=lambda name: len(kept[name]))
    least, most = by_size[0], by_size[-1]
    few, many = len(kept[least]), len(kept[most])
    if few < many:
        raise UsageError(
            f"{asked}: {least} keeps {counted(few, part)} and {most} {many}; all must keep the same number"
        )
    return few


def derived_header(
    header: Header,
    config: ModelConfig,
    manifest: Mapping[Key, TensorInfo],
    origins: Mapping[Key, Key],
    altered: Collection[Key] = (),
) -> Header:
    """The header of a model that is made of another one's tensors. header: of that one.

    manifest, origins: of the made model; see DerivedSource. altered: tensors that get other values.
    """
    sources = {key: origins.get(key, key) for key in manifest}
    kept = {key for key, origin in sources.items() if origin in header.read_otherwise}
    shifts = {
        key: header.shifts[origin] for key, origin in sources.items() if origin in header.shifts
    }
    return replace(
        header,
        # transformers loads all weights in this dtype. That of the other model might round most of those that stay.
        config=replace(config, dtype=main_dtype(manifest)),
        manifest=manifest,
        shifts=shifts,
        read_otherwise=frozenset((*kept, *altered)),
    )


def chain_of(source: Source) -> list[DerivedSource]:
    """The derived models that a source is a chain of, the last one first."""
    found = []
    while isinstance(source, DerivedSource):
        found.append(source)
        source = source.whole
    return found


def first_of(source: Source) -> Source:
    """The model at the beginning of a chain of derived models."""
    chain = chain_of(source)
    return chain[-1].whole if chain else source


def origins_of(source: Source) -> dict[Key, Key]:
    """Tensors of a source that have another name in the first model of its chain -> their name there."""
    found = {key: key for key in source.header.manifest}
    for each in chain_of(source):
        found = {key: each.origins.get(origin, origin) for key, origin in found.items()}
    return {key: origin for key, origin in found.items() if key != origin}
