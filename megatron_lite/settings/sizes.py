"""Whether a run's sizes fit each other; every refusal shows the arithmetic, before anything is started."""

import os
from dataclasses import dataclass
from math import prod

from megaconv.errors import LayoutError, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megaconv.model.sharding import rank_sizes
from megatron_lite.settings.config import Parallel, Settings, Training
from megatron_lite.settings.options import CONTEXT, ModelOptions
from megatron_lite.settings.stacks import check_one_stack, layout_of_two_stacks
from megatron_lite.settings.wording import counted

LONGEST_UNASKED = 4096
"""Tokens of a sequence where no flag says how many: a model for 131,072 positions is seldom meant to be trained with as many."""


@dataclass(frozen=True)
class BatchSize:
    """Sequences of a step, as Megatron-LM ramps them up: grows from `start` by `increment`s over `samples`, to `full`."""

    full: int
    start: int
    increment: int = 0
    samples: int = 0

    def at(self, samples: int) -> int:
        if self.start == self.full or samples > self.samples:
            return self.full
        each = self.samples / ((self.full - self.start) // self.increment)
        return min(self.full, self.start + int(samples / each) * self.increment)

    def sizes(self) -> list[int]:
        """Every size that a run will have."""
        return [*range(self.start, self.full, self.increment), self.full] if self.increment else [self.full]


@dataclass(frozen=True)
class Sizes:
    """What follows from the flags, the model and the number of processes."""

    layout: Layout
    dp: int
    batch: BatchSize
    micro_batch: int
    seq: int
    cp: int = 1
    decoder_seq: int = 0
    """Of a T5, whose encoder has `seq`; 0 where there is one stack."""


def work_out(settings: Settings, config: ModelConfig, options: ModelOptions, world: int) -> Sizes:
    """Raises LayoutError or UsageError for anything that can't be."""
    training = settings.training
    check_flags(settings)
    check_steps(training)
    if settings.optimizer.qk_clip and config.attention.qk_norm:
        raise UsageError(
            "--qk-clip does nothing here but shrink weights: norms of q and k come after them; leave it out"
        )
    layout = _layout(settings.parallel, config, world, options)
    seq, micro = _sequence(training) or min(config.max_positions, LONGEST_UNASKED), training.micro_batch_size
    decoder_seq = training.decoder_seq_length if config.encoder.layers else 0
    cp = settings.parallel.context_parallel_size
    dp = check_sizes(config, layout, world, options, seq, layout.pp, cp)
    batch = batch_size(training, dp)
    for size in batch.sizes():
        if size < 1 or size % (micro * dp):
            raise UsageError(
                f"a global batch of {size} can't be divided into micro batches of {micro} on {dp} data-parallel ranks: "
                f"it has to be a multiple of {micro} x {dp} = {micro * dp}"
            )
        check_sizes(config, layout, world, options, seq, size // (micro * dp), cp)
    if decoder_seq:
        check_length(config, layout, options, decoder_seq)
    return Sizes(layout, dp, batch, micro, seq, cp, decoder_seq)


def _sequence(training: Training) -> int | None:
    """Raises UsageError for two lengths of one sequence."""
    named = training.seq_length, training.encoder_seq_length
    if None not in named and named[0] != named[1]:
        raise UsageError(f"--seq-length {named[0]} and --encoder-seq-length {named[1]} are the same length; give one")
    return named[0] or named[1]


def batch_size(training: Training, dp: int) -> BatchSize:
    """Raises UsageError for a ramp that doesn't arrive at the global batch size."""
    full = training.global_batch_size or training.micro_batch_size * dp
    if training.rampup_batch_size is None:
        return BatchSize(full, full)
    if len(training.rampup_batch_size) != 3:
        raise UsageError("--rampup-batch-size takes three numbers: START INCREMENT SAMPLES")
    start, increment, samples = training.rampup_batch_size
    if start < 1 or increment < 1 or samples < 1 or start >= full or (full - start) % increment:
        raise UsageError(
            f"--rampup-batch-size {start} {increment} {samples}: {full} (the global batch) - {start} = {full - start} "
            f"has to be a positive multiple of {increment}"
        )
    if training.train_samples is None:
        raise UsageError("--rampup-batch-size counts in samples: give --train-samples in place of --train-iters")
    return BatchSize(full, start, increment, samples)


def check_sizes(
    config: ModelConfig,
    layout: Layout,
    world: int,
    options: ModelOptions,
    sequence: int,
    microbatches: int,
    cp: int = 1,
) -> int:
    """The data-parallel size. Raises LayoutError, with the arithmetic, for what can't be run; makes no group.

    sequence: tokens of one sequence. microbatches: per data-parallel rank and step.
    """
    tp, pp, vpp = layout.tp, layout.pp, layout.vpp
    model = tp * pp * cp
    if world % model:
        names, sizes = ("tp x cp x pp", f"{tp} x {cp} x {pp}") if cp > 1 else ("tp x pp", f"{tp} x {pp}")
        raise LayoutError(
            f"{counted(world, 'process', 'processes')} can't be divided over {names} = {sizes} = {model}; start a multiple of {model}"
        )
    if len(layout.stage_layers) != pp * vpp or sum(layout.stage_layers) != config.layer_count:
        stages = "+".join(map(str, layout.stage_layers))
        raise LayoutError(
            f"stages of {stages} layers don't make {config.layer_count} layers in pp x vpp = {pp} x {vpp} stages"
        )
    rank_sizes(config, layout)
    if layout.ep > 1 and not config.experts.count:
        raise LayoutError(f"expert parallel size is {layout.ep}, but the model has no experts")
    if world // pp % (layout.etp * layout.ep):
        raise LayoutError(
            f"expert parallelism: etp x ep = {layout.etp} x {layout.ep} = {layout.etp * layout.ep} has to divide the "
            f"tp x dp = {world // pp} ranks of a pipeline stage"
        )
    if cp > 1:
        _check_context(config, layout, options, sequence, cp)
    check_length(config, layout, options, sequence, cp)
    if vpp > 1 and microbatches % pp:
        below, above = microbatches // pp * pp, -(-microbatches // pp) * pp
        use = f"{below} or {above}" if below else str(above)
        raise LayoutError(
            f"interleaving: {microbatches} microbatches are not a multiple of {pp} pipeline stages; use {use}"
        )
    return world // model


def check_length(config: ModelConfig, layout: Layout, options: ModelOptions, sequence: int, cp: int = 1) -> None:
    """Raises LayoutError for a sequence that can't be shared, or that the model has no positions for."""
    tp = layout.tp
    if options.sequence_parallel and sequence // cp % tp:
        raise LayoutError(
            f"sequence parallelism shards {sequence // cp} tokens over tp = {tp}; take a sequence that is a multiple of {tp * cp}"
        )
    if config.positions.kind == "learned" and sequence > config.max_positions:
        raise LayoutError(
            f"a sequence of {sequence} tokens is longer than the model's {config.max_positions} positions"
        )


def _check_context(config: ModelConfig, layout: Layout, options: ModelOptions, sequence: int, cp: int) -> None:
    """Raises LayoutError for what context parallelism can't do."""
    attention, how = config.attention, options.context
    if sequence % (2 * cp):
        raise LayoutError(
            f"context parallelism cuts {sequence} tokens into 2 x cp = 2 x {cp} blocks; take a sequence that is a multiple of {2 * cp}"
        )
    for name, count in (("heads", attention.heads), ("kv_heads", attention.kv_heads)):
        near = {"a2a": cp, "a2a+p2p": options.near}.get(how, 1)
        if count % (layout.tp * near):
            raise LayoutError(
                f"--cp-comm-type {how} shares out heads: {name} = {count} can't be divided over tp x {'cp' if near == cp else 'near'} = "
                f"{layout.tp} x {near} = {layout.tp * near}; take p2p or all_gather"
            )
    if options.attention_dropout and how != "a2a":
        raise LayoutError(
            f"dropout of attention weights ({options.attention_dropout:g}) can't be had with --cp-comm-type {how}; take a2a, or "
            "--attention-dropout 0"
        )
    if config.experts.count and options.lora is not None and options.lora.dropout:
        raise LayoutError("dropout of experts' adapters can't be had with context parallelism")


def _layout(parallel: Parallel, config: ModelConfig, world: int, options: ModelOptions) -> Layout:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, ep, etp = (
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
    )
    if min(tp, pp, cp, ep, 1 if etp is None else etp) < 1:
        shown = f"tp = {tp}, pp = {pp}, cp = {cp}, ep = {ep}" + ("" if etp is None else f", etp = {etp}")
        raise LayoutError(f"{shown}: parallel sizes have to be 1 or more")
    if etp is not None and etp > 1 and not config.experts.count:
        raise LayoutError(f"expert tensor parallel size (etp) is {etp}, but the model has no experts")
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
    return Layout(tp, pp, vpp, ep, etp, stage_layers=split_layers(config.layer_count, pp, vpp, split))


def _expert_parts(config: ModelConfig, tp: int, ep: int, ranks: int, options: ModelOptions) -> int:
    """Megatron's own choice, which is tp, where it can be had on the ranks of a stage; else 1."""
    whole_alone = config.mlp.bias or options.lora is not None
    fits = config.experts.count and not whole_alone and not ranks % (tp * ep) and not config.sizes()["moe_ffn"] % tp
    return tp if fits else 1


def _virtual_stages(parallel: Parallel, config: ModelConfig, split: LayerSplit) -> int:
    pp, listed = parallel.pipeline_model_parallel_size, split.stages()
    each, count = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
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


def check_steps(training: Training) -> None:
    """Apart from the other flags: where the model is missing too, that is what is wrong. Raises UsageError."""
    if not (training.train_iters or training.train_samples) and training.epochs is None:
        raise UsageError("--train-iters (or --train-samples, or --epochs of --finetune-data) is missing")


def check_flags(settings: Settings) -> None:
    """What can be judged without the model. Raises UsageError."""
    training, precision, saving, logging = (
        settings.training,
        settings.precision,
        settings.checkpointing,
        settings.logging,
    )
    granularity, method = settings.recompute.recompute_granularity, settings.recompute.recompute_method
    lengths = training.train_iters, training.train_samples, training.epochs
    positive = {
        "micro_batch_size": training.micro_batch_size,
        "train_iters": training.train_iters, "train_samples": training.train_samples,
        "epochs": None if settings.tasks.task else training.epochs,
        "eval_interval": training.eval_interval,
        "lora_rank": settings.lora.lora_rank, "exit_interval": training.exit_interval, "save_interval": saving.save_interval,
        "check_weight_hash_across_dp_replicas_interval": training.check_weight_hash_across_dp_replicas_interval,
        "fp8_amax_history_len": precision.fp8_amax_history_len,
        "keep_last": saving.keep_last, "muon_num_ns_steps": settings.optimizer.muon_num_ns_steps,
        "log_interval": settings.logging.log_interval, "recompute_num_layers": settings.recompute.recompute_num_layers,
    }  # fmt: skip
    for name, value in positive.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} has to be 1 or more")
    balance = settings.balance
    unknown = set(balance.moe_router_load_balancing_type) - {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
    muon = settings.optimizer.kind == "muon"
    refused = [
        (muon and settings.lora.wanted, "--optimizer muon is for whole matrices; take adam to train adapters"),
        (muon and precision.fp16, "--optimizer muon is for bf16 and fp32, as in Megatron core; leave --fp16 out"),
        *_of_scores(settings),
        *_of_levels(settings.parallel),
        (settings.parallel.cp_comm_type not in {(word,) for word in CONTEXT},
         f"--cp-comm-type {' '.join(settings.parallel.cp_comm_type)} can't be had; take one of {', '.join(CONTEXT)} for all layers"),
        (unknown, f"--moe-router-load-balancing-type {' '.join(sorted(unknown))} can't be had yet; there are aux_loss, seq_aux_loss, "
                  "global_aux_loss, none"),
        (len(balance.moe_router_load_balancing_type) != len(balance.moe_aux_loss_coeff),
         "--moe-router-load-balancing-type and --moe-aux-loss-coeff need as many words as numbers"),
        (precision.bf16 + precision.fp16 + precision.fp32 > 1, "--bf16, --fp16 and --fp32 contradict each other"),
        (sum(map(bool, lengths)) > 1, "give --train-iters, --train-samples or --epochs, not several of them"),
        (training.epochs is not None and not (settings.data.finetune_data or settings.tasks.task),
         "--epochs counts examples: it goes with --finetune-data"),
        (saving.save_interval and not saving.save, "--save-interval needs --save"),
        (saving.resume and not saving.save, "--resume continues from --save, which is missing"),
        (granularity == "full" and not method, "--recompute-granularity full needs --recompute-method uniform or block"),
        (method and granularity != "full", "--recompute-method goes with --recompute-granularity full"),
        (not 0 <= settings.lora.lora_dropout < 1, f"--lora-dropout {settings.lora.lora_dropout:g} has to lie between 0 and 1"),
        (precision.fp8_format and not precision.bf16, "--fp8-format goes with --bf16, in which everything else is then computed"),
        (precision.fp8_format and settings.recompute.compile, "--fp8-format can't be had with --compile: scales are kept between products"),
        (precision.fp8_format and settings.lora.wanted, "--fp8-format can't be had with adapters, which keep to the model's precision"),
        (precision.fp8_format == "hybrid" and precision.fp8_recipe in ("blockwise", "mxfp8"),
         f"--fp8-recipe {precision.fp8_recipe} has small blocks, so that gradients are in e4m3 too: take --fp8-format e4m3"),
        (min(precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16) < 0, "layers in bf16 have to be 0 or more"),
        (settings.parallel.grad_reduce_in_bf16 and not precision.bf16, "--grad-reduce-in-bf16 goes with --bf16"),
        (training.manual_gc_interval < 0, f"--manual-gc-interval {training.manual_gc_interval} has to be 0 or more"),
        (training.manual_gc_interval and not training.manual_gc, "--manual-gc-interval goes with --manual-gc"),
        (logging.use_pytorch_profiler and not logging.profile, "--use-pytorch-profiler goes with --profile"),
        (logging.profile and not 0 <= logging.profile_step_start < logging.profile_step_end,
         f"--profile-step-end {logging.profile_step_end} has to be more than --profile-step-start {logging.profile_step_start}"),
        (logging.profile and logging.use_pytorch_profiler and not (logging.tensorboard_dir or saving.save),
         "--use-pytorch-profiler writes to --tensorboard-dir or to --save; give one of them"),
        (training.eval_iters < 0, f"--eval-iters {training.eval_iters} has to be 0 or more"),
        *_of_pairs(settings),
        *_of_task(settings),
    ]  # fmt: skip
    for wrong, message in refused:
        if wrong:
            raise UsageError(message)


def _of_levels(parallel: Parallel) -> list[tuple[bool, str]]:
    """(what is wrong, how it is said) of context parallelism on two levels."""
    levels, cp = parallel.hierarchical_context_parallel_sizes, parallel.context_parallel_size
    if parallel.cp_comm_type != ("a2a+p2p",):
        return [(levels is not None, "--hierarchical-context-parallel-sizes goes with --cp-comm-type a2a+p2p")]
    fits = levels is not None and len(levels) == 2 and min(levels) > 1 and prod(levels) == cp
    said = "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes NEAR FAR, of 2 or more, which make"
    return [(not fits, f"{said} --cp = {cp}")]


def _of_scores(settings: Settings) -> list[tuple[bool, str]]:
    """(what is wrong, how it is said) of QK-clip."""
    optimizer = settings.optimizer
    given = [name for name in ("qk_clip_threshold", "qk_clip_alpha") if name in settings.given]
    return [
        (bool(given) and not optimizer.qk_clip, f"--{'-'.join(given[:1]).replace('_', '-')} goes with --qk-clip"),
        (optimizer.qk_clip_threshold <= 0, f"--qk-clip-threshold {optimizer.qk_clip_threshold:g} has to be more than 0"),
        (not 0 <= optimizer.qk_clip_alpha <= 1, f"--qk-clip-alpha {optimizer.qk_clip_alpha:g} has to lie between 0 and 1"),
        (optimizer.qk_clip and settings.lora.wanted, "--qk-clip changes weights, which stay as they are beside adapters; leave it out"),
    ]  # fmt: skip


OTHER_DATA = (
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "mock_data", "finetune_data", "valid_finetune_data",
    "mask_prob", "short_seq_prob", "rampup_batch_size",
)  # fmt: skip
"""Flags that a run on a task has no use for."""


def _of_task(settings: Settings) -> list[tuple[bool, str]]:
    tasks, epochs = settings.tasks, settings.training.epochs
    given = [f"--{name.replace('_', '-')}" for name in vars(tasks) if name in settings.given]
    others = [f"--{name.replace('_', '-')}" for name in OTHER_DATA if name in settings.given]
    if tasks.task is None:
        return [(bool(given), f"{' '.join(given[:1])} goes with --task")]
    return [
        (bool(others), f"--task {tasks.task} learns from --train-data; leave {' '.join(others[:1])} out"),
        (
            epochs is None or epochs < 0,
            f"--task {tasks.task} needs --epochs: how often it goes through --train-data; 0 measures alone",
        ),
        (bool(epochs) and not tasks.train_data, f"--task {tasks.task} learns from --train-data, which is missing"),
        (
            "eval_iters" in settings.given and bool(settings.training.eval_iters) and not tasks.valid_data,
            "--eval-iters: evaluations are of --valid-data, which is missing; leave it out",
        ),
        (
            epochs == 0 and not tasks.valid_data,
            f"--task {tasks.task} --epochs 0 measures on --valid-data, which is missing",
        ),
    ]


def _of_pairs(settings: Settings) -> list[tuple[bool, str]]:
    """(what is wrong, how it is said) of learning from pairs."""
    dpo, saving = settings.dpo, settings.checkpointing
    given = [f"--{name.replace('_', '-')}" for name in vars(dpo) if name in settings.given]
    if not dpo.dpo:
        return [(bool(given), f"{' '.join(given[:1])} goes with --dpo")]
    same = saving.load and saving.save and os.path.realpath(saving.load) == os.path.realpath(saving.save)
    return [
        (not settings.data.finetune_data, "--dpo learns from --finetune-data, which is missing"),
        (saving.load is None, "--dpo needs --load, which is the reference model, also with --resume"),
        (bool(same), "--dpo: --load is the reference model and has to stay as it is; give another --save"),
        (dpo.dpo_beta <= 0, f"--dpo-beta {dpo.dpo_beta:g} has to be more than 0"),
        (not 0 <= dpo.dpo_label_smoothing < 0.5, f"--dpo-label-smoothing {dpo.dpo_label_smoothing:g} has to lie between 0 and 0.5"),
        (bool(dpo.dpo_label_smoothing) and dpo.dpo_loss != "sigmoid", "--dpo-label-smoothing goes with --dpo-loss sigmoid"),
        (settings.data.finetune_form is not None, "--finetune-form names a form of examples; pairs have their own, so leave it out"),
    ]  # fmt: skip
