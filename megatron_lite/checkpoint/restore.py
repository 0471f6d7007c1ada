"""Finds the start of a run: random weights, the weights of any checkpoint that megaconv reads, or a stopped run.

Every rank reads its own rectangles of canonical tensors. The layout of the checkpoint is therefore irrelevant.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.tensor import LazyTensor, matrix_shape
from megaconv.engine.opening import open_source
from megaconv.errors import NotExpressible, TensorMismatch, UsageError
from megaconv.families import has_text_only
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.huggingface.weight_files import has_weights
from megaconv.input import Input, find_input
from megaconv.model.config import ModelConfig
from megaconv.model.ir import WEIGHT, Header, Key, Source
from megaconv.model.natives import NativeTensor
from megaconv.model.training import ADAM, MASTER, SGD
from megaconv.options import LoadOptions
from megaconv.store_inputs import is_store
from megatron_lite.checkpoint import amax
from megatron_lite.checkpoint.places import holds_checkpoint, readable
from megatron_lite.checkpoint.same_run import check_same_run, refuse_adapters
from megatron_lite.checkpoint.state import (
    Progress,
    read_arguments,
    read_common,
    read_dropouts,
    read_progress,
)
from megatron_lite.checkpoint.weights import load_weights, read_rows, shifted
from megatron_lite.engine import Engine
from megatron_lite.models.purposes import refuse_score_head, refuse_whole
from megatron_lite.models.trainable import refuse_two_widths
from megatron_lite.settings.config import Settings


@dataclass(frozen=True)
class Start:
    """An opened checkpoint. Its tensors are read later."""

    path: str
    header: Header
    tensors: Mapping[Key, LazyTensor]
    dropouts: Mapping[str, float]
    progress: Progress
    with_optimizer: bool
    """True if the checkpoint has optimizer state and the run loads it."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files of the tokenizer and the like, by name."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Megatron's args of the run that continues; empty for a new run."""
    inside_whole: bool = False
    """True for the language model of a multimodal model, which `megaconv convert` reads with --text-only."""

    @property
    def config(self) -> ModelConfig:
        return self.header.config

    @property
    def weights(self) -> dict[str, LazyTensor]:
        """The weights, without optimizer state, by canonical name."""
        return {key.name: tensor for key, tensor in self.tensors.items() if key.slot == WEIGHT}


def find_start(settings: Settings, *, finetune: bool) -> Start | None:
    """Return the checkpoint to start from, or None for random weights. Reads metadata only. Raises CheckpointError."""
    settings, from_bert = _from_bert(_continued_task(settings))
    saving = settings.checkpointing
    weights_alone = finetune or saving.finetune or settings.lora.wanted or from_bert
    saved = saving.save if saving.save and holds_checkpoint(saving.save) else None
    if saved is not None and saving.resume and not settings.lora.wanted:
        refuse_adapters(saved, Path(readable(saved)))
        start = _open(saved, settings, continued=True)
        check_same_run(settings, saved, start.arguments)
        return start
    if saved is None:
        _refuse_model(saving.save)
    if settings.lora.wanted:
        _check_base(settings, saved)
    if saving.load is None:
        _check_unused(saved)
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
            if saving.exit_on_missing_checkpoint:
                raise UsageError(
                    f"--load {saving.load}: holds no checkpoint; without --exit-on-missing-checkpoint the run starts from random weights"
                )
            return None  # Megatron-LM's scripts start the first of several jobs like this
    elif not saving.resume:
        _check_unused(saved)
    return _open(saving.load, settings, continued=not weights_alone)


def _continued_task(settings: Settings) -> Settings:
    """Apply --pretrained-checkpoint as Megatron's tasks do.

    If --load holds a run, the task continues it. If not, the task starts from --pretrained-checkpoint.
    """
    saving, pretrained = settings.checkpointing, settings.tasks.pretrained_checkpoint
    if pretrained is None:
        return settings
    if saving.load is not None and holds_checkpoint(saving.load):
        if saving.save is None or os.path.realpath(saving.load) != os.path.realpath(saving.save):
            raise UsageError(
                f"--load {saving.load} holds a run to continue, and --pretrained-checkpoint starts a new run: "
                "pass --load alone, or the same --save"
            )
        return replace(settings, checkpointing=replace(saving, resume=True))
    return replace(settings, checkpointing=replace(saving, load=pretrained))


def _from_bert(settings: Settings) -> tuple[Settings, bool]:
    """Return (settings with --bert-load in the place of --load, True), unless --load holds a checkpoint."""
    saving, bert = settings.checkpointing, settings.retrieval.bert_load
    holds_run = saving.load is not None and holds_checkpoint(saving.load)
    if bert is None or holds_run:
        return settings, False
    return replace(settings, checkpointing=replace(saving, load=bert)), True


def find_reference(settings: Settings) -> Start:
    """Open the weights of --load, whatever --save holds. Raises CheckpointError."""
    assert settings.checkpointing.load is not None
    return _open(settings.checkpointing.load, settings, continued=False)


def _check_base(settings: Settings, saved: str | None) -> None:
    """Check --load and --save of a run that trains adapters. Raises UsageError."""
    saving = settings.checkpointing
    if saving.load is None:
        raise UsageError(
            "--lora-rank needs --load: the base model of the adapters, also with --resume"
        )
    if not saving.resume:
        _check_unused(saved)


def _check_unused(saved: str | None) -> None:
    """Raise UsageError if `saved` is a directory: --save would overwrite another run. None: nothing is saved there."""
    if saved is not None:
        raise UsageError(
            f"--save {saved} holds the checkpoint of another run: --resume continues it, another directory keeps it"
        )


def _refuse_model(save: str | None) -> None:
    """Raise UsageError if a Hugging Face model is at --save: megaconv would read the run there, and transformers the model."""
    if save is None or is_store(save):
        return
    place = Path(save)
    if (place / CONFIG_NAME).is_file() or has_weights(place):
        raise UsageError(
            f"--save {save}: is the directory of a Hugging Face model, which a run would hide; choose another directory"
        )


def open_language_model(
    place: str, loader: str | None = None, options: LoadOptions | None = None
) -> Source:
    """Open a checkpoint of any format. If it has the files of a multimodal model on the Hub, open its language model.

    loader: a loader's name; None: the loader that recognises the checkpoint.
    Raises CheckpointError; NotExpressible for another checkpoint of a multimodal model.
    """
    options = options or LoadOptions()
    return _language_model(find_input(place, loader, options), options)


def _language_model(found: Input, options: LoadOptions) -> Source:
    """Open the language model of an input. Raises CheckpointError."""
    if _is_whole(found):
        options = replace(options, text_only=True)
    source = open_source(found, options)
    refuse_whole(source.header.config, found.given)
    if source.header.layout is None:
        refuse_two_widths(source.header.config, found.given)
    return source


def _is_whole(found: Input) -> bool:
    """Return whether an input has the files of a multimodal model on the Hub."""
    return isinstance(found.place, Path) and has_text_only(found.place)


def open_weights(place: str) -> Start:
    """Open the weights of a checkpoint with a head for words, or with none, without optimizer state.

    Raises the errors of open_language_model; NotExpressible for a model with a head of scores.
    """
    found = find_input(place)
    source = _language_model(found, LoadOptions())
    refuse_score_head(source.header.config, place)
    tensors = {key: tensor for key, tensor in source.tensors() if key.slot == WEIGHT}
    return Start(
        place,
        source.header,
        tensors,
        {},
        Progress(),
        with_optimizer=False,
        files=source.header.files,
        inside_whole=_is_whole(found),
    )


def _open(given: str, settings: Settings, *, continued: bool) -> Start:
    place = readable(given)
    source = open_language_model(place)
    tensors = dict(source.tensors())
    common = read_common(Path(place)) if Path(place).is_dir() else None
    dropouts = read_dropouts(common, source.header.config)
    progress = read_progress(common, source.header.training) if continued else Progress()
    in_training = continued and not source.header.training.release
    with_optimizer = (
        in_training and source.header.has_optimizer and not settings.checkpointing.no_load_optim
    )
    if with_optimizer and all(key.slot == WEIGHT for key in tensors):
        raise NotExpressible(
            f"{place}: its optimizer state has a form that can't be read; --no-load-optim starts a fresh one"
        )
    if not with_optimizer:
        progress = replace(progress, engine=None)
    arguments = read_arguments(common) if continued else {}
    return Start(
        given,
        source.header,
        tensors,
        dropouts,
        progress,
        with_optimizer,
        source.header.files,
        arguments,
    )


def load(engine: Engine, start: Start) -> None:
    """Load the weights, and the optimizer state if the start has one. Raises TensorMismatch."""
    weights = start.weights
    load_weights(engine, weights)
    optimizer = engine.optimizer
    if optimizer is None or not start.with_optimizer:
        return
    for owned in optimizer.ranges():
        native = owned.info.native
        _check_kind(native.parts, set(owned.tensors), start)
        for slot, flat in owned.tensors.items():
            tensors = {name: start.tensors.get(Key(name, slot)) for name in native.parts}
            if slot == MASTER and not any(tensors.values()):
                if engine.dtype_of(owned.info) == torch.float32:
                    continue  # the parameter is its own master, and is loaded
                # Weights in fp32 are masters. A parameter of 16 bits has only their upper bits.
                tensors = {name: weights[name] for name in native.parts}
            values = read_range(native, slot, tensors, owned.start, owned.end)
            flat.copy_(values)
    optimizer.weights_from_masters()
    found = start.progress.engine
    if found is not None:
        load_state(engine, found, start.config.dtype)
        amax.restore(engine, found.get(amax.AMAX, {}))


def load_state(engine: Engine, found: Mapping[str, Any], dtype: str | None) -> None:
    """Restore the state of a run's engine. dtype: of that run; None if its checkpoint does not record one.

    Runs in other dtypes than float16 record a loss scale of 1. A run that goes on in float16 begins with its own.
    """
    scaler = engine.state()["scaler"]
    if dtype in ("float16", None):
        scaler = {**scaler, **found["scaler"]}
    engine.load_state({**found, "scaler": scaler})


def _check_kind(names: Iterable[str], wanted: set[str], start: Start) -> None:
    """Raise UsageError if a parameter's state in the checkpoint is that of another optimizer."""
    for name in names:
        found = sorted(slot for slot in (*ADAM, *SGD) if Key(name, slot) in start.tensors)
        if found and not wanted.intersection(found):
            raise UsageError(
                f"{start.path}: the optimizer's state of {name} is {' and '.join(found)}, which another optimizer than this run's has; "
                "give the --optimizer that it was trained with, or --no-load-optim for a fresh one"
            )


def read_range(
    native: NativeTensor, slot: str, tensors: Mapping[str, LazyTensor | None], start: int, end: int
) -> Tensor:
    """Return float32 [end - start]: a range of a rank's flattened tensor. Padding rows of the vocabulary are zero."""
    _, cols = matrix_shape(native.shape)
    # Read the rows that contain the range.
    first = start // cols
    last = -(-end // cols)
    out = torch.zeros(last - first, cols)
    for name, regions in native.parts.items():
        tensor = tensors[name]
        if tensor is None:
            raise TensorMismatch(
                f"{Key(name, slot)} is missing in the checkpoint; --no-load-optim starts a fresh optimizer"
            )
        for region in regions:
            box = region.box
            row0 = max(first, region.row)
            row1 = min(last, region.row + box.rows)
            if row0 >= row1:
                continue
            into = out[row0 - first : row1 - first, region.col : region.col + box.cols]
            values = read_rows(tensor, region, row0 - region.row, row1 - region.row)
            into.copy_(shifted(values, native, tensor) if slot == MASTER else values)
    skipped = first * cols
    return out.reshape(-1)[start - skipped : end - skipped]
