"""The pipeline stages of a T5, from Megatron's flags: first the encoder's stages, then the decoder's."""

from megaconv.errors import LayoutError, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout, split_stacks
from megatron_lite.settings.parallel import Parallel

OF_TWO_STACKS = ("pipeline_model_parallel_split_rank", "encoder_pipeline_model_parallel_size")
OF_ONE_STACK = (
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)  # fmt: skip
"""Flags that divide a single stack of layers into stages."""


def check_one_stack(parallel: Parallel) -> None:
    """Raise UsageError for a flag of a model with two stacks."""
    for name in OF_TWO_STACKS:
        if getattr(parallel, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is for a T5, which this model is not; leave it out"
            )


def layout_of_two_stacks(parallel: Parallel, config: ModelConfig) -> Layout:
    """Return the layout of a T5. Raises UsageError, LayoutError."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    split = parallel.pipeline_model_parallel_split_rank
    encoder = parallel.encoder_pipeline_model_parallel_size
    for name in OF_ONE_STACK:
        if getattr(parallel, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is not supported for a T5, whose stacks are split evenly; leave it out"
            )
    if parallel.expert_model_parallel_size > 1:
        raise LayoutError(
            f"expert parallel size is {parallel.expert_model_parallel_size}, but the model has no experts"
        )
    if split and encoder:
        raise UsageError(
            "give --pipeline-model-parallel-split-rank or --encoder-pipeline-model-parallel-size, not both"
        )
    if encoder:
        pp, split = encoder + pp, encoder
    if pp == 1 and not split:
        return Layout(tp, stage_layers=(config.layer_count,))
    if not split:
        raise LayoutError(
            f"pp = {pp}: no stage has layers of both stacks of a T5; --pipeline-model-parallel-split-rank N gives the encoder N of these "
            "stages, --encoder-pipeline-model-parallel-size N gives it N more"
        )
    of_encoder, of_decoder = split_stacks(config.encoder.layers, config.layer_count, pp, split)
    return Layout(tp, pp, stage_layers=of_decoder, encoder_stage_layers=of_encoder)
