"""Checks that a run's sizes fit each other. Every refusal shows the arithmetic, before anything is started."""

from dataclasses import dataclass

from formats.wording import counted
from megaconv.errors import LayoutError, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megaconv.model.sharding import rank_sizes
from megaconv.planning.mixers import in_layer
from megatron_lite.settings.batch_size import BatchSchedule, BatchSize, batch_size
from megatron_lite.settings.config import Settings, Training
from megatron_lite.settings.contradictions import check_flags, check_steps
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.parallel import Parallel
from megatron_lite.settings.stacks import check_one_stack, layout_of_two_stacks

LONGEST_UNASKED = 4096
"""Default limit for the tokens of a sequence. A model with 131,072 positions is seldom trained with as many tokens."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that follow from the flags, the model and the number of processes."""

    layout: Layout
    dp: int
    batch: BatchSize | BatchSchedule
    micro_batch: int
    seq: int
    cp: int = 1
    decoder_seq: int = 0
    """T5: the decoder's length; the encoder's length is `seq`. 0 for a model with one stack."""


def work_out(settings: Settings, config: ModelConfig, options: ModelOptions, world: int) -> Sizes:
    """Return the sizes. Raises LayoutError or UsageError for impossible sizes."""
    training = settings.training
    check_flags(settings)
    check_steps(training)
    if settings.optimizer.qk_clip and config.attention.qk_norm:
        raise UsageError(
            "--qk-clip does nothing here but shrink weights: norms of q and k come after them; leave it out"
        )
    layout = _layout(settings.parallel, config, world, options)
    seq = _sequence(training) or min(config.max_positions, LONGEST_UNASKED)
    micro = training.micro_batch_size
    decoder_seq = training.decoder_seq_length if config.encoder.layers else 0
    cp = settings.parallel.context_parallel_size
    dp = check_sizes(
        config, layout, world=world, options=options, sequence=seq, microbatches=layout.pp, cp=cp
    )
    _check_reference(settings, options, dp * cp)
    batch = batch_size(training, dp, seq)
    for size in batch.sizes():
        if size < 1 or size % (micro * dp):
            raise UsageError(
                f"a global batch of {size} can't be divided into micro batches of {micro} on {dp} data-parallel ranks: "
                f"it must be a multiple of {micro} x {dp} = {micro * dp}"
            )
        microbatches = size // (micro * dp)
        check_sizes(
            config,
            layout,
            world=world,
            options=options,
            sequence=seq,
            microbatches=microbatches,
            cp=cp,
        )
    if decoder_seq:
        check_length(config, layout, options, decoder_seq)
    return Sizes(
        layout=layout,
        dp=dp,
        batch=batch,
        micro_batch=micro,
        seq=seq,
        cp=cp,
        decoder_seq=decoder_seq,
    )


def _check_reference(settings: Settings, options: ModelOptions, replicas: int) -> None:
    """Raise UsageError if a reference needs whole parameters that the replicas share.

    Beside adapters, it is the engine with the base's values of embedding and head.
    """
    grpo, lora = settings.grpo, options.lora
    if not grpo.grpo or not grpo.beta or lora is None or not (lora.whole or lora.rows):
        return
    if replicas > 1 and settings.parallel.shards("optim_grads_params"):
        raise UsageError(
            "the reference of --grpo needs whole parameters of embedding and head; choose a --data-parallel-sharding-strategy other than "
            "optim_grads_params, or --beta 0, or leave out --lora-modules-to-save and --lora-trainable-token-indices"
        )


def _sequence(training: Training) -> int | None:
    """Return the sequence length. Raises UsageError for two different lengths of the same sequence."""
    named = training.seq_length, training.encoder_seq_length
    if None not in named and named[0] != named[1]:
        raise UsageError(
            f"--seq-length {named[0]} and --encoder-seq-length {named[1]} are the same length; give one"
        )
    return named[0] or named[1]


def check_sizes(
    config: ModelConfig,
    layout: Layout,
    *,
    world: int,
    options: ModelOptions,
    sequence: int,
    microbatches: int,
    cp: int = 1,
) -> int:
    """Return the data-parallel size. Raises LayoutError with the arithmetic for impossible sizes. It creates no groups.

    sequence: tokens of one sequence. microbatches: per data-parallel rank and step.
    """
    tp, pp, vpp = layout.tp, layout.pp, layout.vpp
    model = tp * pp * cp
    if world % model:
        names, sizes = "tp x pp", f"{tp} x {pp}"
        if cp > 1:
            names, sizes = "tp x cp x pp", f"{tp} x {cp} x {pp}"
        how = f": torchrun --nproc-per-node {model} -m megatron_lite" if world == 1 else ""
        raise LayoutError(
            f"{counted(world, 'process', 'processes')} can't be divided over {names} = {sizes} = {model}; "
            f"start a multiple of {model}{how}"
        )
    if len(layout.stage_layers) != pp * vpp or sum(layout.stage_layers) != config.layer_count:
        stages = "+".join(map(str, layout.stage_layers))
        raise LayoutError(
            f"stages of {stages} layers don't make {config.layer_count} layers in pp x vpp = {pp} x {vpp} stages"
        )
    rank_sizes(config, layout)
    _check_experts(config, layout, world // pp)
    if cp > 1:
        _check_context(config, layout, options, sequence, cp)
    check_length(config, layout, options, sequence, cp)
    if options.offloaded_layers >= config.layer_count:
        raise LayoutError(
            f"--cpu-offloading-num-layers {options.offloaded_layers} must be less than the model's {counted(config.layer_count, 'layer')}"
        )
    if vpp > 1 and microbatches % pp:
        below, above = microbatches // pp * pp, -(-microbatches // pp) * pp
        use = f"{below} or {above}" if below else str(above)
        raise LayoutError(
            f"interleaving: {microbatches} microbatches are not a multiple of {pp} pipeline stages; use {use}"
        )
    return world // model


def _check_experts(config: ModelConfig, layout: Layout, ranks: int) -> None:
    """Raise LayoutError if the ranks of a pipeline stage can't share the experts."""
    if layout.ep > 1 and not config.experts.count:
        raise LayoutError(f"expert parallel size is {layout.ep}, but the model has no experts")
    if ranks % (layout.etp * layout.ep):
        raise LayoutError(
            f"expert parallelism: etp x ep = {layout.etp} x {layout.ep} = {layout.etp * layout.ep} has to divide the "
            f"tp x dp = {ranks} ranks of a pipeline stage"
        )


def check_length(
    config: ModelConfig, layout: Layout, options: ModelOptions, sequence: int, cp: int = 1
) -> None:
    """Raise LayoutError for a sequence that can't be divided over ranks, or that exceeds the model's positions."""
    tp = layout.tp
    if options.sequence_parallel and sequence // cp % tp:
        raise LayoutError(
            f"sequence parallelism shards {sequence // cp} tokens over tp = {tp}; take a sequence that is a multiple of {tp * cp}"
        )
    if config.positions.kind == "learned" and sequence > config.max_positions:
        raise LayoutError(
            f"a sequence of {sequence} tokens is longer than the model's {config.max_positions} positions"
        )


def _check_context(
    config: ModelConfig, layout: Layout, options: ModelOptions, sequence: int, cp: int
) -> None:
    """Raise LayoutError for sizes that context parallelism does not support."""
    _check_heads_of_states(config, layout.tp, cp)
    if sequence % (2 * cp):
        raise LayoutError(
            f"context parallelism cuts {sequence} tokens into 2 x cp = 2 x {cp} blocks; take a sequence that is a multiple of {2 * cp}"
        )
    for kind in dict.fromkeys(config.layers):
        _check_shared_heads(in_layer(config, kind), layout.tp, options, cp)
    if options.attention_dropout and options.context != "a2a":
        raise LayoutError(
            f"dropout of attention weights ({options.attention_dropout:g}) is not supported with --cp-comm-type {options.context}; "
            "take a2a, or --attention-dropout 0"
        )
    if config.experts.count and options.lora is not None and options.lora.dropout:
        raise LayoutError("dropout of experts' adapters is not supported with context parallelism")


def _check_shared_heads(config: ModelConfig, tp: int, options: ModelOptions, cp: int) -> None:
    """Raise LayoutError if context-parallel ranks can't share the heads of a layer. config: with the layer's sizes."""
    attention, how = config.attention, options.context
    for name, count in (("heads", attention.heads), ("kv_heads", attention.kv_heads)):
        near = {"a2a": cp, "a2a+p2p": options.near}.get(how, 1)
        if count % (tp * near):
            raise LayoutError(
                f"--cp-comm-type {how} shares out heads: {name} = {count} can't be divided over tp x {'cp' if near == cp else 'near'} = "
                f"{tp} x {near} = {tp * near}; take p2p or all_gather"
            )


def _check_heads_of_states(config: ModelConfig, tp: int, cp: int) -> None:
    """Raise LayoutError if context-parallel ranks can't share the heads of layers with a state.

    Fewer groups than ranks are repeated, so that each rank gets one.
    """
    mamba, linear = config.mamba, config.linear
    sizes = {
        "mamba_heads": (mamba.heads, False),
        "mamba_groups": (mamba.groups, True),
        "linear_value_heads": (linear.value_heads, False),
        "linear_key_heads": (linear.key_heads, True),
    }
    for name, (count, repeats) in sizes.items():
        own = count // tp
        if own % cp and not (repeats and cp % own == 0):
            raise LayoutError(
                f"context parallelism shares the heads of layers with a state: {name} / tp = {count} / {tp} = {own} "
                f"can't be divided over cp = {cp}; take a cp that divides {own}"
            )


def _layout(parallel: Parallel, config: ModelConfig, world: int, options: ModelOptions) -> Layout:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    ep = parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size
    if min(tp, pp, cp, ep, 1 if etp is None else etp) < 1:
        shown = f"tp = {tp}, pp = {pp}, cp = {cp}, ep = {ep}" + (
            "" if etp is None else f", etp = {etp}"
        )
        raise LayoutError(f"{shown}: parallel sizes must be 1 or more")
    if etp is not None and etp > 1 and not config.experts.count:
        raise LayoutError(
            f"expert tensor parallel size (etp) is {etp}, but the model has no experts"
        )
    if config.encoder.layers:
        return layout_of_two_stacks(parallel, config)
    check_one_stack(parallel)
    split = LayerSplit(
        None, parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers,
        parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split,
        parallel.pipeline_model_parallel_layout,
    )  # fmt: skip
    vpp = _virtual_stages(parallel, config, split)
    etp = _expert_parts(config, tp, ep, world // pp, options) if etp is None else etp
    return Layout(
        tp, pp, vpp, ep, etp, stage_layers=split_layers(config.layer_count, pp, vpp, split)
    )


def _expert_parts(config: ModelConfig, tp: int, ep: int, ranks: int, options: ModelOptions) -> int:
    """Return the default of etp: tp as in Megatron if it fits the ranks of a stage, else 1."""
    must_be_whole = config.mlp.bias or options.lora is not None
    if not config.experts.count or must_be_whole:
        return 1
    fits_ranks = ranks % (tp * ep) == 0
    fits_width = config.sizes()["moe_ffn"] % tp == 0
    return tp if fits_ranks and fits_width else 1


def _virtual_stages(parallel: Parallel, config: ModelConfig, split: LayerSplit) -> int:
    pp, listed = parallel.pipeline_model_parallel_size, split.stages()
    each = parallel.num_layers_per_virtual_pipeline_stage
    count = parallel.num_virtual_stages_per_pipeline_rank
    if each is not None and count is not None:
        raise UsageError(
            "give --num-layers-per-virtual-pipeline-stage or --num-virtual-stages-per-pipeline-rank, not both"
        )
    if count is not None:
        return count
    if each is not None:
        if each < 1 or config.layer_count % (pp * each):
            raise LayoutError(
                f"{config.layer_count} layers can't be divided into virtual stages of {each} over {pp} ranks: "
                f"{pp} x {each} = {pp * each} has to divide them"
            )
        return config.layer_count // (pp * each)
    return listed // pp if listed is not None and pp > 1 and listed % pp == 0 else 1
