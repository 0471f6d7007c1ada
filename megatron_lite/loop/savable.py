"""Checks that a run's checkpoint can be written, before the run computes anything."""

from collections.abc import Iterator

from megaconv.errors import LayoutError, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megatron_lite.settings.config import Settings

Found = Iterator[tuple[object, LayoutError | UsageError]]
"""(whether the checkpoint can't be written, the error for it)."""


def check_savable(settings: Settings, config: ModelConfig, layout: Layout) -> None:
    """Raise LayoutError or UsageError for a checkpoint that can't be written."""
    if settings.checkpointing.save is None:
        return
    for judge in (_stages, _norms, _latent_attention, _expert_files):
        for wrong, error in judge(settings, config, layout):
            if wrong:
                raise error


def _stages(settings: Settings, config: ModelConfig, layout: Layout) -> Found:
    yield (
        layout.split_rank and settings.checkpointing.ckpt_format == "torch",
        LayoutError(
            "--ckpt-format torch is not supported for a T5 with pipeline stages; leave it out: torch_dist has no stages, and "
            "megaconv convert --saver core --ckpt-format torch makes rank files of it"
        ),
    )


def _norms(settings: Settings, config: ModelConfig, layout: Layout) -> Found:
    is_local = settings.checkpointing.transformer_impl == "local"
    yield (
        config.encoder.layers and not config.norm.final and not is_local,
        UsageError(
            "the model has no norms at the end of its stacks, as Megatron's local layers without Transformer Engine; "
            "--transformer-impl local saves it so"
        ),
    )


def _latent_attention(settings: Settings, config: ModelConfig, layout: Layout) -> Found:
    saving = settings.checkpointing
    local = saving.ckpt_format == "torch" and saving.transformer_impl == "local"
    yield (
        local and config.latent.kv_rank and layout.tp > 1,
        LayoutError(
            f"local layers of latent attention shard over tp = {layout.tp} what each rank has all of here, so that their rank files can't "
            "be written; leave --transformer-impl out, or take torch_dist"
        ),
    )


def _expert_files(settings: Settings, config: ModelConfig, layout: Layout) -> Found:
    by_rank, files = settings.checkpointing.ckpt_format == "torch", layout.etp * layout.ep
    yield (
        by_rank and config.experts.count and files < layout.tp,
        LayoutError(
            f"--ckpt-format torch has a file for each rank of etp x ep = {layout.etp} x {layout.ep} = {files}, too few for the parts of "
            f"tp = {layout.tp} ranks; take --ep {layout.tp} or more, or torch_dist"
        ),
    )
    yield (
        by_rank and layout.tp % layout.etp,
        LayoutError(
            f"--ckpt-format torch has files by tensor ranks, of which etp = {layout.etp} has to divide tp = {layout.tp}; "
            "take another --expert-tensor-parallel-size, or torch_dist"
        ),
    )
