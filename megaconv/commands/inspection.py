"""Describes a checkpoint from its metadata alone."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from formats import rank_files
from megaconv.commands.inspected import Inspection
from megaconv.engine.opening import open_source
from megaconv.engine.record import find_record
from megaconv.engine.source_check import differing
from megaconv.errors import CheckpointError
from megaconv.hub import Place
from megaconv.input import Input, find_input, input_at
from megaconv.model.ir import WEIGHT, Header
from megaconv.options import LoadOptions

if TYPE_CHECKING:
    from megaconv.commands.survey import Survey


def inspect(
    path: str | Path,
    options: LoadOptions | None = None,
    loader: str | None = None,
    *,
    check_source: bool = True,
) -> Inspection:
    """Describe a checkpoint. Reads metadata only.

    loader: a loader's name; None: the loader that recognises the input. check_source: compare names and shapes with the
    checkpoint's own record, if it has one. Raises CheckpointError.
    """
    options = replace(options or LoadOptions(), metadata_only=True)
    return _inspect(find_input(path, loader, options), options, check_source=check_source)


def look(
    path: str | Path,
    place: Place,
    options: LoadOptions,
    loader: str | None = None,
    *,
    check_source: bool = True,
) -> "Inspection | Survey":
    """Describe a checkpoint; if no loader knows its model, describe the content of its files.

    place: the resolved path. Raises CheckpointError.
    """
    try:
        return _inspect(input_at(path, place, loader, options), options, check_source=check_source)
    except CheckpointError as error:
        is_told_what_it_is = loader is not None or options.text_only
        if is_told_what_it_is or error.code == "no-such-input" or not isinstance(place, Path):
            raise
        # Imported here, because it imports every format.
        from megaconv.commands.survey import survey, survey_of

        header = _by_own_names(path, place, options)
        found = survey(place, error) or survey_of(place, header, error)
        if found is None:
            raise
        keeps_names = header is not None and header.has_weights
        return replace(found, path=str(path), keeps_names=keeps_names)


def _by_own_names(path: str | Path, place: Place, options: LoadOptions) -> Header | None:
    """The header of a model without a family, with its tensors under their own names; None if no loader reads it so."""
    looked = replace(
        options, metadata_only=True, needs_weights=False, optimizer=False, own_names=True
    )
    try:
        return open_source(input_at(path, place, None, looked), looked).header
    except CheckpointError:
        return None


def _inspect(found: Input, options: LoadOptions, *, check_source: bool) -> Inspection:
    looked = replace(options, metadata_only=True, needs_weights=False, optimizer=False)
    header = open_source(found, looked).header
    is_overridden = options.config is not None or options.true_vocab_size is not None
    is_compared = check_source and not is_overridden and header.has_weights
    record = find_record(found.place) if is_compared else None
    iterations, read_iteration = _iterations(found.place)
    return Inspection(
        path=found.given,
        loader=found.loader.name,
        header=header,
        differences=None if record is None else differing(found.place, record, header),
        disk_bytes=disk_bytes(found.place),
        optimizer_bytes=_optimizer_bytes(found, options, header),
        iterations=iterations,
        read_iteration=read_iteration,
    )


def disk_bytes(place: Place) -> int | None:
    """Size of all files of a checkpoint, without those of other iterations. None if it isn't a directory."""
    if not isinstance(place, Path) or not place.is_dir():
        return None
    version = _version(place)
    size = 0
    for entry in place.iterdir():
        if version not in (None, place, entry) and rank_files.is_version(entry.name):
            continue
        files = entry.rglob("*") if entry.is_dir() else [entry]
        size += sum(file.stat().st_size for file in files if file.is_file())
    return size


def _version(place: Path) -> Path | None:
    """The directory of the iteration that is read, according to the tracker of Megatron or Megatron-Bridge."""
    # Only such inputs need this import.
    from megaconv.megatron.distributed.run_config import latest_version

    return rank_files.find_version(place) or latest_version(place)


def _iterations(place: Place) -> tuple[tuple[str, ...], str | None]:
    """(all iterations of a run, the one that is read); empty for anything but a run's directory."""
    version = _version(place) if isinstance(place, Path) else None
    if version is None or version == place or not rank_files.is_version(version.name):
        return (), None
    return tuple(rank_files.iterations(version.parent)), version.name


def _optimizer_bytes(found: Input, options: LoadOptions, header: Header) -> int | None:
    if header.training.optimizer is None:
        return None
    try:
        looked = replace(options, metadata_only=True, needs_weights=False, optimizer=True)
        source = open_source(found, looked)
    except CheckpointError:  # a conversion reports what is wrong
        return None
    # A loader may leave out the optimizer state, for example if a run trained only a part of the model.
    return (
        sum(info.nbytes for key, info in source.header.manifest.items() if key.slot != WEIGHT)
        or None
    )
