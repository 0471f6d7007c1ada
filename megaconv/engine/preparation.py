"""Prepares a conversion: its report before the first byte is written, and its opened source."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from formats.stores.addresses import is_store
from formats.tensor import ITEMSIZE
from megaconv import registry
from megaconv.engine.adapted import adapted
from megaconv.engine.averaging import averaged, notice_of_average
from megaconv.engine.calibrated_weights import require_same_weights
from megaconv.engine.carried_optimizer import reason_to_leave_out, with_trained_weights
from megaconv.engine.changes import changes_of
from megaconv.engine.chosen_layers import with_layers
from megaconv.engine.completeness import missing_parts, tokens_without_rows
from megaconv.engine.coverage import require_complete
from megaconv.engine.derived import chain_of, first_of, origins_of
from megaconv.engine.early_check import refuse_sizes
from megaconv.engine.fingerprints import combine
from megaconv.engine.kept_channels import with_kept_channels
from megaconv.engine.kept_experts import with_kept_experts
from megaconv.engine.lineage import lineage_of, source_name
from megaconv.engine.new_vocabulary import with_vocabulary
from megaconv.engine.opening import description_of, open_source
from megaconv.engine.plan import OutputPlan, default_workers, memory_needed
from megaconv.engine.provenance import earlier_adapters, other_bases, refuse_again
from megaconv.engine.record import record_json
from megaconv.engine.refusals import refuse_options, refuse_source
from megaconv.engine.report import Report
from megaconv.engine.sidecars import (
    code_left_out,
    modules_left_out,
)
from megaconv.engine.source_check import SourceCheck, check_source, require_own_base
from megaconv.engine.upcycling import with_experts
from megaconv.errors import UnknownFamily, UsageError
from megaconv.input import Input
from megaconv.loader import Loader
from megaconv.model.ir import Header, Key, Source
from megaconv.options import (
    DIST_FILES,
    ConvertOptions,
    LoadOptions,
    SaveOptions,
)
from megaconv.saver import Saver
from megaconv.values.cast import CastSource, dtype_name
from megaconv.values.shifted import PlainSource

if TYPE_CHECKING:
    from megaconv.adapters.merging import MergedSource
    from megaconv.values.stored_forms import StoredSource


def open_input(
    found: Input, saver: Saver, options: ConvertOptions
) -> tuple[Source, Mapping[str, str]]:
    """(the source as a conversion reads it, the saver's own options). Raises CheckpointError."""
    load = load_options(saver, options)
    load = replace(load, config=description_of(load.config))
    takers: dict[str, Loader | Saver] = {
        f"loader {found.loader.name}": found.loader,
        f"saver {saver.name}": saver,
    }
    read, written = registry.share_options(options.all_extra(), takers)
    try:
        if not options.derives_model:  # otherwise the sizes are those of the output
            refuse_sizes(saver, found.place, load, options.save)
        load = replace(load, extra=read)
        return _computed(open_source(found, load), found, load, options), written
    except UnknownFamily as error:
        if saver.keeps_names or not found.loader.keeps_names:
            raise
        raise UnknownFamily(
            f"{error}. --saver hf or dcp copies it under its own names", code=error.code
        ) from error


def _computed(source: Source, found: Input, load: LoadOptions, options: ConvertOptions) -> Source:
    """The source, averaged with others, with its chosen channels, experts, layers, new experts and vocabulary. Each only if asked for."""
    if options.averaged:
        source = averaged(source, found, load, options)
    if options.keep_channels is not None:
        _refuse_together("--keep-channels", "channels", options)
        source = with_kept_channels(source, options.keep_channels, found.given)
    if options.keep_experts is not None:
        _refuse_together("--keep-experts", "experts", options)
        source = with_kept_experts(source, options.keep_experts, found.given)
    if options.layers is not None:
        _refuse_together("--layers", "layers", options)
        source = with_layers(source, options.layers, found.given)
    if options.upcycling.experts is not None:
        _refuse_together("--num-experts", "layers", options)
        source = with_experts(source, found, load, options)
    if options.vocabulary.is_given:
        _refuse_together(options.vocabulary.asked, "tokens", options)
        source = with_vocabulary(source, options.vocabulary, found.given)
    return source


def _refuse_together(asked: str, parts: str, options: ConvertOptions) -> None:
    """Raises UsageError for options that need the parts that the input has."""
    if options.adapters:
        raise UsageError(f"{asked} and --adapter are two conversions: merge the adapter first")
    if options.save.base is not None:
        raise UsageError(
            f"{asked} and --base: the original has other {parts} than the output; leave --base out"
        )


def prepare(
    found: Input, save_dir: str | Path, saver: Saver, options: ConvertOptions, processes: int = 1
) -> tuple[Source, Report]:
    """The source and the planned report: all work, and all errors, that can come before the first byte is written.

    processes: the number of processes that write together, each its own files.
    """
    refuse_options(saver, options.save)
    _refuse_unused_method(options)
    opened, extra = open_input(found, saver, options)
    reason = reason_to_leave_out(opened.header, saver, options)
    if reason is not None:
        # Only the opened source shows the reason. The source is opened again, without optimizer state.
        opened, extra = open_input(found, saver, replace(options, optimizer=False))
    refuse_source(opened.header, found, saver, options)
    options = with_trained_weights(opened.header, saver, options)
    files = options.save.files or max(DIST_FILES, processes)
    save = replace(options.save, files=files, extra=extra)
    streamed = _streamed(opened, saver, options, save, processes)
    require_same_weights(found.given, opened, options, workers_of(options))
    header = streamed.source.header
    altered = streamed.altered | opened.header.read_otherwise
    check = _checked(found, opened, header, altered, options)
    if check.unlike and not options.averaged:  # averaged() has compared each model
        require_own_base(found, first_of(opened), workers_of(options))
    plan = saver.plan(header, save)
    notices = _notices(opened, reason, found, options)
    plan = replace(plan, notices=(*notices, *plan.notices))
    require_complete(plan, header.manifest)
    target = str(save_dir) if is_store(str(save_dir)) else Path(save_dir)
    report = _report(found, target, saver, options, streamed, plan, check)
    report = replace(report, changes=changes_of(found.given, opened, options))
    if processes > 1:
        # Each process reads a part of the weights, and some weights are read twice: none of them knows the error.
        report = replace(report, rounding=None)
    return streamed.source, report


def _refuse_unused_method(options: ConvertOptions) -> None:
    if not options.averaged and not options.average_method.is_usual:
        raise UsageError(
            f"--method {options.average_method.method}: has no effect without --average; leave it out"
        )


def _notices(
    opened: Source, reason: str | None, found: Input, options: ConvertOptions
) -> Iterator[str]:
    """Notices for the user. reason: the reason why optimizer state is left out, if it is."""
    if options.averaged:
        yield notice_of_average(found.given, options)
    yield from (notice for each in reversed(chain_of(opened)) for notice in each.notices)
    unknown = opened.header.config.own_names
    if unknown is not None:
        yield f"tensors keep their names and shapes: {unknown.why}"
    if reason is not None:
        yield f"optimizer state: {reason}"


class _Streamed(NamedTuple):
    """The source as its tensors pass the stream, and the parts of it that change values."""

    source: Source
    parameters: int
    merged: "MergedSource | None"
    stored: "StoredSource | None"
    rounded: frozenset[Key]
    """The tensors with a shift whose canonical values may be rounded."""

    @property
    def read_header(self) -> Header:
        """The header for readers of the output."""
        if self.stored is not None and self.stored.is_quantized:
            return self.stored.read_header
        return self.source.header

    @property
    def altered(self) -> frozenset[Key]:
        """The tensors whose values differ from the source's."""
        merged = self.merged.changed if self.merged is not None else frozenset()
        stored = self.stored.changed if self.stored is not None else frozenset()
        return merged | stored | self.rounded


def _streamed(
    source: Source, saver: Saver, options: ConvertOptions, save: SaveOptions, processes: int
) -> _Streamed:
    """The source as the output stores it: fitted, merged, cast, canonical, in the saver's forms. Each only if needed."""
    if source.header.adapter is not None and saver.fit_adapter is not None:
        source = saver.fit_adapter(source, save)
    source, merged = _merged_and_cast(source, options)
    may_round = "out_norm" in save.allow_lossy
    rounded = frozenset(source.header.shifts if may_round else ())
    if may_round or not saver.holds_shifted:
        source = PlainSource(source, exact=not may_round)
    parameters = source.header.parameters
    source, stored = _in_stored_forms(source, saver, options, save, processes)
    return _Streamed(source, parameters, merged, stored, rounded)


def _checked(
    found: Input, opened: Source, streamed: Header, altered: frozenset[Key], options: ConvertOptions
) -> SourceCheck:
    """The comparison of the source with its own record, unless the user has switched it off."""
    if not options.check_source:
        return SourceCheck()
    origins = origins_of(opened)
    is_overridden = options.load.config is not None or options.load.true_vocab_size is not None
    return check_source(
        found.place,
        first_of(opened),
        {origins.get(key, key): info for key, info in streamed.manifest.items()},
        other_shapes=is_overridden,
        other_dtypes=options.dtype is not None,
        altered={origins.get(key, key) for key in altered},
        origins=origins,
    )


def _report(
    found: Input, save_dir: Path | str, saver: Saver, options: ConvertOptions, streamed: _Streamed, plan: OutputPlan,
    check: SourceCheck,
) -> Report:  # fmt: skip
    header = streamed.read_header
    adapters, merging = _adapters(found, streamed.merged, header, check)
    rounding = None
    if streamed.stored is not None and streamed.stored.is_quantized:
        rounding = streamed.stored.errors
    added = [] if streamed.merged is None else [each.to_json() for each in streamed.merged.merged]
    lineage = lineage_of(found, saver, options, header.revision, added)
    blank = combine(dict.fromkeys(header.manifest, "0" * 64))
    record = record_json(
        source_name(found.given),
        saver.name,
        header,
        plan,
        blank,
        adapters,
        options.save.quantize,
        lineage.provenance,
    )
    described = description_of(options.load.config) or found.place
    has_base = options.save.base is not None
    return Report(
        header=header,
        plan=plan,
        target=save_dir,
        memory=memory_needed(options.max_memory, workers_of(options)),
        record_bytes=len(record),
        parameters=streamed.parameters,
        code=() if isinstance(described, str) else code_left_out(described),
        modules=() if isinstance(described, str) else modules_left_out(described),
        tokenizer=tokens_without_rows(streamed.source.header),
        missing=() if has_base else missing_parts(streamed.source.header, plan),
        check=check,
        adapters=adapters,
        merging=merging,
        lineage=lineage,
        rounding=rounding,
    )


def _adapters(
    found: Input, merged: "MergedSource | None", header: Header, check: SourceCheck
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """(all adapters in the weights, notices about those that this conversion merges). Raises UsageError."""
    earlier = earlier_adapters(check.record)
    if merged is None:
        return earlier, ()
    added = [each.to_json() for each in merged.merged]
    refuse_again(found.given, earlier, added)
    warnings = other_bases(merged.merged, found.given, found.place, header.config.hf, check.record)
    return (*earlier, *added), (*merged.notices, *warnings)


def _merged_and_cast(
    source: Source, options: ConvertOptions
) -> tuple[Source, "MergedSource | None"]:
    """(the source with its adapters merged, in the requested dtype; the part of it that merges, or None).

    Adapters are merged in the wider of the two dtypes, so that nothing is rounded before the addition.
    """
    cast = None if options.dtype is None else dtype_name(options.dtype)
    overflow = "overflow" in options.save.allow_lossy
    if not options.adapters:
        return (source if cast is None else CastSource(source, cast, overflow)), None
    from megaconv.adapters.low_rank import FLOATS

    if cast is None:
        merged = adapted(source, options.adapters, overflow=overflow)
        return merged, merged
    # Tensors of a model may differ: MXFP4 is read in the requested dtype, and other weights have their own.
    dtypes = {info.dtype for info in source.header.manifest.values()} & set(FLOATS)
    if any(ITEMSIZE[cast] > ITEMSIZE[dtype] for dtype in dtypes):
        wider = CastSource(source, cast, overflow)
        merged = adapted(wider, options.adapters, overflow=overflow)
        return merged, merged
    merged = adapted(source, options.adapters, overflow=overflow)
    return CastSource(merged, cast, overflow), merged


def _in_stored_forms(
    source: Source, saver: Saver, options: ConvertOptions, save: SaveOptions, processes: int
) -> "tuple[Source, StoredSource | None]":
    """(the source as the output stores it, the StoredSource among its parts or None). The saver's `forms` decides."""
    if saver.forms is None:
        return source, None
    if options.verify and not saver.reads_back and saver.read_back is None:
        raise UsageError(
            f"--verify: --saver {saver.name} stores other values than are read from its outputs, and has no way to read them as stored; "
            "leave it out"
        )
    if save.quantize and processes > 1:
        raise UsageError(
            "--quantize: one process must read all weights to measure the rounding error; start only one process"
        )
    forms = saver.forms(source.header, save)
    if not forms:
        return source, None
    from megaconv.values.stored_forms import StoredSource

    stored = StoredSource(source, forms, overflow="overflow" in save.allow_lossy)
    return stored, stored


def load_options(saver: Saver, options: ConvertOptions) -> LoadOptions:
    """The options for reading the source.

    Raises UsageError if --optimizer is given and the output can't hold its state.
    """
    can_hold = saver.holds_optimizer
    if options.optimizer and (not can_hold or options.save.release):
        what = "a release checkpoint" if can_hold else f"--saver {saver.name}"
        raise UsageError(
            f"--optimizer: {what} can't hold optimizer state; leave it out to convert the weights alone",
            code="no-optimizer",
        )
    if options.optimizer and options.computes_weights:
        raise UsageError(
            "--optimizer: the optimizer state would not match the computed weights; leave out --optimizer, or --adapter, --average, "
            "--keep-experts, --keep-channels, --layers, --num-experts, --vocab-size and --tokenizer"
        )
    is_wanted = (
        can_hold
        and options.optimizer is not False
        and not options.save.release
        and not options.computes_weights
    )
    dtype = None if options.dtype is None else dtype_name(options.dtype)
    if dtype == "float16":
        # Cast quantized weights via float32, so that a value too large for float16 is detected.
        dtype = "float32"
    # An adapter of a multimodal model is merged by the names of its modules.
    holds_whole = saver.holds_whole and not options.adapters
    return replace(
        options.load,
        optimizer=is_wanted,
        dtype=dtype,
        own_names=saver.keeps_names,
        whole=holds_whole or not saver.keeps_names,
    )


def workers_of(options: ConvertOptions) -> int:
    return options.workers or default_workers(writing=True)
