"""Flags that contradict each other, lack one that they need, or have numbers that can't be; all judged without the model."""

import os
from collections.abc import Iterator
from math import prod

from megaconv.errors import UsageError
from megatron_lite.settings.config import Balance, Logging, Parallel, Settings, Training
from megatron_lite.settings.options import CONTEXT

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""What --moe-router-load-balancing-type can be."""

OTHER_DATA = (
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "mock_data", "finetune_data", "valid_finetune_data",
    "mask_prob", "short_seq_prob", "rampup_batch_size",
)  # fmt: skip
"""Settings that a run on a task has no use for."""

Judged = Iterator[tuple[object, str]]
"""(whether it is wrong, what is said then)"""


def check_steps(training: Training) -> None:
    """Apart from the other flags: where the model is missing too, that is what is wrong. Raises UsageError."""
    if not (training.train_iters or training.train_samples) and training.epochs is None:
        raise UsageError("--train-iters (or --train-samples, or --epochs of --finetune-data) is missing")


def check_flags(settings: Settings) -> None:
    """Raises UsageError for the first that is wrong."""
    for judge in (
        _counts, _muon, _scores, _context, lambda given: _balance(given.balance), _precision, _fp8, _lengths, _saving, _recompute,
        _adapters, lambda given: _garbage(given.training), _profile, _pairs, _task,
    ):  # fmt: skip
        for wrong, message in judge(settings):
            if wrong:
                raise UsageError(message)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _counts(settings: Settings) -> Judged:
    training, saving, logging = settings.training, settings.checkpointing, settings.logging
    positive = {
        "micro_batch_size": training.micro_batch_size,
        "train_iters": training.train_iters, "train_samples": training.train_samples,
        "epochs": None if settings.tasks.task else training.epochs,
        "eval_interval": training.eval_interval,
        "lora_rank": settings.lora.lora_rank, "exit_interval": training.exit_interval, "save_interval": saving.save_interval,
        "check_weight_hash_across_dp_replicas_interval": training.check_weight_hash_across_dp_replicas_interval,
        "fp8_amax_history_len": settings.precision.fp8_amax_history_len,
        "keep_last": saving.keep_last, "muon_num_ns_steps": settings.optimizer.muon_num_ns_steps,
        "log_interval": logging.log_interval, "recompute_num_layers": settings.recompute.recompute_num_layers,
    }  # fmt: skip
    for name, value in positive.items():
        yield value is not None and value < 1, f"{_flag(name)} {value} has to be 1 or more"
    yield training.eval_iters < 0, f"--eval-iters {training.eval_iters} has to be 0 or more"


def _muon(settings: Settings) -> Judged:
    muon = settings.optimizer.kind == "muon"
    yield muon and settings.lora.wanted, "--optimizer muon is for whole matrices; take adam to train adapters"
    yield (
        muon and settings.precision.fp16,
        "--optimizer muon is for bf16 and fp32, as in Megatron core; leave --fp16 out",
    )


def _scores(settings: Settings) -> Judged:
    """Of QK-clip."""
    optimizer = settings.optimizer
    threshold, alpha = optimizer.qk_clip_threshold, optimizer.qk_clip_alpha
    for name in ("qk_clip_threshold", "qk_clip_alpha"):
        yield name in settings.given and not optimizer.qk_clip, f"{_flag(name)} goes with --qk-clip"
    yield threshold <= 0, f"--qk-clip-threshold {threshold:g} has to be more than 0"
    yield not 0 <= alpha <= 1, f"--qk-clip-alpha {alpha:g} has to lie between 0 and 1"
    yield (
        optimizer.qk_clip and settings.lora.wanted,
        "--qk-clip changes weights, which stay as they are beside adapters; leave it out",
    )


def _context(settings: Settings) -> Judged:
    parallel = settings.parallel
    yield from _levels(parallel)
    known = {(word,) for word in CONTEXT}
    yield (
        parallel.cp_comm_type not in known,
        f"--cp-comm-type {' '.join(parallel.cp_comm_type)} can't be had; take one of {', '.join(CONTEXT)} for all layers",
    )


def _levels(parallel: Parallel) -> Judged:
    """Of context parallelism on two levels."""
    levels, cp = parallel.hierarchical_context_parallel_sizes, parallel.context_parallel_size
    if parallel.cp_comm_type != ("a2a+p2p",):
        yield levels is not None, "--hierarchical-context-parallel-sizes goes with --cp-comm-type a2a+p2p"
        return
    fits = levels is not None and len(levels) == 2 and min(levels) > 1 and prod(levels) == cp
    said = "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes NEAR FAR, of 2 or more, which make"
    yield not fits, f"{said} --cp = {cp}"


def _balance(balance: Balance) -> Judged:
    kinds = balance.moe_router_load_balancing_type
    unknown = sorted(set(kinds) - set(BALANCING))
    yield (
        unknown,
        f"--moe-router-load-balancing-type {' '.join(unknown)} can't be had yet; there are {', '.join(BALANCING)}",
    )
    yield (
        len(kinds) != len(balance.moe_aux_loss_coeff),
        "--moe-router-load-balancing-type and --moe-aux-loss-coeff need as many words as numbers",
    )


def _precision(settings: Settings) -> Judged:
    precision = settings.precision
    kinds = precision.bf16 + precision.fp16 + precision.fp32
    yield kinds > 1, "--bf16, --fp16 and --fp32 contradict each other"
    yield (
        settings.parallel.grad_reduce_in_bf16 and not precision.bf16,
        "--grad-reduce-in-bf16 goes with --bf16",
    )


def _fp8(settings: Settings) -> Judged:
    precision = settings.precision
    yield (
        min(precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16) < 0,
        "layers in bf16 have to be 0 or more",
    )
    if not precision.fp8_format:
        return
    yield not precision.bf16, "--fp8-format goes with --bf16, in which everything else is then computed"
    yield (
        settings.recompute.compile,
        "--fp8-format can't be had with --compile: scales are kept between products",
    )
    yield (
        settings.lora.wanted,
        "--fp8-format can't be had with adapters, which keep to the model's precision",
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
    yield (
        training.epochs is not None and not (settings.data.finetune_data or settings.tasks.task),
        "--epochs counts examples: it goes with --finetune-data",
    )


def _saving(settings: Settings) -> Judged:
    saving = settings.checkpointing
    yield saving.save_interval and not saving.save, "--save-interval needs --save"
    yield saving.resume and not saving.save, "--resume continues from --save, which is missing"


def _recompute(settings: Settings) -> Judged:
    full, method = settings.recompute.recompute_granularity == "full", settings.recompute.recompute_method
    yield full and not method, "--recompute-granularity full needs --recompute-method uniform or block"
    yield method and not full, "--recompute-method goes with --recompute-granularity full"


def _adapters(settings: Settings) -> Judged:
    dropout = settings.lora.lora_dropout
    yield not 0 <= dropout < 1, f"--lora-dropout {dropout:g} has to lie between 0 and 1"


def _garbage(training: Training) -> Judged:
    interval = training.manual_gc_interval
    yield interval < 0, f"--manual-gc-interval {interval} has to be 0 or more"
    yield interval and not training.manual_gc, "--manual-gc-interval goes with --manual-gc"


def _profile(settings: Settings) -> Judged:
    logging: Logging = settings.logging
    first, last = logging.profile_step_start, logging.profile_step_end
    yield logging.use_pytorch_profiler and not logging.profile, "--use-pytorch-profiler goes with --profile"
    if not logging.profile:
        return
    yield not 0 <= first < last, f"--profile-step-end {last} has to be more than --profile-step-start {first}"
    yield (
        logging.use_pytorch_profiler and not (logging.tensorboard_dir or settings.checkpointing.save),
        "--use-pytorch-profiler writes to --tensorboard-dir or to --save; give one of them",
    )


def _pairs(settings: Settings) -> Judged:
    """Of learning from pairs."""
    dpo, saving = settings.dpo, settings.checkpointing
    if not dpo.dpo:
        for name in vars(dpo):
            yield name in settings.given, f"{_flag(name)} goes with --dpo"
        return
    same = saving.load and saving.save and os.path.realpath(saving.load) == os.path.realpath(saving.save)
    smoothing = dpo.dpo_label_smoothing
    yield not settings.data.finetune_data, "--dpo learns from --finetune-data, which is missing"
    yield saving.load is None, "--dpo needs --load, which is the reference model, also with --resume"
    yield same, "--dpo: --load is the reference model and has to stay as it is; give another --save"
    yield dpo.dpo_beta <= 0, f"--dpo-beta {dpo.dpo_beta:g} has to be more than 0"
    yield not 0 <= smoothing < 0.5, f"--dpo-label-smoothing {smoothing:g} has to lie between 0 and 0.5"
    yield smoothing and dpo.dpo_loss != "sigmoid", "--dpo-label-smoothing goes with --dpo-loss sigmoid"
    yield (
        settings.data.finetune_form is not None,
        "--finetune-form names a form of examples; pairs have their own, so leave it out",
    )


def _task(settings: Settings) -> Judged:
    tasks, epochs = settings.tasks, settings.training.epochs
    if tasks.task is None:
        for name in vars(tasks):
            yield name in settings.given, f"{_flag(name)} goes with --task"
        return
    for name in OTHER_DATA:
        yield name in settings.given, f"--task {tasks.task} learns from --train-data; leave {_flag(name)} out"
    yield (
        epochs is None or epochs < 0,
        f"--task {tasks.task} needs --epochs: how often it goes through --train-data; 0 measures alone",
    )
    yield epochs and not tasks.train_data, f"--task {tasks.task} learns from --train-data, which is missing"
    yield (
        "eval_iters" in settings.given and settings.training.eval_iters and not tasks.valid_data,
        "--eval-iters: evaluations are of --valid-data, which is missing; leave it out",
    )
    yield (
        epochs == 0 and not tasks.valid_data,
        f"--task {tasks.task} --epochs 0 measures on --valid-data, which is missing",
    )
