"""Where a run starts: from nothing, from the weights of any checkpoint that megaconv reads, or where another run stopped.

Every rank reads its own rectangles of canonical tensors, so that the layout of the checkpoint doesn't matter.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.tensor import LazyTensor, matrix_shape
from megaconv.engine.preparation import open_source
from megaconv.errors import NotExpressible, TensorMismatch, UsageError
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.whole_model import named
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Header, Key, Source
from megaconv.model.natives import NativeTensor
from megaconv.options import LoadOptions
from megatron_lite.checkpoint import amax
from megatron_lite.checkpoint.saver import has_checkpoint
from megatron_lite.checkpoint.state import Progress, read_arguments, read_common, read_dropouts, read_progress
from megatron_lite.checkpoint.weights import load_weights, read_rows
from megatron_lite.engine import Engine
from megatron_lite.parallel.zero import STATE
from megatron_lite.settings.config import Settings

_STATES = frozenset(slot for slots in STATE.values() for slot in slots)


@dataclass(frozen=True)
class Start:
    """A checkpoint, opened; its tensors are read later."""

    path: str
    header: Header
    tensors: Mapping[Key, LazyTensor]
    dropouts: Mapping[str, float]
    progress: Progress
    with_optimizer: bool
    """Whether its optimizer state is there, and wanted."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Tokenizer and the like."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Megatron's of the run that is continued; empty for one that begins."""

    @property
    def config(self) -> ModelConfig:
        return self.header.config


def find_start(settings: Settings, *, finetune: bool) -> Start | None:
    """None to start from random weights. Reads metadata only. Raises CheckpointError."""
    settings = _continued_task(settings)
    saving = settings.checkpointing
    weights_alone = finetune or saving.finetune or settings.lora.wanted
    saved = Path(saving.save) if saving.save and has_checkpoint(Path(saving.save)) else None
    if saved is not None and saving.resume and not settings.lora.wanted:
        return _open(str(saved), settings, continued=True)
    if settings.lora.wanted:
        _check_base(settings, saved)
    if saving.load is None:
        if saved is not None:
            raise UsageError(
                f"--save {saved} holds the checkpoint of another run: --resume continues it, another directory keeps it"
            )
        if finetune:
            raise UsageError(
                "finetune needs --load (of a --task also --pretrained-checkpoint): the checkpoint to start from"
            )
        return None
    if saving.save and os.path.realpath(saving.load) == os.path.realpath(saving.save):
        if saved is not None and weights_alone:
            raise UsageError(
                f"--load and --save are both {saved}, which holds a checkpoint: --resume continues that run, "
                "another --save starts one from its weights"
            )
        if not weights_alone and saved is None and not (Path(saving.load) / CONFIG_NAME).is_file():
            return None  # as Megatron-LM's scripts expect of the first of several jobs
    return _open(saving.load, settings, continued=not weights_alone)


def _continued_task(settings: Settings) -> Settings:
    """Megatron's tasks continue the run of --load, and start from --pretrained-checkpoint where there is none."""
    saving, pretrained = settings.checkpointing, settings.tasks.pretrained_checkpoint
    if pretrained is None:
        return settings
    if saving.load is not None and has_checkpoint(Path(saving.load)):
        if saving.save is None or os.path.realpath(saving.load) != os.path.realpath(saving.save):
            raise UsageError(
                f"--load {saving.load} holds a run to continue, beside --pretrained-checkpoint: give the same --save, or --load alone"
            )
        return replace(settings, checkpointing=replace(saving, resume=True))
    return replace(settings, checkpointing=replace(saving, load=pretrained))


def find_reference(settings: Settings) -> Start:
    """The weights of --load, whatever --save holds. Raises CheckpointError."""
    assert settings.checkpointing.load is not None
    return _open(settings.checkpointing.load, settings, continued=False)


def _check_base(settings: Settings, saved: Path | None) -> None:
    """Of a run that trains adapters. Raises UsageError."""
    saving = settings.checkpointing
    if saving.load is None:
        raise UsageError("--lora-rank needs --load: the model that adapters are trained beside, also with --resume")
    if saved is not None and not saving.resume:
        raise UsageError(
            f"--save {saved} holds the checkpoint of another run: --resume continues it, another directory keeps it"
        )


def open_language_model(place: str) -> Source:
    """A checkpoint of any format. Raises CheckpointError; NotExpressible for a model that has more beside its language model."""
    _, source = open_source(place, None, LoadOptions())
    refuse_whole(source.header.config, place)
    return source


def refuse_whole(config: ModelConfig, place: str) -> None:
    """Raises NotExpressible for a model that has more beside its language model. place: where it was read."""
    if config.whole is not None:
        raise NotExpressible(
            f"{place}: {named(config.whole.config)} sees or hears, and there is code for language models alone; take the one in it: "
            f"megaconv convert {place} LANGUAGE_MODEL --saver hf --text-only"
        )


def open_weights(place: str) -> Start:
    """A checkpoint's weights alone. Raises as open_language_model."""
    source = open_language_model(place)
    tensors = {key: tensor for key, tensor in source.tensors() if key.slot == WEIGHT}
    return Start(place, source.header, tensors, {}, Progress(), with_optimizer=False, files=source.header.files)


def _open(place: str, settings: Settings, *, continued: bool) -> Start:
    source = open_language_model(place)
    tensors = dict(source.tensors())
    common = read_common(Path(place)) if Path(place).is_dir() else None
    dropouts = read_dropouts(common, source.header.config.hf)
    progress = read_progress(common, source.header.training) if continued else Progress()
    with_optimizer = continued and source.header.has_optimizer and not settings.checkpointing.no_load_optim
    if with_optimizer and all(key.slot == WEIGHT for key in tensors):
        raise NotExpressible(
            f"{place}: its optimizer state has a form that can't be read; --no-load-optim starts a fresh one"
        )
    if not with_optimizer:
        progress = replace(progress, engine=None)
    arguments = read_arguments(common) if continued else {}
    return Start(place, source.header, tensors, dropouts, progress, with_optimizer, source.header.files, arguments)


def load(engine: Engine, start: Start) -> None:
    """Weights, and the optimizer's state where it is wanted. Raises TensorMismatch."""
    weights = {key.name: tensor for key, tensor in start.tensors.items() if key.slot == WEIGHT}
    load_weights(engine, weights)
    if engine.optimizer is None or not start.with_optimizer:
        return
    for owned in engine.optimizer.ranges():
        native = owned.info.native
        _check_kind(native.parts, set(owned.tensors), start)
        for slot, flat in owned.tensors.items():
            tensors = {name: start.tensors.get(Key(name, slot)) for name in native.parts}
            if slot == "master" and not any(tensors.values()):
                continue  # an fp32 run's weights are its masters
            flat.copy_(read_range(native, slot, tensors, owned.start, owned.end))
    engine.optimizer.weights_from_masters()
    if start.progress.engine is not None:
        fresh, found = engine.state(), start.progress.engine
        engine.load_state({**found, "scaler": {**fresh["scaler"], **found["scaler"]}})
        amax.restore(engine, found.get(amax.AMAX, {}))


def _check_kind(names: Iterable[str], wanted: set[str], start: Start) -> None:
    """Raises UsageError where a parameter's state in the checkpoint is another optimizer's."""
    for name in names:
        found = sorted(slot for slot in _STATES if Key(name, slot) in start.tensors)
        if found and not wanted.intersection(found):
            raise UsageError(
                f"{start.path}: the optimizer's state of {name} is {' and '.join(found)}, which another optimizer than this run's has; "
                "give the --optimizer that it was trained with, or --no-load-optim for a fresh one"
            )


def read_range(
    native: NativeTensor, slot: str, tensors: Mapping[str, LazyTensor | None], start: int, end: int
) -> Tensor:
    """float32 [end - start]: elements of a rank's flattened tensor. Padding of the vocabulary is zero."""
    _, cols = matrix_shape(native.shape)
    first, last = start // cols, -(-end // cols)
    out = torch.zeros(last - first, cols)
    for name, regions in native.parts.items():
        tensor = tensors[name]
        if tensor is None:
            raise TensorMismatch(
                f"{Key(name, slot)} is missing in the checkpoint; --no-load-optim starts a fresh optimizer"
            )
        for region in regions:
            row0, row1 = max(first, region.row), min(last, region.row + region.box.rows)
            if row0 < row1:
                into = out[row0 - first : row1 - first, region.col : region.col + region.box.cols]
                into.copy_(read_rows(tensor, region, row0 - region.row, row1 - region.row))
    return out.reshape(-1)[start - first * cols : end - first * cols]
