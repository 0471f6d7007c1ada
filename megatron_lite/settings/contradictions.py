"""Checks for flags that contradict each other, lack a required flag, or are out of range. No check needs the model."""

from collections.abc import Iterator
from math import isfinite, prod

from formats.stores.addresses import is_store
from megaconv.errors import UsageError
from megatron_lite.settings.config import Logging, Settings, Training
from megatron_lite.settings.optimizers import OPTIMIZERS
from megatron_lite.settings.options import CONTEXT
from megatron_lite.settings.parallel import Balance, Parallel

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""The values of --moe-router-load-balancing-type."""

LARGEST_BETA = 1 - 2**-8
"""The largest beta with which a moment in bf16 still decays: half of its last bit is up to 2**-8 of it."""

Judged = Iterator[tuple[object, str]]
"""(whether the flags are wrong, the message for it)."""


def check_steps(training: Training) -> None:
    """Raise UsageError if the run has no length.

    This check is separate: if the model is missing too, the missing model is reported first.
    """
    if not (training.train_iters or training.train_samples) and training.epochs is None:
        raise UsageError(
            "--train-iters (or --train-samples, or --epochs of --finetune-data) is missing"
        )


def check_flags(settings: Settings) -> None:
    """Raise UsageError for the first check that fails."""
    for judge in (
        _counts, _optimizer, _moments, _main_grads, _sharding, _scores, _context, lambda given: _balance(given.balance), _precision, _fp8,
        _lengths, _saving, _recompute, _offload, _dropouts, lambda given: _garbage(given.training), _profile,
    ):  # fmt: skip
        for wrong, message in judge(settings):
            if wrong:
                raise UsageError(message)


def flag_name(name: str) -> str:
    """Return a setting's flag."""
    return f"--{name.replace('_', '-')}"


def _counts(settings: Settings) -> Judged:
    training, saving, logging = settings.training, settings.checkpointing, settings.logging
    positive = {
        "seq_length": training.seq_length, "encoder_seq_length": training.encoder_seq_length,
        "decoder_seq_length": training.decoder_seq_length,
        "micro_batch_size": training.micro_batch_size, "global_batch_size": training.global_batch_size,
        "train_iters": training.train_iters, "train_samples": training.train_samples,
        "epochs": None if settings.tasks.task else training.epochs,
        "eval_interval": training.eval_interval,
        "lora_rank": settings.lora.lora_rank, "exit_interval": training.exit_interval, "save_interval": saving.save_interval,
        "early_stopping_patience": training.early_stopping_patience,
        "check_weight_hash_across_dp_replicas_interval": training.check_weight_hash_across_dp_replicas_interval,
        "fp8_amax_history_len": settings.precision.fp8_amax_history_len,
        "keep_last": saving.keep_last, "save_delta": saving.save_delta, "muon_num_ns_steps": settings.optimizer.muon_num_ns_steps,
        "log_interval": logging.log_interval, "recompute_num_layers": settings.recompute.recompute_num_layers,
    }  # fmt: skip
    for name, value in positive.items():
        yield value is not None and value < 1, f"{flag_name(name)} {value} must be 1 or more"
    alpha = settings.lora.lora_alpha
    yield alpha is not None and not isfinite(alpha), f"--lora-alpha {alpha} must be a finite number"
    yield training.eval_iters < 0, f"--eval-iters {training.eval_iters} must be 0 or more"


def _optimizer(settings: Settings) -> Judged:
    """Checks of runs that an optimizer can't train."""
    chosen = OPTIMIZERS[settings.optimizer.optimizer]
    flag = f"--optimizer {chosen.kind}"
    yield (
        settings.lora.wanted and not chosen.trains_adapters,
        f"{flag} is for whole matrices; take adam to train adapters",
    )
    yield (
        settings.precision.fp16 and not chosen.trains_fp16,
        f"{flag} is for bf16 and fp32, as in Megatron core; leave --fp16 out",
    )


def _moments(settings: Settings) -> Judged:
    """Checks of Adam's moments in bf16."""
    optimizer = settings.optimizer
    for name, beta in (("exp_avg", optimizer.adam_beta1), ("exp_avg_sq", optimizer.adam_beta2)):
        field = f"{name}_dtype"
        dtype = getattr(optimizer, field)
        flag = f"{flag_name(field)} {dtype}"
        if dtype == "fp32":
            continue
        yield (
            not optimizer.use_precision_aware_optimizer,
            f"{flag} requires --use-precision-aware-optimizer",
        )
        yield not OPTIMIZERS[optimizer.optimizer].narrow_moments, f"{flag} is for --optimizer adam"
        beta_flag = "--adam-beta1" if name == "exp_avg" else "--adam-beta2"
        yield (
            beta > LARGEST_BETA,
            f"{flag} with {beta_flag} {beta:g}: its 8 bits would round away each decay of the moment; give {beta_flag} 0.996 or less",
        )


def _main_grads(settings: Settings) -> Judged:
    """Checks of gradients that are summed in bf16."""
    optimizer = settings.optimizer
    if optimizer.main_grads_dtype == "fp32":
        return
    flag = f"--main-grads-dtype {optimizer.main_grads_dtype}"
    yield (
        not optimizer.use_precision_aware_optimizer,
        f"{flag} requires --use-precision-aware-optimizer",
    )
    yield not OPTIMIZERS[optimizer.optimizer].narrow_moments, f"{flag} is for --optimizer adam"
    yield not settings.precision.bf16, f"{flag} requires --bf16"


def _sharding(settings: Settings) -> Judged:
    """Checks of the state, gradients and parameters that data-parallel ranks shard."""
    parallel = settings.parallel
    strategy = parallel.data_parallel_sharding_strategy
    flag = f"--data-parallel-sharding-strategy {strategy}"
    sharded_by = OPTIMIZERS[settings.optimizer.optimizer].distributed
    yield (
        strategy == "no_shard" and (parallel.use_distributed_optimizer or sharded_by),
        f"{flag} contradicts the distributed optimizer, which shards its state: leave one of them out",
    )
    yield (
        strategy == "optim_grads" and parallel.pipeline_model_parallel_size > 1,
        f"{flag} requires --pp 1, because it would reduce all gradients once for each microbatch; "
        "take optim, or optim_grads_params if memory is short",
    )


def _scores(settings: Settings) -> Judged:
    """Checks of QK-clip."""
    optimizer = settings.optimizer
    threshold, alpha = optimizer.qk_clip_threshold, optimizer.qk_clip_alpha
    for name in ("qk_clip_threshold", "qk_clip_alpha"):
        yield (
            name in settings.given and not optimizer.qk_clip,
            f"{flag_name(name)} requires --qk-clip",
        )
    yield threshold <= 0, f"--qk-clip-threshold {threshold:g} must be more than 0"
    yield not 0 <= alpha <= 1, f"--qk-clip-alpha {alpha:g} has to lie between 0 and 1"
    yield (
        optimizer.qk_clip and settings.lora.wanted,
        "--qk-clip changes weights, but training of adapters keeps them fixed; leave it out",
    )


def _context(settings: Settings) -> Judged:
    parallel = settings.parallel
    yield from _levels(parallel)
    known = {(word,) for word in CONTEXT}
    yield (
        parallel.cp_comm_type not in known,
        f"--cp-comm-type {' '.join(parallel.cp_comm_type)} is not supported; choose one of {', '.join(CONTEXT)} for all layers",
    )


def _levels(parallel: Parallel) -> Judged:
    """Checks of context parallelism with two levels."""
    levels, cp = parallel.hierarchical_context_parallel_sizes, parallel.context_parallel_size
    if parallel.cp_comm_type != ("a2a+p2p",):
        yield (
            levels is not None,
            "--hierarchical-context-parallel-sizes requires --cp-comm-type a2a+p2p",
        )
        return
    fits = levels is not None and len(levels) == 2 and min(levels) > 1 and prod(levels) == cp
    rule = "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes NEAR FAR, of 2 or more, which make"
    yield not fits, f"{rule} --cp = {cp}"


def _balance(balance: Balance) -> Judged:
    kinds = balance.moe_router_load_balancing_type
    unknown = sorted(set(kinds) - set(BALANCING))
    yield (
        unknown,
        f"--moe-router-load-balancing-type {' '.join(unknown)} is not supported yet; choose from {', '.join(BALANCING)}",
    )
    yield (
        len(kinds) != len(balance.moe_aux_loss_coeff),
        "--moe-router-load-balancing-type and --moe-aux-loss-coeff need as many words as numbers",
    )
    # As in Megatron, a negative factor sets no limit.
    given = balance.moe_expert_capacity_factor
    factor = -1.0 if given is None else given
    yield (
        factor == 0 or not isfinite(factor),
        f"--moe-expert-capacity-factor {factor:g} must be more than 0; leave it out for experts without a limit",
    )
    yield (
        balance.moe_pad_expert_input_to_capacity and factor < 0,
        "--moe-pad-expert-input-to-capacity requires --moe-expert-capacity-factor",
    )


def _precision(settings: Settings) -> Judged:
    precision = settings.precision
    kinds = precision.bf16 + precision.fp16 + precision.fp32
    yield kinds > 1, "--bf16, --fp16 and --fp32 contradict each other"
    yield (
        settings.parallel.grad_reduce_in_bf16 and not precision.bf16,
        "--grad-reduce-in-bf16 requires --bf16",
    )


def _fp8(settings: Settings) -> Judged:
    precision = settings.precision
    yield (
        min(precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16) < 0,
        "layers in bf16 must be 0 or more",
    )
    if not precision.fp8_format:
        return
    yield not precision.bf16, "--fp8-format requires --bf16 for all other computation"
    yield (
        settings.recompute.compile,
        "--fp8-format can't be combined with --compile: scales are kept between products",
    )
    yield (
        settings.lora.wanted,
        "--fp8-format can't be combined with adapters, which keep the model's precision",
    )
    yield (
        precision.fp8_format == "hybrid" and precision.fp8_recipe in ("blockwise", "mxfp8"),
        f"--fp8-recipe {precision.fp8_recipe} has small blocks, so that gradients are in e4m3 too: take --fp8-format e4m3",
    )


def _lengths(settings: Settings) -> Judged:
    training = settings.training
    lengths = training.train_iters, training.train_samples, training.epochs
    yield (
        sum(map(bool, lengths)) > 1,
        "give --train-iters, --train-samples or --epochs, not several of them",
    )
    yield from _lengths_of_schedules(settings)
    data = settings.data
    is_one_corpus = data.data_path is not None and len(data.data_path) == 1
    yield (
        training.epochs is not None
        and not (data.finetune_data or settings.tasks.task or is_one_corpus),
        "--epochs counts passes over --finetune-data or over one corpus of --data-path",
    )


def _lengths_of_schedules(settings: Settings) -> Judged:
    """Checks that the learning rate's lengths have the unit of the run's length, as in Megatron."""
    optimizer = settings.optimizer
    counts_samples = settings.training.train_samples is not None
    unit, other = ("samples", "iters") if counts_samples else ("iters", "samples")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        wrong, right = flag_name(f"{name}_{other}"), flag_name(f"{name}_{unit}")
        length = "--train-samples" if counts_samples else "a run without --train-samples"
        yield (
            getattr(optimizer, f"{name}_{other}"),
            f"{wrong} has no effect beside {length}; give {right}",
        )
    warmup = f"lr_warmup_{unit}"
    yield (
        optimizer.lr_warmup_fraction is not None and getattr(optimizer, warmup),
        f"--lr-warmup-fraction and {flag_name(warmup)} are two lengths of the warm-up; give one of them",
    )


def _saving(settings: Settings) -> Judged:
    saving = settings.checkpointing
    yield saving.save_interval and not saving.save, "--save-interval needs --save"
    yield saving.resume and not saving.save, "--resume continues from --save, which is missing"
    yield saving.keep_best and not saving.save, "--keep-best needs --save"
    yield saving.save_delta and not saving.save, "--save-delta needs --save"
    yield (
        saving.save_delta and saving.keep_best,
        "--save-delta keeps all checkpoints, so there is nothing to do for --keep-best; leave one of them out",
    )
    yield (
        saving.save_delta and saving.keep_last,
        "--save-delta keeps all checkpoints, and --keep-last removes them; leave one of them out",
    )
    yield (
        saving.save_delta and saving.save and is_store(saving.save),
        "--save-delta needs a directory: patches of checkpoints in a store aren't supported",
    )
    yield (
        saving.save_delta and settings.lora.wanted,
        "--save-delta: adapters are small and have no patches; leave it out",
    )


def _recompute(settings: Settings) -> Judged:
    full = settings.recompute.recompute_granularity == "full"
    method = settings.recompute.recompute_method
    yield (
        full and not method,
        "--recompute-granularity full needs --recompute-method uniform or block",
    )
    yield method and not full, "--recompute-method requires --recompute-granularity full"


def _offload(settings: Settings) -> Judged:
    asked, parallel = settings.recompute, settings.parallel
    layers = asked.cpu_offloading_num_layers
    yield layers < 0, f"--cpu-offloading-num-layers {layers} must be 0 or more"
    if not layers:
        return
    yield (
        asked.recompute_granularity is not None,
        "--cpu-offloading-num-layers can't be combined with --recompute-granularity, as in Megatron core; take one of them",
    )
    yield (
        parallel.pipeline_model_parallel_size > 1,
        "--cpu-offloading-num-layers can't be combined with --pipeline-model-parallel-size, as in Megatron core",
    )


def _dropouts(settings: Settings) -> Judged:
    given = {
        "attention_dropout": settings.model.attention_dropout,
        "hidden_dropout": settings.model.hidden_dropout,
        "retro_encoder_attention_dropout": settings.retro.retro_encoder_attention_dropout,
        "retro_encoder_hidden_dropout": settings.retro.retro_encoder_hidden_dropout,
        "lora_dropout": settings.lora.lora_dropout,
    }
    for name, value in given.items():
        yield not 0 <= value < 1, f"{flag_name(name)} {value:g} has to lie between 0 and 1"


def _garbage(training: Training) -> Judged:
    interval = training.manual_gc_interval
    yield interval < 0, f"--manual-gc-interval {interval} must be 0 or more"
    yield interval and not training.manual_gc, "--manual-gc-interval requires --manual-gc"


def _profile(settings: Settings) -> Judged:
    logging: Logging = settings.logging
    first, last = logging.profile_step_start, logging.profile_step_end
    yield (
        logging.use_pytorch_profiler and not logging.profile,
        "--use-pytorch-profiler requires --profile",
    )
    if not logging.profile:
        return
    yield (
        not 0 <= first < last,
        f"--profile-step-end {last} must be more than --profile-step-start {first}",
    )
    yield (
        logging.use_pytorch_profiler
        and not logging.tensorboard_dir
        and is_store(settings.checkpointing.save or "s3://"),
        "--use-pytorch-profiler writes to --tensorboard-dir or to a directory of --save; give one of them",
    )
