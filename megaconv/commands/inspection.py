"""What a checkpoint is, from its metadata alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats import rank_files
from formats.tensor import ITEMSIZE
from megaconv.commands.units import readable as readable
from megaconv.commands.units import share
from megaconv.engine.preparation import open_source
from megaconv.engine.record import RECORD_NAME, find_record
from megaconv.errors import CheckpointError
from megaconv.families.parts.whole_model import named
from megaconv.hub import Place, resolve
from megaconv.model.check import listing
from megaconv.model.config import ModelConfig
from megaconv.model.fields import fields_of
from megaconv.model.ir import WEIGHT, Header
from megaconv.model.pattern import SYMBOLS, pattern_of
from megaconv.options import LoadOptions

if TYPE_CHECKING:
    from megaconv.commands.survey import Survey


@dataclass(frozen=True, repr=False)
class Inspection:
    """A header and the name of the loader that read it."""

    path: str
    loader: str
    header: Header
    differences: Mapping[str, str] | None = None
    """Tensor -> how its name or shape is not what the checkpoint's own record says; None where nothing was recorded, or asked."""
    disk_bytes: int | None = None
    """Of all files of the checkpoint; None where nobody knows."""
    optimizer_bytes: int | None = None
    """Of the optimizer's tensors; None where there are none, or of a kind that is not read."""

    def __repr__(self) -> str:
        header = self.header
        layout = "" if header.layout is None else f", {header.layout}"
        return f"<Inspection: {self.path}, {header.config.family}, {header.parameters:,} parameters, {header.source}{layout}>"

    def to_json(self) -> dict[str, Any]:
        header, config = self.header, self.header.config
        return {
            "path": self.path,
            "format": header.source,
            "loader": self.loader,
            "family": config.family,
            "convertible": header.has_weights,
            "reason": self.reason,
            "parameters": header.parameters,
            "bytes": header.nbytes,
            "disk_bytes": self.disk_bytes,
            "dtypes": self.dtypes(),
            "layout": self._layout(),
            "iteration": header.training.iteration,
            "padded_vocab": header.padded_vocab,
            "consumed_train_samples": header.training.consumed_train_samples,
            "optimizer": self._optimizer(),
            "experts": self.experts(),
            "beside": config.whole.parts() if config.whole else {},
            "files": sorted(header.files),
            "record": None
            if self.differences is None
            else {"same": not self.differences, "differences": dict(self.differences)},
            "config": fields_of(config),
            "tensors": {
                str(key): {"shape": list(info.shape), "dtype": info.dtype} for key, info in header.manifest.items()
            },
        }

    @property
    def reason(self) -> str | None:
        """Why it can't be converted; None where it can."""
        return None if self.header.has_weights else "it is a configuration alone, without weights"

    def _layout(self) -> dict[str, Any] | None:
        layout = self.header.layout
        if layout is None:
            return None
        encoder = {"encoder_stage_layers": list(layout.encoder_stage_layers)} if layout.encoder_stage_layers else {}
        return {**layout.sizes(), "stage_layers": list(layout.stage_layers), **encoder}

    def _optimizer(self) -> dict[str, Any] | None:
        found = self.header.training.optimizer
        if found is not None:
            return {"kind": found.kind, "step": found.step, "bytes": self.optimizer_bytes}
        unread = {"kind": "present, of a kind that is not read", "step": None, "bytes": None}
        return unread if self.header.has_optimizer else None

    def experts(self) -> dict[str, int] | None:
        """How many there are, how many a token passes, and the parameters that it meets; None without any."""
        experts = self.header.config.experts
        if not experts.count:
            return None
        routed = sum(
            prod(info.shape)
            for key, info in self.header.manifest.items()
            if key.slot == WEIGHT and ".experts." in key.name
        )
        active = self.header.parameters - routed + routed * experts.per_token // experts.count
        return {
            "count": experts.count,
            "per_token": experts.per_token,
            "parameters": routed,
            "active_parameters": active,
        }

    def dtypes(self) -> dict[str, int]:
        """dtype -> parameters stored in it."""
        counts: Counter[str] = Counter()
        for info, count in self.header.weight_kinds.items():
            counts[info.dtype] += count * prod(info.shape)
        return dict(counts.most_common())

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) for people."""
        header, config = self.header, self.header.config
        size = header.nbytes
        heads = f"{config.attention.heads} heads of {config.attention.head_dim}" + (
            f", {config.attention.kv_heads} key/value heads"
            if config.attention.kv_heads != config.attention.heads
            else ""
        )
        vocab = f"{config.vocab:,}" + (
            f" (padded to {header.padded_vocab:,})" if header.padded_vocab not in (None, config.vocab) else ""
        )
        found = [
            ("format", header.source),
            ("family", config.family),
            ("parameters", f"{header.parameters:,} in {len(header.manifest)} tensors"),
            (
                "size",
                f"{readable(size)}, {', '.join(f'{name} {share(count * ITEMSIZE[name], size)}' for name, count in self.dtypes().items())}",
            ),
            ("shape", f"{_depth(config)}, hidden {config.hidden}, ffn {config.mlp.ffn}, {heads}"),
            ("vocabulary", vocab + (", head tied to the embedding" if config.tie_embeddings else "")),
            ("positions", _positions(config)),
        ]
        if config.head.classes or config.head.choices:
            of_classes = f"classification, {config.head.classes} classes"
            found.append(("head", of_classes if config.head.classes else "multiple choice"))
        if config.whole is not None:
            words = ", ".join(f"{word} ({count} tensors)" for word, count in config.whole.parts().items())
            found.append(("beside", f"{words}, of {named(config.whole.config)}"))
        if config.has("mamba_layers"):
            found += [("pattern", _pattern(config)), ("mamba", _mamba(config))]
        if (experts := self.experts()) is not None:
            of_each = f"{experts['per_token']} of {experts['count']} for each token"
            found.append(("experts", f"{of_each}, {experts['active_parameters']:,} parameters active"))
        if config.window:
            found.append(
                (
                    "window",
                    f"{config.window:,} positions"
                    + ("" if config.has("only_windows") else f" in {len(config.layers_with('window'))} layers"),
                )
            )
        if header.layout is not None:
            found.append(("layout", str(header.layout)))
        training = header.training
        if training.release or training.iteration is not None:
            found.append(("iteration", "release" if training.release else str(training.iteration)))
        if training.consumed_train_samples:
            found.append(("samples", f"{training.consumed_train_samples:,} consumed"))
        if (optimizer := self._optimizer()) is not None:
            step = "" if optimizer["step"] is None else f", step {optimizer['step']:,}"
            size_of = "" if optimizer["bytes"] is None else f", {readable(optimizer['bytes'])}"
            size_of = ", its state can't be converted" if step and not size_of else size_of
            found.append(("optimizer", optimizer["kind"] + step + size_of))
        if self.disk_bytes is not None:
            found.append(("on disk", readable(self.disk_bytes)))
        found.append(("files", ", ".join(sorted(header.files)) or "no tokenizer"))
        if self.differences is not None:
            others = listing([f"{name} {what}" for name, what in self.differences.items()])
            description = (
                f"{RECORD_NAME} differs: {others}" if others else f"names and shapes are as {RECORD_NAME} says"
            )
            found.append(("record", description))
        if self.reason is not None:
            found.append(("convertible", f"no: {self.reason}"))
        return found


def _depth(config: ModelConfig) -> str:
    return (
        f"{config.encoder.layers} encoder and {config.layer_count} decoder layers"
        if config.encoder.layers
        else f"{config.layer_count} layer{'s' * (config.layer_count != 1)}"
    )


def _pattern(config: ModelConfig) -> str:
    """`M-M* (2 Mamba 2, 1 attention, 1 MLP)`."""
    pattern = pattern_of(config)
    kinds = (f"{pattern.count(symbol)} {what}" for symbol, what in SYMBOLS.items() if symbol in pattern)
    return f"{pattern} ({', '.join(kinds)})"


def _mamba(config: ModelConfig) -> str:
    mamba = config.mamba
    return f"{mamba.heads} heads of {mamba.head_dim} in {mamba.groups} groups, state {mamba.state}"


def _positions(config: ModelConfig) -> str:
    if config.positions.kind == "rope":
        return f"{config.max_positions:,}, rope theta {config.positions.theta:.10g}" + _scaling(
            config.positions.scaling
        )
    if config.positions.kind == "relative":
        return f"relative, {config.positions.buckets} buckets up to {config.positions.max_distance}"
    if config.positions.kind == "none":
        return f"{config.max_positions:,}, no position embedding"
    return f"{config.max_positions:,}, {config.positions.kind}"


def _scaling(scaling: Any) -> str:
    return f", scaled ({scaling['rope_type']}, factor {scaling.get('factor', '?')})" if scaling else ""


def inspect(
    path: str | Path, options: LoadOptions | None = None, loader: str | None = None, *, check_source: bool = True
) -> Inspection:
    """Reads metadata only. loader: None: the one that recognises it. check_source: compare names and shapes with its own record,
    if it has one. Raises CheckpointError."""
    options, place = options or LoadOptions(), resolve(path, metadata_only=True)
    name, source = open_source(
        place, loader, replace(options, metadata_only=True, needs_weights=False, optimizer=False)
    )
    overridden = options.config is not None or options.true_vocab_size is not None
    compared = check_source and not overridden and source.header.has_weights
    record = find_record(place) if compared else None
    differences = None if record is None else record.other_tensors(source.header.manifest)
    return Inspection(
        str(path),
        name,
        source.header,
        differences,
        disk_bytes(place),
        _optimizer_bytes(place, options, name, source.header),
    )


def look(
    path: str | Path, options: LoadOptions | None = None, loader: str | None = None, *, check_source: bool = True
) -> "Inspection | Survey":
    """What a checkpoint is; or, where no loader knows what model it is, what its files hold. Raises CheckpointError."""
    place = resolve(path, metadata_only=True)
    try:
        return replace(inspect(place, options, loader, check_source=check_source), path=str(path))
    except CheckpointError as error:
        if (
            loader is not None
            or (options and options.text_only)
            or error.code == "no-such-input"
            or not isinstance(place, Path)
        ):
            raise
        from megaconv.commands.survey import survey  # which imports every format

        found = survey(place, error)
        if found is None:
            raise
        return replace(found, path=str(path))


def disk_bytes(place: Place) -> int | None:
    """Of all files of a checkpoint; of a Megatron root those of the iteration that is read. None for what is no directory."""
    if not isinstance(place, Path) or not place.is_dir():
        return None
    root = rank_files.find_version(place) or place
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file())


def _optimizer_bytes(place: Place, options: LoadOptions, loader: str, header: Header) -> int | None:
    if header.training.optimizer is None:
        return None
    try:
        _, source = open_source(place, loader, replace(options, metadata_only=True, optimizer=True))
    except CheckpointError:  # whoever converts it is told what is wrong with it
        return None
    # A loader may leave it out itself: of a run, say, that trained a part of the model only.
    return sum(info.nbytes for key, info in source.header.manifest.items() if key.slot != WEIGHT) or None
