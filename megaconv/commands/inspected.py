"""Everything that an inspection finds out about a checkpoint, as lines for people and as JSON."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from formats.tensor import ITEMSIZE
from formats.wording import counted, listing
from megaconv.commands.units import readable, share
from megaconv.engine.record import RECORD_NAME
from megaconv.families import family
from megaconv.families.parts.whole_model import named
from megaconv.model.config import ModelConfig
from megaconv.model.fields import fields_of
from megaconv.model.ir import WEIGHT, Header
from megaconv.model.pattern import SYMBOLS, has_pattern, pattern_of


@dataclass(frozen=True, repr=False)
class Inspection:
    """A header, and the name of the loader that read it."""

    path: str
    loader: str
    header: Header
    differences: Mapping[str, str] | None = None
    """Tensors whose name or shape differs from the checkpoint's own record.

    None without a record, or without a comparison.
    """
    disk_bytes: int | None = None
    """Size of all files of the checkpoint; None if it isn't known."""
    optimizer_bytes: int | None = None
    """Size of the optimizer's tensors; None if there are none, or none that can be read."""
    iterations: tuple[str, ...] = ()
    """Directories of iterations, if the path is a run's directory."""
    read_iteration: str | None = None
    """The described iteration: the one that the run's tracker names, or the only one."""

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
            "release": header.training.release,
            "iterations": list(self.iterations),
            "read_iteration": self.read_iteration,
            "padded_vocab": header.padded_vocab,
            "consumed_train_samples": header.training.consumed_train_samples,
            "optimizer": self._optimizer(),
            "experts": self.experts(),
            "beside": config.whole.parts() if config.whole else {},
            "files": self._files(),
            "record": None
            if self.differences is None
            else {"same": not self.differences, "differences": dict(self.differences)},
            "config": fields_of(config),
            "tensors": {
                str(key): {"shape": list(info.shape), "dtype": info.dtype}
                for key, info in header.manifest.items()
            },
        }

    @property
    def reason(self) -> str | None:
        """The reason why it can't be converted; None if it can."""
        return None if self.header.has_weights else "it is a configuration alone, without weights"

    def _layout(self) -> dict[str, Any] | None:
        layout = self.header.layout
        if layout is None:
            return None
        encoder = (
            {"encoder_stage_layers": list(layout.encoder_stage_layers)}
            if layout.encoder_stage_layers
            else {}
        )
        return {**layout.sizes(), "stage_layers": list(layout.stage_layers), **encoder}

    def _optimizer(self) -> dict[str, Any] | None:
        found = self.header.training.optimizer
        if found is not None:
            return {"kind": found.kind, "step": found.step, "bytes": self.optimizer_bytes}
        unread = {
            "kind": "present; convert --dry-run says whether it is read",
            "step": None,
            "bytes": None,
        }
        return unread if self.header.has_optimizer else None

    def experts(self) -> dict[str, int] | None:
        """The number of experts, the number per token, and the parameters active per token; None without experts."""
        experts = self.header.config.experts
        if not experts.count:
            return None
        sizes = {
            key.name: prod(info.shape)
            for key, info in self.header.manifest.items()
            if key.slot == WEIGHT and ".experts." in key.name
        }
        routed = sum(sizes.values())
        # A token of text reaches none of the experts for images, and these are the narrower ones.
        of_images = sum(size for name, size in sizes.items() if ".vision.experts." in name)
        chosen = (routed - of_images) * experts.per_token // experts.count
        active = self.header.parameters - routed + chosen
        return {
            "count": experts.count,
            "per_token": experts.per_token,
            "parameters": routed,
            "active_parameters": active,
        }

    def dtypes(self) -> dict[str, int]:
        """The number of parameters stored in each dtype."""
        counts: Counter[str] = Counter()
        for info, count in self.header.weight_kinds.items():
            counts[info.dtype] += count * prod(info.shape)
        return dict(counts.most_common())

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) lines for people."""
        return [*self._of_model(), *self._of_save(), *self._of_files()]

    def _of_model(self) -> Iterator[tuple[str, str]]:
        """Lines about the model: its format, family, sizes and parts."""
        header, config = self.header, self.header.config
        yield "format", header.source
        yield "family", config.family
        yield "parameters", f"{header.parameters:,} in {counted(len(header.manifest), 'tensor')}"
        yield "size", self._size()
        yield (
            "shape",
            f"{_depth(config)}, hidden {config.hidden}, ffn {config.mlp.ffn}, {_heads(config)}",
        )
        yield "vocabulary", self._vocabulary()
        yield "positions", _positions(config)
        if config.head.classes:
            yield "head", f"classification, {config.head.classes} classes"
        elif config.head.choices:
            yield "head", "multiple choice"
        elif config.head.labels:
            yield "head", f"scores, {counted(config.head.labels, 'label')}"
        if config.whole is not None:
            words = (
                f"{word} ({counted(count, 'tensor')})"
                for word, count in config.whole.parts().items()
            )
            yield "beside", f"{', '.join(words)}, of {named(config.whole.config)}"
        if config.has("mamba_layers"):
            if has_pattern(config):
                yield "pattern", _pattern(config)
            yield "mamba", _mamba(config)
        if config.block_places:
            yield "blocks", _blocks(config)
        if config.retrieval.layers:
            yield "retrieval", _retrieval(config)
        experts = self.experts()
        if experts is not None:
            of_each = f"{experts['per_token']} of {experts['count']} for each token"
            yield "experts", f"{of_each}, {experts['active_parameters']:,} parameters active"
        if config.window:
            yield "window", _window(config)

    def _of_save(self) -> Iterator[tuple[str, str]]:
        """Lines about the save: its layout, its place in a run, its optimizer state."""
        training = self.header.training
        if self.header.layout is not None:
            yield "layout", str(self.header.layout)
        if training.release:
            yield "iteration", "release"
        elif training.iteration is not None:
            yield "iteration", str(training.iteration)
        if len(self.iterations) > 1:
            numbers = listing([_number(name) for name in self.iterations])
            yield "iterations", f"{numbers}; the tracker names {_number(self.read_iteration or '')}"
        if training.consumed_train_samples:
            yield "samples", f"{training.consumed_train_samples:,} consumed"
        optimizer = self._optimizer()
        if optimizer is not None:
            yield "optimizer", _described_optimizer(optimizer)

    def _of_files(self) -> Iterator[tuple[str, str]]:
        """Lines about the files, and their comparison with the checkpoint's own record."""
        if self.disk_bytes is not None:
            yield "on disk", readable(self.disk_bytes)
        yield "files", ", ".join(self._files()) or "no tokenizer"
        if self.differences:
            others = listing([f"{name} {what}" for name, what in self.differences.items()])
            yield "record", f"{RECORD_NAME} differs: {others}"
        elif self.differences is not None:
            yield "record", f"names and shapes match {RECORD_NAME}"
        if self.reason is not None:
            yield "convertible", f"no: {self.reason}"

    def _files(self) -> list[str]:
        """The names of the small files that a conversion writes."""
        return sorted({*self.header.files, *self.header.made})

    def _size(self) -> str:
        """The size with the share of each dtype: `1.2 GiB, bfloat16 100%`."""
        size = self.header.nbytes
        shares = (
            f"{dtype} {share(count * ITEMSIZE[dtype], size)}"
            for dtype, count in self.dtypes().items()
        )
        return f"{readable(size)}, {', '.join(shares)}"

    def _vocabulary(self) -> str:
        config, padded = self.header.config, self.header.padded_vocab
        padding = "" if padded in (None, config.vocab) else f" (padded to {padded:,})"
        tied = ", head tied to the embedding" if config.tie_embeddings else ""
        if family(config.family).is_bare(config):
            tied = ", no head"
        return f"{config.vocab:,}{padding}{tied}"


def _described_optimizer(optimizer: Mapping[str, Any]) -> str:
    """The kind, step and size of optimizer state. State with a step and without a size can't be converted."""
    kind, step, nbytes = optimizer["kind"], optimizer["step"], optimizer["bytes"]
    if step is None:
        return kind if nbytes is None else f"{kind}, {readable(nbytes)}"
    size = "its state can't be converted" if nbytes is None else readable(nbytes)
    return f"{kind}, step {step:,}, {size}"


def _heads(config: ModelConfig) -> str:
    attention = config.attention
    heads = f"{counted(attention.heads, 'head')} of {attention.head_dim}"
    if attention.kv_heads != attention.heads:
        heads = f"{heads}, {attention.kv_heads} key/value heads"
    others = sum(bool(config.own_sizes(layer)) for layer in range(config.layer_count))
    return f"{heads}; {counted(others, 'layer')} of other sizes" if others else heads


def _window(config: ModelConfig) -> str:
    positions = f"{config.window:,} positions"
    if config.has("only_windows"):
        return positions
    return f"{positions} in {counted(len(config.layers_with('window')), 'layer')}"


def _number(version: str) -> str:
    """The number of an iteration's directory, as in the tracker file."""
    return version.removeprefix("iter_").lstrip("0") or "0"


def _depth(config: ModelConfig) -> str:
    return (
        f"{config.encoder.layers} encoder and {config.layer_count} decoder layers"
        if config.encoder.layers
        else f"{counted(config.layer_count, 'layer')}"
    )


def _pattern(config: ModelConfig) -> str:
    """The layer pattern of a hybrid with its meaning: `M-M* (2 Mamba 2, 1 attention, 1 MLP)`."""
    pattern = pattern_of(config)
    kinds = (
        f"{pattern.count(symbol)} {what}" for symbol, what in SYMBOLS.items() if symbol in pattern
    )
    return f"{pattern} ({', '.join(kinds)})"


def _mamba(config: ModelConfig) -> str:
    mamba = config.mamba
    return f"{counted(mamba.heads, 'head')} of {mamba.head_dim} in {counted(mamba.groups, 'group')}, state {mamba.state}"


def _blocks(config: ModelConfig) -> str:
    """The shared blocks: `2 shared by 9 layers, adapters of rank 128`."""
    blocks = config.blocks
    shared = f"{blocks.count} shared by {counted(len(config.block_places), 'layer')}"
    return f"{shared}, adapters of rank {blocks.adapter_rank}" if blocks.adapter_rank else shared


def _retrieval(config: ModelConfig) -> str:
    found = config.retrieval
    layers = ", ".join(str(layer + 1) for layer in config.retrieving)
    return (
        f"{found.neighbors} neighbors of {found.retrieved} tokens for each {found.chunk}, in layers {layers}; "
        f"encoder of {counted(found.layers, 'layer')}"
    )


def _positions(config: ModelConfig) -> str:
    if config.positions.kind == "rope":
        return f"{config.max_positions:,}, rope theta {config.positions.theta:.10g}" + _scaling(
            config.positions.scaling
        )
    if config.positions.kind == "relative":
        place = " in each layer" if config.positions.by_layer else ""
        return f"relative, {config.positions.buckets} buckets{place} up to {config.positions.max_distance}"
    if config.positions.kind == "none":
        return f"{config.max_positions:,}, no position embedding"
    return f"{config.max_positions:,}, {config.positions.kind}"


def _scaling(scaling: Any) -> str:
    return (
        f", scaled ({scaling['rope_type']}, factor {scaling.get('factor', '?')})" if scaling else ""
    )
