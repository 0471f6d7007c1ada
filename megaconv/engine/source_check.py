"""Compares a source with its own megaconv.json, to find out whether it is still what was written.

The fingerprints of an output with other stored values than readers get (GGUF) are of the stored values. Such tensors
are read as they are stored.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from formats.wording import are, counted, listing
from megaconv import registry
from megaconv.engine.fingerprints import Fingerprint, fingerprint_source
from megaconv.engine.plan import default_workers
from megaconv.engine.reading_back import Stored
from megaconv.engine.record import RECORD_NAME, Record, digest, find_record
from megaconv.errors import CorruptCheckpoint, ModelsDiffer
from megaconv.families import has_text_only
from megaconv.families.parts.own_names import OWN_NAMES
from megaconv.hub import Place
from megaconv.input import Input
from megaconv.model.beside import BESIDE
from megaconv.model.ir import WEIGHT, Header, Key, OpenedSource, Source, TensorInfo
from megaconv.model.training import MASTER
from megaconv.options import LoadOptions

PATCH = "delta"
"""The saver in the record of a patch. Its tensors follow from the base that the user names."""

ACCEPTED = "--no-check-source accepts it"


def as_stored(place: Place, record: Record) -> Stored | None:
    """The source with its stored values and names, for an output that readers may get with others; None for other outputs.

    Raises CheckpointError for a source that can't be such an output any more.
    """
    if record.saver not in registry.SAVERS or not isinstance(place, Path):
        return None
    if record.family == OWN_NAMES:
        # A multimodal model was written by its tensors' own names, and readers know its parts.
        by_own_names = LoadOptions(optimizer=False, own_names=True, whole=False)
        source = registry.loader(record.saver).open(place, by_own_names)
        return Stored(OpenedSource(source.header, dict(source.tensors())), {})
    reader = registry.saver(record.saver).as_stored
    return None if reader is None else reader(place)


def differing(place: Place, record: Record, header: Header) -> dict[str, str]:
    """Tensors whose name or shape differs from the record, and files that are `changed`.

    A file is `changed` if it describes another model.
    """
    stored = as_stored(place, record)
    manifest = header.manifest if stored is None else stored.source.header.manifest
    return record.other_tensors(manifest) | changed_descriptions(record, stored)


def changed_descriptions(record: Record, stored: Stored | None) -> dict[str, str]:
    """Weight files that are `changed`, because their description of the model differs from the record."""
    now = (
        {}
        if stored is None
        else {name: digest(content) for name, content in stored.descriptions.items()}
    )
    return {
        name: "changed" for name, was in record.descriptions.items() if now.get(name, was) != was
    }


def _as_recorded(place: Place, record: Record) -> Stored | None:
    """A multimodal model that is read by its own names, by the names of its record; None if these are its own names too.

    The record is of the whole model, or of the language model that --base put back into its original.
    """
    if record.family == OWN_NAMES or record.saver not in registry.SAVERS:
        return None
    if not isinstance(place, Path) or not has_text_only(place):
        return None
    holds_parts = any(name.startswith(BESIDE) for name in record.tensors)
    options = LoadOptions(optimizer=False, text_only=not holds_parts)
    source = registry.loader(record.saver).open(place, options)
    return Stored(OpenedSource(source.header, dict(source.tensors())), {})


@dataclass
class SourceCheck:
    """A source's record, compared with the tensors that are read from the source."""

    record: Record | None = None
    unlike: frozenset[str] = frozenset()
    """Tensors that can't be compared, because they were requested in another dtype or with another vocabulary."""
    masters: frozenset[Key] = frozenset()
    """Weights that are read from the optimizer's fp32 weights, which the record lists as masters."""
    notices: tuple[str, ...] = ()
    """Notices for the user about the source's small files."""
    stored: Source | None = None
    """The same tensors as they are stored, if readers get other values. They are read in addition."""
    damaged: list[str] = field(default_factory=list)
    remedy: str = ACCEPTED
    """The end of the message about a difference."""
    origins: Mapping[Key, Key] = field(default_factory=dict)
    """Tensors that have another name than in the source -> those of the source."""

    def expects(self, key: Key) -> str | None:
        """The recorded fingerprint of a tensor that is read as it was written, otherwise None."""
        key = self.origins.get(key, key)
        if self.record is None or self.stored is not None:
            return None
        if key in self.masters:
            return self.record.tensors.get(str(key._replace(slot=MASTER)))
        return None if str(key) in self.unlike else self.record.tensors.get(str(key))

    def found(self, key: Key, fingerprint: str) -> None:
        """Compare one tensor's fingerprint. Any thread may call this."""
        if self.expects(key) not in (None, fingerprint):
            self.damaged.append(str(self.origins.get(key, key)))

    def compare(self, fingerprint: Fingerprint) -> None:
        """Raises CorruptCheckpoint if the source has changed since it was written, ModelsDiffer for a patch on another base."""
        for key, now in fingerprint.tensors.items():
            self.found(key, now)
        self.require_intact()

    def require_intact(self) -> None:
        """Raises CorruptCheckpoint, or ModelsDiffer for a patch. Both name the tensors that differ from the record."""
        self._read_stored()
        damaged = sorted(set(self.damaged))
        if self.record is not None and damaged:
            _refuse(
                self.record,
                f"{counted(len(damaged), 'tensor')} with other values than were written: {listing(damaged)}",
                self.remedy,
            )

    def _read_stored(self) -> None:
        if self.record is None or self.stored is None:
            return
        recorded = self.record.tensors
        wanted = [
            key
            for key in self.stored.header.manifest
            if str(key) in recorded and str(key) not in self.unlike
        ]
        found = fingerprint_source(
            self.stored, default_workers(writing=False), only=frozenset(wanted)
        )
        self.damaged += (
            str(key) for key, now in found.tensors.items() if recorded[str(key)] != now
        )


def check_source(
    place: Place,
    source: Source,
    streamed: Mapping[Key, TensorInfo] | None = None,
    *,
    other_shapes: bool = False,
    other_dtypes: bool = False,
    altered: Collection[Key] = (),
    origins: Mapping[Key, Key] | None = None,
    remedy: str = ACCEPTED,
) -> SourceCheck:
    """Compare an opened source with its record, if it has one. Raises CorruptCheckpoint if names or shapes differ.

    streamed: the tensors in the requested dtypes. other_shapes: True if the user has given the vocabulary's size.
    other_dtypes: True if the user has given a dtype, which readers of quantized weights dequantize to.
    altered: tensors that something else is merged into. origins: tensors that are streamed under other names -> those of
    the source; streamed and altered have the source's. remedy: the end of the message about a difference.
    """
    record = find_record(place)
    if record is None:
        return SourceCheck()
    by_own_names = source.header.config.own_names is not None
    stored = (_as_recorded if by_own_names else as_stored)(place, record)
    written = source.header.manifest if stored is None else stored.source.header.manifest
    differing = record.other_tensors(written)
    masters = _read_from_masters(record, written) if other_dtypes else frozenset()
    refused = _unexplained(
        record, differing, written, masters, shapes=other_shapes, dtypes=other_dtypes
    )
    _require_none([f"{name} {differing[name]}" for name in refused], record, remedy)
    described = changed_descriptions(record, stored)
    if described:
        _refuse(record, f"the metadata in {listing(sorted(described))} are not as written", remedy)
    unlike, uncast = frozenset(differing), masters
    if stored is None:
        cast = frozenset(
            key
            for key, info in written.items()
            if streamed is not None and streamed.get(key) != info
        )
        unlike |= {str(key) for key in cast.union(altered)}
        uncast -= cast
    notices = tuple(
        f"{name}: {kind} since the source was written (its {RECORD_NAME} says)"
        for name, kind in record.changed_files().items()
    )
    return SourceCheck(
        record,
        unlike,
        uncast,
        notices,
        None if stored is None else stored.source,
        remedy=remedy,
        origins=origins or {},
    )


def _unexplained(
    record: Record,
    differing: Iterable[str],
    written: Mapping[Key, TensorInfo],
    masters: Iterable[Key],
    *,
    shapes: bool,
    dtypes: bool,
) -> Iterator[str]:
    """Yield the tensors whose difference the user's options don't explain.

    written: the tensors of the source. masters: those that are read from masters. shapes, dtypes: whether the user has
    given other ones.
    """
    infos = {str(key): info for key, info in written.items()}
    as_weights = {str(key._replace(slot=MASTER)) for key in masters}
    for name in differing:
        if name not in infos:
            explained = name in as_weights
        else:
            in_dtype_alone = dtypes and record.differs_in_dtype_alone(name, infos[name])
            explained = shapes or in_dtype_alone
        if not explained:
            yield name


def _require_none(refused: Sequence[str], record: Record, remedy: str) -> None:
    """Raise CorruptCheckpoint or ModelsDiffer for tensors, each with its difference, that are not as written."""
    if refused:
        number = len(refused)
        which = f"{counted(number, 'tensor')} {are(number)} not as written: {listing(refused)}"
        _refuse(record, which, remedy)


def require_own_base(found: Input, source: Source, workers: int) -> None:
    """Read all of a patch and compare it with its record. Any other input is not read.

    This is for conversions that don't pass on the values of all tensors. Raises ModelsDiffer for a patch on another base.
    """
    if found.loader.name == PATCH:
        check_source(found.place, source).compare(fingerprint_source(source, workers))


def _read_from_masters(record: Record, manifest: Mapping[Key, TensorInfo]) -> frozenset[Key]:
    """The fp32 weights whose recorded masters are missing: DeepSpeed's fp32 weights are read as the weights, if asked for."""
    weights = (
        key for key, info in manifest.items() if key.slot == WEIGHT and info.dtype == "float32"
    )
    masters = ((key, key._replace(slot=MASTER)) for key in weights)
    return frozenset(
        key for key, master in masters if str(master) in record.tensors and master not in manifest
    )


def _refuse(record: Record, what: str, remedy: str) -> None:
    if record.saver == PATCH:
        raise ModelsDiffer(
            f"{record.root}: {what}. The patch was read on another base than its own: check --option base and "
            "--option earlier, or copy the patch again",
            code="wrong-base",
        )
    raise CorruptCheckpoint(
        f"{record.root}: {what}. It was damaged or changed since ({RECORD_NAME}); {remedy}",
        code="changed-since-written",
    )
