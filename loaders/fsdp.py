"""verl's FSDP checkpoints: one file per rank with its parts of all tensors, under transformers' names.

The LoRA adapter of a run that trains one is merged into its base. Optimizer state is read if it is that of torch's Adam
(megaconv/pytorch/verl_training.py).
"""

from dataclasses import replace
from pathlib import Path

from formats import dtensor_files
from megaconv.adapters.wrapped_model import base_of, is_wrapped, merged_into
from megaconv.engine.sidecars import find_sidecars
from megaconv.errors import UsageError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.huggingface.canonical import whole_model
from megaconv.huggingface.stored_names import unwrapped
from megaconv.loader import Loader
from megaconv.megatron.arguments.run_arguments import vocab_divisor
from megaconv.megatron.arguments.zero_groups import GROUP_OPTIONS, takes_megatrons
from megaconv.model.check import well_formed
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import HF
from megaconv.model.table import canonical_shapes
from megaconv.model.training import TrainingState
from megaconv.options import LoadOptions
from megaconv.pytorch.progress import COUNT_OPTIONS
from megaconv.pytorch.training_state import Parameters
from megaconv.pytorch.verl_training import open_run


def detect(path: Path) -> bool:
    return dtensor_files.is_rank_files(path)


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a checkpoint. Raises CheckpointError if it is incomplete, or doesn't match the configuration."""
    places = (options.config, path / "huggingface", path)
    directory = next(
        (each for each in places if each is not None and (each / CONFIG_NAME).is_file()), None
    )
    if directory is None:
        raise UsageError(
            f"{path}: has no huggingface/{CONFIG_NAME}; give --config with the Hugging Face directory of the model",
            code="config-needed",
        )
    family, config = read_config(directory / CONFIG_NAME, own_names=options.own_names)
    if options.true_vocab_size not in (None, config.vocab):
        raise UsageError(
            f"{path}: its vocabulary of {config.vocab} has no padding; leave --true-vocab-size out"
        )
    takes = takes_megatrons(options.extra)
    model = dtensor_files.read(path)
    found = {unwrapped(name): tensor for name, tensor in model.tensors.items()}
    has_adapter = is_wrapped(found)
    has_optimizer = dtensor_files.has_optimizer(path)
    run = None
    if has_optimizer and options.optimizer and not config.own_names:
        run = open_run(path, model, found, Parameters.of(family, config))
    config, canonical = whole_model(
        family,
        config,
        HF,
        base_of(found, path) if has_adapter else found,
        str(path),
        {} if run is None else run.slots,
    )
    manifest = describe(canonical)
    training = TrainingState()
    if run is not None:
        shapes = canonical_shapes(family.rows, config)
        with well_formed(str(path)):
            training = run.training(shapes, options.extra, takes_megatrons=takes)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        training=training,
        files=find_sidecars(directory),
        vocab_divisor=vocab_divisor(training.arguments),
        source=f"fsdp of verl, {model.ranks} ranks{', with a LoRA adapter' if has_adapter else ''}",
        has_optimizer=has_optimizer,
    )
    opened = OpenedSource(header, canonical)
    return merged_into(opened, found, path, family) if has_adapter else opened


LOADER = Loader(
    name="fsdp",
    description="FSDP of verl: model_world_size_N_rank_R.pt of every rank, with huggingface/ beside",
    detect=detect,
    open=open,
    keeps_names=True,
    options={**GROUP_OPTIONS, **COUNT_OPTIONS},
    reads_files=False,
)
