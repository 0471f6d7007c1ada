"""Sets up a run: checkpoint or initial weights, model, data, schedules. All checks that can refuse a run are here."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from formats.stores.addresses import is_store
from formats.wording import counted
from megaconv.errors import UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.planning.gpus import peak_tflops
from megaconv.store_inputs import parsed, writable_store
from megatron_lite.checkpoint.adapter_runs import AdapterStart, find_adapters, start_adapters
from megatron_lite.checkpoint.deltas import Deltas
from megatron_lite.checkpoint.restore import Start, find_start
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.sidecars import sidecars
from megatron_lite.checkpoint.state import Progress
from megatron_lite.checkpoint.store_saver import StoreSaver
from megatron_lite.checkpoint.teacher import find_teacher
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.data.samples import Dataset
from megatron_lite.data.tokenizer import NullTokenizer, Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.loop import plot
from megatron_lite.loop.best import require_evaluations, with_comparable_best
from megatron_lite.loop.introduction import introduce
from megatron_lite.loop.length import check_length, sample_counts, samples_left_out, total_samples
from megatron_lite.loop.log import Meter, Sink, flops_per_token, open_sinks
from megatron_lite.loop.memory_fit import check_fits
from megatron_lite.loop.run import Run
from megatron_lite.loop.savable import check_savable
from megatron_lite.loop.schedule import make_schedule
from megatron_lite.loop.stop import Stop
from megatron_lite.loop.tokenizer import make_tokenizer
from megatron_lite.models.lora.whole import HEAD
from megatron_lite.models.trainable import check_computed
from megatron_lite.objectives.catalog import objective_of
from megatron_lite.objectives.defaults import with_defaults
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.objective import Objective
from megatron_lite.objectives.retro_project import with_project
from megatron_lite.objectives.training_data import Setup, TrainingData
from megatron_lite.parallel.grid import make_grid
from megatron_lite.processes.failure import all_or_none
from megatron_lite.processes.launch import Place
from megatron_lite.processes.node import once_a_node
from megatron_lite.products.processor import lacks_bf16
from megatron_lite.settings.architecture import check_against, model_from_flags, model_type
from megatron_lite.settings.config import Settings, subjects
from megatron_lite.settings.contradictions import check_flags, check_steps
from megatron_lite.settings.kinds import check_kind
from megatron_lite.settings.objective_flags import check_objective_flags
from megatron_lite.settings.optimization import PRECISION_FLAGS
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.run_options import model_options, optimizer_options
from megatron_lite.settings.sizes import work_out


@dataclass(frozen=True)
class Basis:
    """The things from which a run follows, besides its flags."""

    settings: Settings
    """With those that follow from the checkpoint."""
    objective: Objective
    start: Start | None
    adapters: AdapterStart | None
    tokenizer: Tokenizer
    config: ModelConfig
    dropouts: Mapping[str, float]
    data: TrainingData
    teacher: Start | None = None
    """The teacher of a distillation."""

    @property
    def former_dtype(self) -> str | None:
        """The compute dtype of the continued run, else the dtype of the checkpoint's weights; None without a checkpoint."""
        if self.adapters is not None and self.adapters.dtype is not None:
            return self.adapters.dtype
        return None if self.start is None else self.start.config.dtype

    @property
    def progress(self) -> Progress:
        """The progress of the continued run."""
        if self.adapters is not None:
            return self.adapters.progress
        return Progress() if self.start is None else self.start.progress


def prepare(settings: Settings, place: Place, *, finetune: bool) -> Run:
    """Set up a run. Collective. Raises CheckpointError, on all ranks alike for errors that don't concern the sizes."""
    settings = all_or_none(lambda: with_project(settings))
    check_flags(settings)
    check_objective_flags(settings)
    basis = _basis(settings, place, finetune=finetune)
    setup, options, data = _setup(basis, place, finetune=finetune)
    settings, sizes = setup.settings, setup.sizes
    check_length(settings, sizes)
    check_savable(settings, setup.config, sizes.layout)
    images = None if data.reader is None else data.reader.directory
    all_or_none(lambda: check_fits(setup, options, basis.objective.rows, images))
    samples = total_samples(settings, sizes)
    schedule = make_schedule(settings.optimizer, settings.training, sizes.batch.full, samples)
    datasets = all_or_none(lambda: _datasets(basis, data, setup))
    sinks = all_or_none(lambda: _sinks(settings, place))
    engine = _engine(basis, setup, options)
    feeder = basis.objective.feeder(engine, basis.start, data, setup)
    datasets = _load(basis, engine, datasets, feeder, setup)
    saver = _saver(basis, setup)
    require_evaluations(settings, datasets[1], samples // sizes.batch.full)
    progress = with_comparable_best(basis.progress, settings, sizes, saver, place.node)
    identity = all_or_none(lambda: data.identity(setup))
    run = Run(
        settings=settings,
        config=setup.config,
        sizes=sizes,
        dropouts=basis.dropouts,
        place=place,
        objective=basis.objective,
        engine=engine,
        feeder=feeder,
        datasets=datasets,
        tokenizer=setup.tokenizer,
        schedule=schedule,
        meter=_meter(basis, setup),
        saver=saver,
        sinks=sinks,
        stop=Stop(speaks=place.rank == 0, saves=saver is not None),
        progress=replace(progress, data=identity),
        exam=data.exam(setup),
        saved=basis.progress.iteration or None,
        base_samples={} if basis.adapters is None else basis.adapters.base_samples,
    )
    introduce(run, basis.start, basis.adapters, setup.tokenizer, basis.former_dtype)
    if basis.progress.iteration and basis.progress.data not in (None, identity):
        run.say(
            "changed since the checkpoint: the training data or their tokenizer; the run takes the samples that are next "
            "in the new order, so some may come again and others never"
        )
    for line in data.introduction(setup, datasets[0]):
        run.say(line)
    left_out = samples_left_out(settings, sizes, basis.progress)
    if left_out:
        run.say(
            f"{counted(left_out, 'sample')} of --train-samples can't fill a step at the end: left out, as in Megatron"
        )
    return run


def _basis(settings: Settings, place: Place, *, finetune: bool) -> Basis:
    """Find the checkpoint, and choose the objective, the tokenizer and the model. Read the data that is read at once."""
    start = once_a_node(lambda: find_start(settings, finetune=finetune), place.node)
    check_steps(settings.training)
    found = None if start is None else start.config
    kind = model_type(settings, found)
    check_kind(settings, kind)
    objective = objective_of(settings, kind)
    settings = all_or_none(lambda: objective.settled(settings, start, place.say))
    start = objective.prepared(start, settings, place.say, finetune=finetune)
    extra_ids = objective.extra_ids(settings)
    tokenizer = all_or_none(lambda: make_tokenizer(settings, start, extra_ids))
    config, dropouts = _model(settings, start, tokenizer)
    config = objective.described(config, tokenizer)
    data = all_or_none(lambda: objective.read(settings, tokenizer))
    base = {} if start is None else start.weights
    adapters = once_a_node(lambda: find_adapters(settings, config, base), place.node)
    teacher = once_a_node(lambda: find_teacher(settings, config, start, tokenizer), place.node)
    return Basis(settings, objective, start, adapters, tokenizer, config, dropouts, data, teacher)


def _setup(
    basis: Basis, place: Place, *, finetune: bool
) -> tuple[Setup, ModelOptions, TrainingData]:
    """Choose the settings that no flag sets, and compute all sizes."""
    say = place.say
    settings = _with_precision(basis.settings, basis.former_dtype, place)
    settings = with_defaults(
        settings,
        basis.config,
        basis.objective,
        basis.data,
        say,
        finetune=finetune,
        world=place.world,
    )
    options = model_options(settings, basis.dropouts)
    if basis.adapters is not None:
        options = replace(options, lora=basis.adapters.options)
    options = basis.objective.options(options, say)
    config = changed(basis.config, {"dtype": options.dtype})
    sizes = work_out(settings, config, options, place.world)
    settings, data = basis.data.fitted(settings, sizes, basis.progress, say)
    setup = Setup(settings, config, basis.tokenizer, sizes, place, basis.teacher)
    return setup, options, data


def _datasets(basis: Basis, data: TrainingData, setup: Setup) -> list[Dataset | None]:
    found = data.datasets(setup, sample_counts(setup.settings, setup.sizes, basis.progress))
    if found[0] is None:
        raise UsageError(
            f"there is nothing to train on: the training split is empty; {basis.objective.nothing_found}"
        )
    return found


def _engine(basis: Basis, setup: Setup, options: ModelOptions) -> Engine:
    settings, sizes = setup.settings, setup.sizes
    models = [each.config for each in (setup, setup.teacher) if each is not None]
    has_experts = any(config.experts.count > 0 for config in models)
    grid = make_grid(
        sizes.layout,
        sizes.dp,
        setup.place.device,
        cp=sizes.cp,
        near=options.near,
        experts=has_experts,
        timeout=setup.place.timeout,
    )
    criterion = basis.objective.criterion(settings)
    return Engine(setup.config, grid, options, optimizer_options(settings), criterion)


def _load(
    basis: Basis, engine: Engine, datasets: list[Dataset | None], feeder: Feeder, setup: Setup
) -> list[Dataset | None]:
    """Load or initialize the weights, and return the datasets."""
    std, seed = setup.settings.model.init_method_std, setup.settings.training.seed
    if basis.start is None:
        init_weights(engine, std, seed)
    else:
        datasets = basis.objective.load(engine, basis.start, datasets, feeder, setup)
    if basis.adapters is not None:
        base = {} if basis.start is None else basis.start.weights
        start_adapters(engine, basis.adapters, seed, base)
    return datasets


def _meter(basis: Basis, setup: Setup) -> Meter:
    settings, sizes, place = setup.settings, setup.sizes, setup.place
    name = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else None
    peak = settings.logging.peak_tflops or peak_tflops(name)
    adapters = basis.adapters
    flops = flops_per_token(
        setup.config,
        sizes.seq,
        sizes.decoder_seq,
        frozen=adapters is not None,
        trains_head=adapters is not None and HEAD in adapters.options.whole,
        trains_mtp=basis.objective.criterion(settings).trains_mtp,
    )
    return Meter(flops, place.world, peak, total_samples(settings, sizes, basis.progress))


def _model(
    settings: Settings, start: Start | None, tokenizer: Tokenizer
) -> tuple[ModelConfig, Mapping[str, float]]:
    model, vocab = settings.model, tokenizer.vocab_size
    if start is None:
        # NullTokenizer adds a token to --vocab-size, so take its own count.
        given = None if settings.data.tokenizer_type == "NullTokenizer" else model.vocab_size
        config = with_token_ids(model_from_flags(settings, given or vocab), tokenizer)
        dropouts: Mapping[str, float] = {
            "attention_dropout": model.attention_dropout,
            "hidden_dropout": model.hidden_dropout,
        }
    else:
        config, dropouts = start.config, start.dropouts
        check_computed(config)  # first, because check_against needs Megatron's args of the model
        check_against(settings, config, dropouts, start.path)
    if vocab > config.vocab:
        raise UsageError(
            f"the tokenizer has {vocab:,} tokens, the model {config.vocab:,}; give the model's own tokenizer, or give the model rows for "
            "the new tokens (megaconv convert MODEL OUT --saver hf --tokenizer TOKENIZER)"
        )
    return config, dropouts


def _with_precision(settings: Settings, former_dtype: str | None, place: Place) -> Settings:
    """Set the checkpoint's precision if no flag sets one."""
    if settings.precision.chosen or former_dtype not in ("bfloat16", "float16"):
        return settings
    name = PRECISION_FLAGS[former_dtype]
    hint = "--fp32 takes more memory"
    if name == "bf16" and lacks_bf16(place.device.type):
        hint += ", but is many times as fast: this processor has no instructions for bf16"
    place.say(f"--{name}: the checkpoint's precision ({hint})")
    chosen: dict[str, Any] = {name: True}
    return replace(settings, precision=replace(settings.precision, **chosen))


def with_token_ids(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Add the tokenizer's special token ids, so that generation knows where a text begins and ends."""
    if isinstance(tokenizer, NullTokenizer):
        return config
    found = {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eod,
        "pad_token_id": tokenizer.pad,
    }
    return changed(config, {name: number for name, number in found.items() if number is not None})


def _sinks(settings: Settings, place: Place) -> list[Sink]:
    if place.rank:
        return []
    if settings.logging.plot:
        plot.check_installed()
    plain: dict[str, Any] = {}
    for subject in subjects():
        plain |= vars(getattr(settings, subject))
    return open_sinks(settings.logging, plain)


def _saver(basis: Basis, setup: Setup) -> Saver | None:
    settings, place = setup.settings, setup.place
    saving = settings.checkpointing
    if saving.save is None:
        return None
    start = basis.start
    files = None if start is None else start.files
    inside = {} if start is None else start.header.made
    beside = sidecars(settings.data, setup.tokenizer, setup.config, basis.dropouts, files, inside)
    beside |= basis.objective.files(setup, beside)
    kind = "adapter" if settings.lora.wanted else saving.ckpt_format
    is_stored = is_store(saving.save)
    # Files of a store are written to the local disk first.
    root = Path(tempfile.gettempdir() if is_stored else saving.save)
    options = (
        root,
        kind,
        place.rank,
        place.save_group,
        beside,
        saving.keep_last,
        saving.async_save,
    )
    if not is_stored:
        deltas = None if saving.save_delta is None else Deltas(root, saving.save_delta)
        return Saver(*options, deltas)
    if kind == "adapter":
        raise UsageError(
            f"--save {saving.save}: adapters can't be saved to a store; choose a directory"
        )
    prefix = parsed(saving.save).prefix
    return StoreSaver(*options, store=writable_store(saving.save), prefix=prefix)
