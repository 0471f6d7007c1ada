"""verl's FSDP checkpoints: one file per rank with its parts of all tensors, under transformers' names.

The LoRA adapter of a run that trains one is merged into its base.
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
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import HF
from megaconv.options import LoadOptions


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
    tensors, ranks = dtensor_files.read(path)
    found = {unwrapped(name): tensor for name, tensor in tensors.items()}
    has_adapter = is_wrapped(found)
    config, canonical = whole_model(
        family, config, HF, base_of(found, path) if has_adapter else found, str(path)
    )
    manifest = describe(canonical)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files=find_sidecars(directory),
        source=f"fsdp of verl, {ranks} ranks{', with a LoRA adapter' if has_adapter else ''}",
        has_optimizer=dtensor_files.has_optimizer(path),
    )
    opened = OpenedSource(header, canonical)
    return merged_into(opened, found, path, family) if has_adapter else opened


LOADER = Loader(
    name="fsdp",
    description="FSDP of verl: model_world_size_N_rank_R.pt of every rank, with huggingface/ beside",
    detect=detect,
    open=open,
    keeps_names=True,
    reads_files=False,
)
