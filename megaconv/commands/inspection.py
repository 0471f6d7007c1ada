"""What a checkpoint is, from its metadata alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from formats.tensor import ITEMSIZE
from megaconv.engine.conversion import open_source
from megaconv.engine.record import RECORD_NAME, find_record
from megaconv.hub import resolve
from megaconv.model.check import listing
from megaconv.model.config import ModelConfig
from megaconv.model.fields import fields_of
from megaconv.model.ir import Header, weight_kinds
from megaconv.model.pattern import SYMBOLS, pattern_of
from megaconv.options import LoadOptions


@dataclass(frozen=True)
class Inspection:
    """A header and the name of the loader that read it."""

    path: str
    loader: str
    header: Header
    differences: Mapping[str, str] | None = None
    """Tensor -> how its name or shape is not what the checkpoint's own record says; None where nothing was recorded, or asked."""

    def to_json(self) -> dict[str, Any]:
        header, config = self.header, self.header.config
        return {
            "path": self.path,
            "format": header.source,
            "loader": self.loader,
            "family": config.family,
            "parameters": header.parameters,
            "bytes": header.nbytes,
            "dtypes": self.dtypes(),
            "layout": self._layout(),
            "iteration": header.training.iteration,
            "padded_vocab": header.padded_vocab,
            "consumed_train_samples": header.training.consumed_train_samples,
            "optimizer": self._optimizer(),
            "files": sorted(header.files),
            "record": None
            if self.differences is None
            else {"same": not self.differences, "differences": dict(self.differences)},
            "config": fields_of(config),
            "tensors": {
                str(key): {"shape": list(info.shape), "dtype": info.dtype} for key, info in header.manifest.items()
            },
        }

    def _layout(self) -> dict[str, Any] | None:
        layout = self.header.layout
        if layout is None:
            return None
        encoder = {"encoder_stage_layers": list(layout.encoder_stage_layers)} if layout.encoder_stage_layers else {}
        return {**layout.sizes(), "stage_layers": list(layout.stage_layers), **encoder}

    def _optimizer(self) -> dict[str, Any] | None:
        found = self.header.training.optimizer
        if found is not None:
            return {"kind": found.kind, "step": found.step}
        return {"kind": "present, of a kind that is not read", "step": None} if self.header.has_optimizer else None

    def dtypes(self) -> dict[str, int]:
        """dtype -> parameters stored in it."""
        counts: Counter[str] = Counter()
        for info, count in weight_kinds(self.header.manifest).items():
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
            ("shape", f"{_depth(config)} layers, hidden {config.hidden}, ffn {config.mlp.ffn}, {heads}"),
            ("vocabulary", vocab + (", head tied to the embedding" if config.tie_embeddings else "")),
            ("positions", _positions(config)),
        ]
        if config.has("mamba_layers"):
            found += [("pattern", _pattern(config)), ("mamba", _mamba(config))]
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
            found.append(("optimizer", optimizer["kind"] + step))
        found.append(("files", ", ".join(sorted(header.files)) or "no tokenizer"))
        if self.differences is not None:
            others = listing([f"{name} {what}" for name, what in self.differences.items()])
            description = (
                f"{RECORD_NAME} differs: {others}" if others else f"names and shapes are as {RECORD_NAME} says"
            )
            found.append(("record", description))
        return found


def _depth(config: ModelConfig) -> str:
    return (
        f"{config.encoder.layers} encoder and {config.layer_count} decoder"
        if config.encoder.layers
        else f"{config.layer_count}"
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
        return f"{config.max_positions:,}, rope theta {config.positions.theta:g}" + _scaling(config.positions.scaling)
    if config.positions.kind == "relative":
        return f"relative, {config.positions.buckets} buckets up to {config.positions.max_distance}"
    if config.positions.kind == "none":
        return f"{config.max_positions:,}, no position embedding"
    return f"{config.max_positions:,}, {config.positions.kind}"


def _scaling(scaling: Any) -> str:
    return f", scaled ({scaling['rope_type']}, factor {scaling.get('factor', '?')})" if scaling else ""


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def readable(size: int) -> str:
    """1.5 GiB."""
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"


def inspect(
    path: str | Path, options: LoadOptions | None = None, loader: str | None = None, *, check_source: bool = True
) -> Inspection:
    """Reads metadata only. loader: None: the one that recognises it. check_source: compare names and shapes with its own record,
    if it has one. Raises CheckpointError."""
    options = options or LoadOptions()
    name, source = open_source(path, loader, replace(options, metadata_only=True, optimizer=False))
    overridden = options.config is not None or options.true_vocab_size is not None
    record = find_record(resolve(str(path))) if check_source and not overridden else None
    differences = None if record is None else record.other_tensors(source.header.manifest)
    return Inspection(str(path), name, source.header, differences)
