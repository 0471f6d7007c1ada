"""What a conversion is asked for, what is known of it before the first byte is written, and how its source is opened."""

import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.tensor import ITEMSIZE, LazyTensor
from megaconv import registry
from megaconv.engine.cast import CastSource, dtype_name
from megaconv.engine.completeness import completeness_notices, missing_parts
from megaconv.engine.early_check import refuse_sizes
from megaconv.engine.fingerprints import Fingerprint, combine
from megaconv.engine.fp8_blocks import Rounding
from megaconv.engine.plan import OutputPlan, default_workers, memory_needed
from megaconv.engine.record import RECORD_NAME, SourceCheck, check_source, record_json
from megaconv.engine.shifted import PlainSource
from megaconv.engine.sidecars import code_left_out
from megaconv.engine.stored_forms import StoredSource
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible, UsageError
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.whole_model import named
from megaconv.hub import Place, nothing_at, resolve
from megaconv.model.ir import Header, Key, Source, main_dtype
from megaconv.options import LOSSES, AdapterChoice, LoadOptions, SaveOptions, refuse_unused

if TYPE_CHECKING:
    from megaconv.engine.adapters.merging import MergedSource


LEFT_OUT = "optimizer state was left out: only weights are converted"
BESIDE = "--text-only: left out is what lies beside the language model: {}; --base ORIGINAL puts this back into an hf output of it"
CODE_LEFT_OUT = "code is never copied: {}; put it beside the output yourself if it is needed and you trust it"


@dataclass(frozen=True)
class ConvertOptions:
    """Everything about a conversion that concerns neither loader nor saver alone."""

    loader: str | None = None
    """None: detected from the files."""
    load: LoadOptions = field(default_factory=LoadOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    dtype: str | None = None
    optimizer: bool | None = None
    """Whether the optimizer's state goes along; None: where source and output can both hold it."""
    max_memory: int = 256 << 20
    """Bytes that buffers may take."""
    workers: int = 0
    """0: as many as there are processors and one more, up to 8."""
    verify: bool = False
    resume: bool = False
    overwrite: bool = False
    check_source: bool = True
    """Whether a source that has a megaconv.json has to be what that says."""
    adapters: tuple[AdapterChoice, ...] = ()
    """Merged into the weights, in this order."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Options of the loader's and the saver's own (`--option`); each gets those that it knows."""

    def all_extra(self) -> dict[str, str]:
        """Wherever they were given."""
        return {**self.load.extra, **self.save.extra, **self.extra}


@dataclass(frozen=True, repr=False)
class Report:
    """What a conversion did, or, planned only, would do."""

    header: Header
    plan: OutputPlan
    target: Path
    memory: int
    record_bytes: int
    """Size of megaconv.json, which no plan contains since its fingerprints are known last."""
    parameters: int
    """Of the model: `header` is of what is stored, which may be blocks of bytes."""
    seconds: float = 0.0
    fingerprint: Fingerprint | None = None
    verified: bool = False
    code: tuple[str, ...] = ()
    """Python files that lie beside the source."""
    missing: tuple[str, ...] = ()
    """What an output of transformers' lacks (`engine/completeness.py`): `tokenizer`, `generation_config.json`, `eos_token_id`."""
    check: SourceCheck = field(default_factory=SourceCheck, repr=False)
    """What the source's own record says."""
    adapters: tuple[Mapping[str, Any], ...] = ()
    """Those that were merged into the weights, as megaconv.json says it."""
    merging: tuple[str, ...] = ()
    """The same for people."""
    rounding: Rounding | None = None
    """By how much quantized weights are off, where there are any: those that this run read, when it was resumed."""

    def __repr__(self) -> str:
        size = f"{self.parameters:,} parameters, {self.nbytes:,} bytes in {len(self.files)} files"
        done = "planned" if self.fingerprint is None else f"fingerprint {self.fingerprint.weights}"
        return f"<Report: {self.target}, {self.header.config.family}, {size}, {done}>"

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know about the output."""
        left_out = self.header.has_optimizer and not self.header.carries_optimizer
        code = (CODE_LEFT_OUT.format(", ".join(self.code)),) if self.code else ()
        optimizer = (LEFT_OUT,) if left_out else ()
        named = ", ".join(f"{name} ({count} tensors)" for name, count in self.header.beside.items())
        beside = (BESIDE.format(named),) if named else ()
        incomplete = completeness_notices(self.header, self.missing)
        return (*beside, *incomplete, *self.merging, *optimizer, *self.check.notices, *code, *self.plan.notices)

    @property
    def files(self) -> dict[str, int]:
        """Every file of the output, by path below the target, with its size."""
        return {name: layout.size for name, layout in sorted(self.plan.files.items())} | {
            RECORD_NAME: self.record_bytes
        }

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "target": str(self.target),
            "family": self.header.config.family,
            "parameters": self.parameters,
            "tensors": len(self.header.manifest),
            "files": self.files,
            "from_base": list(self.plan.from_base),
            "adapters": list(self.adapters),
            "bytes": self.nbytes,
            "memory_bytes": self.memory,
            "seconds": round(self.seconds, 3),
            "fingerprint": self.fingerprint.weights if self.fingerprint else None,
            "optimizer_fingerprint": self.fingerprint.optimizer if self.fingerprint else None,
            "notices": list(self.notices),
            "missing": list(self.missing),
            "verified": self.verified,
            "quantized": None if self.rounding is None else self.rounding.to_json(),
        }


def open_source(place: str | Path, loader: str | None = None, options: LoadOptions | None = None) -> tuple[str, Source]:
    """(loader name, source) of any input. loader: None: the one that recognises it. Raises CheckpointError."""
    raise_file_limit()
    options = options or LoadOptions()
    _require_description(options.config)
    path = resolve(place, metadata_only=options.metadata_only)
    name, found = registry.choose(path, loader, options.config)
    if options.text_only and not getattr(found, "HAS_TEXT_ONLY", False):
        raise UsageError(f"--text-only: {path}: --loader {name} reads language models alone; leave it out")
    registry.share_options(options.extra, {f"loader {name}": found})
    return name, LazySource(found.open(path, options))


def _require_description(config: Path | None) -> None:
    """Raises UsageError for a --config that isn't a model's Hugging Face directory."""
    if config is not None and not config.exists():
        raise UsageError(f"--config {nothing_at(config)}", code="no-such-input")
    if config is not None and not (config / CONFIG_NAME).is_file():
        raise UsageError(f"--config {config}: has no {CONFIG_NAME}; expected a model's Hugging Face directory")


def open_input(load_dir: str | Path, saver: str, options: ConvertOptions) -> tuple[Source, Mapping[str, str]]:
    """(the source as a conversion reads it, the options of the saver's own). Raises CheckpointError."""
    load = load_options(saver, options)
    place = resolve(load_dir, metadata_only=load.metadata_only)
    name, found = registry.choose(place, options.loader, load.config)
    _require_description(load.config)
    refuse_sizes(registry.saver(saver), place, load, options.save)
    takers = {f"loader {name}": found, f"saver {saver}": registry.saver(saver)}
    read, written = registry.share_options(options.all_extra(), takers)
    return open_source(place, name, replace(load, extra=read))[1], written


@dataclass(frozen=True)
class LazySource:
    """A source whose plain arrays, which a plugin may hand over, are lazy tensors too."""

    source: Source

    @property
    def header(self) -> Header:
        return self.source.header

    def tensors(self) -> Iterator[tuple[Key, LazyTensor]]:
        for key, tensor in self.source.tensors():
            yield key, as_lazy(tensor)


def prepare(
    load_dir: str | Path,
    save_dir: str | Path,
    saver: str,
    options: ConvertOptions,
    processes: int = 1,
    place: Place | None = None,
) -> tuple[Source, Report]:
    """Everything that can be known, and go wrong, before the first byte is written.

    processes: that will write it together, each with files of its own. place: what `resolve` made of load_dir, where that was
    asked already.
    """
    place = resolve(load_dir) if place is None else place
    for word in options.save.allow_lossy:
        if word not in LOSSES:
            raise UsageError(f"--allow-lossy {word!r} is not known; losses that can be allowed are {', '.join(LOSSES)}")
    uses = getattr(registry.saver(saver), "uses", None)
    if uses is not None:
        refuse_unused(saver, uses(options.save), options.save)
    source, extra = open_input(place, saver, options)
    written = source.header.manifest
    if source.header.adapter is not None:
        _refuse_as_adapter(load_dir, saver, options)
        source = _fitted(source, saver, replace(options.save, extra=extra))
    _refuse_whole(source.header, saver, options)
    if options.optimizer and not source.header.carries_optimizer:
        raise UsageError(
            f"--optimizer: {load_dir} holds no optimizer state; leave it out to convert the weights alone",
            code="no-optimizer",
        )
    if options.save.distributed_optimizer is not None and not source.header.carries_optimizer:
        raise UsageError(
            "--use-distributed-optimizer: chooses nothing, since no optimizer state is converted; leave it out",
            code="no-optimizer",
        )
    source, merged = _changed(source, options)
    files = options.save.files or workers_of(options) * processes
    rounds = "out_norm" in options.save.allow_lossy
    if rounds or not getattr(registry.saver(saver), "HOLDS_SHIFTED", False):
        source = PlainSource(source, exact=not rounds)
    parameters = source.header.parameters
    source, stored = _stored(source, saver, options, processes)
    header = stored.read_header if stored is not None and stored.is_quantized else source.header
    check = SourceCheck()
    if options.check_source:
        overridden = options.load.config is not None or options.load.true_vocab_size is not None
        altered = (merged.changed if merged else frozenset()) | getattr(source, "changed", frozenset())
        check = check_source(place, written, source.header.manifest, other_shapes=overridden, altered=altered)
    plan = registry.saver(saver).plan(source.header, replace(options.save, files=files, extra=extra))
    memory = memory_needed(options.max_memory, workers_of(options))
    blank = combine(dict.fromkeys(header.manifest, "0" * 64))
    adapters = tuple(each.to_json() for each in merged.merged) if merged else ()
    size = len(record_json(str(load_dir), saver, header, plan, blank, adapters, options.save.quantize))
    described = options.load.config or place
    code = () if isinstance(described, str) else code_left_out(described)
    missing = missing_parts(source.header, plan) if options.save.base is None else ()
    report = Report(
        header, plan, Path(save_dir), memory, size, parameters,
        code=code, missing=missing, check=check, adapters=adapters,
    )  # fmt: skip
    errors = stored.errors if stored is not None and stored.is_quantized else None
    return source, replace(report, merging=merged.notices if merged else (), rounding=errors)


def _refuse_as_adapter(load_dir: str | Path, saver: str, options: ConvertOptions) -> None:
    """Raises NotExpressible for an output that holds whole models, UsageError for options of these."""
    if not getattr(registry.saver(saver), "HOLDS_ADAPTER", False):
        raise NotExpressible(
            f"{load_dir}: is an adapter, and --saver {saver} writes whole models; --saver peft and --saver core --ckpt-format torch_dist "
            "translate it, and megaconv merge BASE ADAPTER merges one of peft's into its base"
        )
    if options.adapters:
        raise UsageError(
            f"--adapter: {load_dir} is an adapter itself; give the base it is to be merged into as --load-dir"
        )


def _fitted(adapter: Source, saver: str, options: SaveOptions) -> Source:
    """An adapter in the modules that its output's software has, where its saver says which (`fit_adapter`)."""
    fit = getattr(registry.saver(saver), "fit_adapter", None)
    if fit is None:
        return adapter
    found: Source = fit(adapter, options)
    return found


def _refuse_whole(header: Header, saver: str, options: ConvertOptions) -> None:
    """Raises UsageError for what only a language model by itself can be converted to, or with."""
    whole, hf = header.config.whole, header.layout is None
    if whole is None:
        return
    name = named(whole.config)
    alone = "; --text-only converts the language model in it" if hf else ""
    if not getattr(registry.saver(saver), "HOLDS_WHOLE", False):
        raise UsageError(f"--saver {saver}: can't hold {name}, which sees or hears, as a whole{alone}")
    if options.save.base is not None:
        raise UsageError(f"--base: the source holds all of {name}; leave it out")
    for option, given in (("--adapter", options.adapters), ("--quantize", options.save.quantize)):
        if given:
            raise UsageError(f"{option}: is not supported for {name}, which sees or hears, as a whole{alone}")


def _changed(source: Source, options: ConvertOptions) -> tuple[Source, "MergedSource | None"]:
    """(the source with its adapters merged, in the dtype asked for; its part that merges, if there is any).

    Adapters are merged in the wider of the two dtypes: nothing is rounded that is to be added to.
    """
    cast = None if options.dtype is None else dtype_name(options.dtype)
    overflow = "overflow" in options.save.allow_lossy
    if not options.adapters:
        return (source if cast is None else CastSource(source, cast, overflow)), None
    widens = cast is not None and ITEMSIZE[cast] > ITEMSIZE[main_dtype(source.header.manifest)]
    from megaconv.engine.adapters.merging import merge

    merged = merge(CastSource(source, cast, overflow) if cast and widens else source, options.adapters)
    return (CastSource(merged, cast, overflow) if cast and not widens else merged), merged


def _stored(source: Source, saver: str, options: ConvertOptions, processes: int) -> tuple[Source, StoredSource | None]:
    """(as the output stores it; the same where its saver says how, by `forms`)."""
    found = registry.saver(saver)
    forms = getattr(found, "forms", None)
    if forms is None:
        return source, None
    if options.verify and not (getattr(found, "READS_BACK", False) or hasattr(found, "read_back")):
        raise UsageError(
            f"--verify: --saver {saver} stores other values than are read from its outputs, and has no way to read them as stored; "
            "leave it out"
        )
    if options.save.quantize and processes > 1:
        raise UsageError("--quantize: one process has to see all weights, to say how far they are off; start only one")
    takes = {key: value for key, value in options.all_extra().items() if key in registry.options_of(found)}
    save = replace(options.save, extra=takes)
    asked = forms(source.header, save)
    if not asked:
        return source, None
    stored = StoredSource(source, asked, overflow="overflow" in options.save.allow_lossy)
    return stored, stored


def load_options(saver: str, options: ConvertOptions) -> LoadOptions:
    """How the source is read. Raises UsageError where the optimizer is asked for and the output can't hold it."""
    can_hold = getattr(registry.saver(saver), "HOLDS_OPTIMIZER", False)
    if options.optimizer and (not can_hold or options.save.release):
        what = "a release checkpoint" if can_hold else f"--saver {saver}"
        raise UsageError(
            f"--optimizer: {what} can't hold optimizer state; leave it out to convert the weights alone",
            code="no-optimizer",
        )
    if options.optimizer and options.adapters:
        raise UsageError("--optimizer: its state no longer goes with weights that --adapter changes; leave it out")
    wanted = can_hold and options.optimizer is not False and not options.save.release and not options.adapters
    dtype = None if options.dtype is None else dtype_name(options.dtype)
    if dtype == "float16":
        dtype = "float32"  # of what is quantized: what is too large for float16 is found when it is cast from there
    return replace(options.load, optimizer=wanted, dtype=dtype)


def workers_of(options: ConvertOptions) -> int:
    return options.workers or default_workers(writing=True)


def raise_file_limit() -> None:
    """Large layouts have more rank files than the usual soft limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return
