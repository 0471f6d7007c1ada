"""The layout of a Megatron output, from the options and the source's layout."""

from dataclasses import replace

from formats.wording import counted
from megaconv.errors import LayoutError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import LayerSplit, Layout, split_layers, split_stacks, uneven_splits
from megaconv.options import SaveOptions

DEFAULT_DIVISOR = 128


def choose_layout(
    config: ModelConfig, source: Layout | None, options: SaveOptions, *, uneven: bool = True
) -> Layout:
    """The requested sizes, otherwise the source's, otherwise 1. The source's layer split is kept if it fits.

    uneven: True if the output can have stages of different sizes, so that an error may propose them. Raises
    LayoutError.
    """
    source = source or Layout(stage_layers=(config.layer_count,))
    tp, pp = options.tp or source.tp, options.pp or source.pp
    if config.retrieval.layers and pp > 1:
        raise LayoutError(f"pp is {pp}, but Megatron's Retro has no pipeline stages; choose 1")
    if config.encoder.layers:
        return _choose_stacks(config, source, tp, pp, options)
    if options.split.split_rank is not None:
        raise LayoutError(
            f"pipeline split rank = {options.split.split_rank}: this model has no encoder; leave the option out"
        )
    vpp = options.vpp or (source.vpp if options.pp in (None, source.pp) else 1)
    listed = options.split.stages()
    if options.vpp is None and pp > 1 and listed is not None and listed % pp == 0:
        vpp = listed // pp  # Megatron also computes the number of virtual stages from the list
    keep = (pp, vpp) == (source.pp, source.vpp) and options.split == LayerSplit()
    stages = (
        source.stage_layers
        if keep
        else _split(config.layer_count, pp, vpp, options.split, uneven=uneven)
    )
    ep, etp = _expert_sizes(config, source, tp, options)
    return Layout(tp, pp, vpp, ep, etp, stages)


def _split(layers: int, pp: int, vpp: int, split: LayerSplit, *, uneven: bool) -> tuple[int, ...]:
    try:
        return split_layers(layers, pp, vpp, split)
    except LayoutError as error:
        ways = (
            uneven_splits(layers, pp, vpp) if uneven and error.code == "layout-indivisible" else []
        )
        if not ways:
            raise
        raise LayoutError(
            f"{error}, or share the layers out by {' or '.join(ways)}", code=error.code
        ) from None


def _choose_stacks(
    config: ModelConfig, source: Layout, tp: int, pp: int, options: SaveOptions
) -> Layout:
    """The layout of a model with encoder and decoder, which share a stage only if there is only one."""
    split_rank = options.split.split_rank
    if split_rank is None:
        split_rank = source.split_rank if pp == source.pp else 0
    ep, etp = _expert_sizes(config, source, tp, options)
    of_encoder = counted(config.encoder.layers, "layer")
    stacks = f"{of_encoder} of an encoder and {config.layer_count} of a decoder"
    vpp = options.vpp or 1
    if pp == 1 and not split_rank:
        layers = split_layers(config.layer_count, 1, vpp, options.split)
        return Layout(tp, 1, 1, ep, etp, layers)
    is_split_evenly = replace(options.split, split_rank=None) == LayerSplit()
    if vpp > 1 or not is_split_evenly:
        raise LayoutError(
            f"the model has {stacks}: Megatron shares them out evenly and without virtual stages; "
            "leave --vpp and layer splits out"
        )
    if not split_rank:
        raise LayoutError(
            f"pp = {pp}: the model has {stacks}, each on separate pipeline stages; "
            f"pass the encoder's number of the {pp} stages with "
            "--pipeline-model-parallel-split-rank"
        )
    encoder, stages = split_stacks(config.encoder.layers, config.layer_count, pp, split_rank)
    return Layout(tp, pp, 1, ep, etp, stages, encoder)


def _expert_sizes(
    config: ModelConfig, source: Layout, tp: int, options: SaveOptions
) -> tuple[int, int]:
    """(ep, etp). Without an option, the expert tensor-parallel size is the tensor-parallel size."""
    if not config.experts.count:
        if (options.ep or 1) > 1:
            raise LayoutError(
                f"expert parallel size (ep) = {options.ep}: this model has no experts; leave it out"
            )
        if (options.etp or 1) not in (1, tp):
            raise LayoutError(
                f"expert tensor parallel size (etp) = {options.etp}: this model has no experts; leave it out"
            )
        return 1, 1
    ep = options.ep or source.ep
    etp = options.etp or (
        source.etp if options.tp in (None, source.tp) and source.etp < source.tp else tp
    )
    if config.mlp.bias:
        etp = options.etp or 1
        if etp > 1 or ep < tp:
            raise LayoutError(
                f"expert tensor parallel size (etp) = {etp} with ep = {ep}, tp = {tp}: this model's experts have biases, "
                "which Megatron core allows with etp = 1 only; leave --etp out and give --ep tp or more"
            )
    if etp > tp or tp % etp or etp * ep < tp:
        raise LayoutError(
            f"expert tensor parallel size (etp) = {etp} with ep = {ep}, tp = {tp}: Megatron's torch format has a file for every rank "
            "only if etp divides tp and etp * ep is tp or more"
        )
    return ep, etp
