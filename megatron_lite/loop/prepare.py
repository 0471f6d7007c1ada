"""Puts a run together: checkpoint or fresh weights, model, data, schedules; everything that is refused is refused here."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from megaconv.errors import LayoutError, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.adapter_runs import AdapterStart, find_adapters, start_adapters
from megatron_lite.checkpoint.restore import Start, find_start, load
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.sidecars import sidecars
from megatron_lite.checkpoint.state import Progress
from megatron_lite.checkpoint.task_head import with_head
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.data.tokenizer import NullTokenizer, Tokenizer
from megatron_lite.engine import Engine
from megatron_lite.loop import finetuning, plot, preference, tasks
from megatron_lite.loop.failure import all_or_none
from megatron_lite.loop.inputs import make_datasets, make_tokenizer
from megatron_lite.loop.launch import Place, Stop
from megatron_lite.loop.log import Meter, Sink, flops_per_token, open_sinks, peak_tflops
from megatron_lite.loop.node import once_a_node
from megatron_lite.loop.schedule import make_schedule
from megatron_lite.loop.train import Run, evaluations, total_samples
from megatron_lite.models.plan import check_computed
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.architecture import check_against, model_from_flags, model_type
from megatron_lite.settings.config import Balance, Optimizer, Settings, subjects
from megatron_lite.settings.contradictions import check_flags, check_steps
from megatron_lite.settings.kinds import check_kind
from megatron_lite.settings.learning import Dpo
from megatron_lite.settings.options import (
    FP8,
    Balancing,
    LossScale,
    ModelOptions,
    MuonOptions,
    OptimizerOptions,
    Preference,
    QkClip,
    Recompute,
)
from megatron_lite.settings.sizes import Sizes, work_out


def prepare(settings: Settings, place: Place, *, finetune: bool) -> Run:
    """Collective. Raises CheckpointError; for what has no part in the sizes on all ranks alike."""
    check_flags(settings)
    start = once_a_node(lambda: find_start(settings, finetune=finetune), place.node)
    check_steps(settings.training)
    check_kind(settings, model_type(settings, start.config if start is not None else None))
    task = tasks.task_of(settings, None if start is None else start.config, finetune=finetune)
    if task is not None and start is not None:
        start = with_head(start, task, settings.model.init_method_std, settings.training.seed, place.say)
    tokenizer = all_or_none(lambda: make_tokenizer(settings, start))
    config, dropouts = _model(settings, start, tokenizer)
    learned = None if task is None else all_or_none(lambda: tasks.read_task(settings, task))
    examples = None if learned is not None else all_or_none(lambda: finetuning.read_data(settings, tokenizer))
    settings = finetuning.with_defaults(settings, config, examples, place.say, finetune=finetune)
    adapters = once_a_node(lambda: find_adapters(settings, config), place.node)
    options = replace(model_options(settings, dropouts), lora=adapters.options if adapters is not None else None)
    if settings.dpo.dpo:
        options = preference.without_dropout(options, place.say)
    config = changed(config, {"dtype": options.dtype})
    sizes = work_out(settings, config, options, place.world)
    settings, packed = finetuning.with_epochs(settings, sizes, examples, place.say)
    settings = settings if learned is None else learned.with_epochs(settings, sizes, place.say)
    _check_savable(settings, config, sizes.layout)
    samples = total_samples(settings, sizes)
    schedule = make_schedule(settings.optimizer, settings.training, sizes.batch.full, samples)
    progress = start.progress if start is not None else Progress()
    progress = adapters.progress if adapters is not None else progress
    counts = _sample_counts(settings, sizes, progress)
    if learned is None:
        datasets = all_or_none(lambda: make_datasets(settings, config, tokenizer, sizes, counts, packed))
    else:
        datasets = learned.datasets(settings, tokenizer, sizes, counts)
    sinks = all_or_none(lambda: _sinks(settings, place))
    grid = make_grid(
        sizes.layout, sizes.dp, place.device, cp=sizes.cp, near=options.near, experts=config.experts.count > 0
    )
    engine = Engine(config, grid, options, optimizer_options(settings))
    if start is None:
        init_weights(engine, settings.model.init_method_std, settings.training.seed)
    elif options.preference is not None:
        datasets = preference.with_reference(
            engine, settings, start, place.node, datasets, sizes, tokenizer.vocab_size, place.say
        )
    else:
        load(engine, start)
    if adapters is not None:
        start_adapters(engine, adapters, settings.training.seed)
    peak = settings.logging.peak_tflops or peak_tflops(
        torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else None
    )
    flops = flops_per_token(config, sizes.seq, sizes.decoder_seq, frozen=adapters is not None)
    meter = Meter(flops, place.world, peak, total_samples(settings, sizes, progress))
    saver = _saver(settings, place, config, tokenizer, start)
    run = Run(
        settings, config, sizes, dropouts, place, engine, datasets, tokenizer.vocab_size, schedule, meter, saver, sinks, Stop(),
        progress=progress, exam=None if learned is None else learned.exam(settings, tokenizer, sizes),
    )  # fmt: skip
    run.saved = run.progress.iteration or None
    _introduce(run, start)
    if adapters is not None:
        _introduce_adapters(run, adapters)
    _mention(run, start, tokenizer)
    if packed is not None:
        finetuning.introduce(settings, sizes, packed, datasets[0], tokenizer, run.say)
    return run


def _model(settings: Settings, start: Start | None, tokenizer: Tokenizer) -> tuple[ModelConfig, Mapping[str, float]]:
    model, vocab = settings.model, tokenizer.vocab_size
    if start is None:
        given = None if settings.data.tokenizer_type == "NullTokenizer" else model.vocab_size  # that one adds a token
        config = with_token_ids(model_from_flags(settings, given or vocab), tokenizer)
        dropouts: Mapping[str, float] = {
            "attention_dropout": model.attention_dropout,
            "hidden_dropout": model.hidden_dropout,
        }
    else:
        config, dropouts = start.config, start.dropouts
        check_computed(config)  # before anything asks how it would be saved
        check_against(settings, config, dropouts, start.path)
    if vocab > config.vocab:
        raise UsageError(
            f"the tokenizer has {vocab:,} tokens, the model {config.vocab:,}; give the model's own tokenizer"
        )
    return config, dropouts


def with_token_ids(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """So that whoever generates with the model knows where a text begins and ends."""
    if isinstance(tokenizer, NullTokenizer):
        return config
    found = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.pad}
    return changed(config, {name: number for name, number in found.items() if number is not None})


def model_options(settings: Settings, dropouts: Mapping[str, float]) -> ModelOptions:
    precision, again = settings.precision, settings.recompute
    dtype = "bfloat16" if precision.bf16 else "float16" if precision.fp16 else "float32"
    recompute = Recompute(
        again.recompute_granularity, again.recompute_method or "uniform", again.recompute_num_layers or 1
    )
    return ModelOptions(
        dtype=dtype, sequence_parallel=settings.parallel.sequence_parallel, hidden_dropout=dropouts["hidden_dropout"],
        attention_dropout=dropouts["attention_dropout"], recompute=recompute, compile=again.compile,
        context=settings.parallel.cp_comm_type[0], near=(settings.parallel.hierarchical_context_parallel_sizes or (1,))[0],
        mtp_loss_scale=settings.training.mtp_loss_scaling_factor,
        preference=_preference(settings.dpo), fp8=_fp8(settings), balance=_balancing(settings.balance),
        dispatcher=settings.parallel.moe_token_dispatcher_type,
        vocab_divisor=settings.model.make_vocab_size_divisible_by, seed=settings.training.seed,
    )  # fmt: skip


def _fp8(settings: Settings) -> FP8 | None:
    asked = settings.precision
    if asked.fp8_format is None:
        return None
    ends = (
        (asked.num_layers_at_start_in_bf16, asked.num_layers_at_end_in_bf16) if asked.first_last_layers_bf16 else (0, 0)
    )
    return FP8(
        asked.fp8_format, asked.fp8_recipe, asked.fp8_margin, asked.fp8_amax_history_len, asked.fp8_amax_compute_algo,
        not asked.no_fp8_wgrad, *ends, settings.checkpointing.transformer_impl == "transformer_engine",
    )  # fmt: skip


def _preference(dpo: Dpo) -> Preference | None:
    return Preference(dpo.dpo_beta, dpo.dpo_loss, dpo.dpo_label_smoothing) if dpo.dpo else None


def _balancing(balance: Balance) -> Balancing:
    named = zip(balance.moe_router_load_balancing_type, balance.moe_aux_loss_coeff, strict=True)
    losses = tuple((name, coefficient) for name, coefficient in named if name != "none" and coefficient)
    dtype = {"fp32": "float32", "fp64": "float64", None: None}[balance.moe_router_dtype]
    return Balancing(
        losses, balance.moe_z_loss_coeff, balance.moe_router_bias_update_rate, balance.moe_expert_capacity_factor,
        balance.moe_token_drop_policy, dtype,
    )  # fmt: skip


def _muon(optimizer: Optimizer) -> MuonOptions:
    return MuonOptions(
        optimizer.muon_momentum, optimizer.muon_use_nesterov, optimizer.muon_num_ns_steps, optimizer.muon_coefficient_type,
        optimizer.muon_scale_mode, optimizer.muon_extra_scale_factor, optimizer.muon_fp32_matmul_prec, optimizer.muon_tp_mode,
    )  # fmt: skip


def optimizer_options(settings: Settings) -> OptimizerOptions:
    optimizer, precision, parallel = settings.optimizer, settings.precision, settings.parallel
    scale = LossScale(
        precision.initial_loss_scale, precision.min_loss_scale, precision.loss_scale_window, precision.hysteresis,
        precision.loss_scale,
    )  # fmt: skip
    default = OptimizerOptions()
    return OptimizerOptions(
        kind=optimizer.kind, muon=_muon(optimizer),
        betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        eps=optimizer.adam_eps, momentum=optimizer.sgd_momentum, clip_grad=optimizer.clip_grad,
        distributed=parallel.use_distributed_optimizer or optimizer.optimizer == "dist_muon",
        bf16_reduce=parallel.grad_reduce_in_bf16,
        bucket_elements=parallel.ddp_bucket_size or default.bucket_elements,
        overlap_grad_reduce=parallel.overlap_grad_reduce, overlap_param_gather=parallel.overlap_param_gather, loss_scale=scale,
        qk_clip=QkClip(optimizer.qk_clip_alpha, optimizer.qk_clip_threshold) if optimizer.qk_clip else None,
        tell_scores=settings.logging.log_max_attention_logit,
    )  # fmt: skip


def _check_savable(settings: Settings, config: ModelConfig, layout: Layout) -> None:
    """Raises LayoutError or UsageError for a checkpoint that couldn't be written, before there is anything to lose."""
    saving, files = settings.checkpointing, layout.etp * layout.ep
    if saving.save is not None and layout.split_rank and saving.ckpt_format == "torch":
        raise LayoutError(
            "--ckpt-format torch can't be had for a T5 with pipeline stages; leave it out: torch_dist has no stages, and "
            "megaconv convert --saver core --ckpt-format torch makes rank files of it"
        )
    if saving.save is not None and not config.norm.final and saving.transformer_impl != "local":
        raise UsageError(
            "the model has no norms at the end of its stacks, as Megatron's local layers without Transformer Engine; "
            "--transformer-impl local saves it so"
        )
    local = saving.ckpt_format == "torch" and saving.transformer_impl == "local"
    if saving.save is not None and local and config.latent.kv_rank and layout.tp > 1:
        raise LayoutError(
            f"local layers of latent attention shard over tp = {layout.tp} what each rank has all of here, so that their rank files can't "
            "be written; leave --transformer-impl out, or take torch_dist"
        )
    if saving.save is not None and saving.ckpt_format == "torch" and config.experts.count and files < layout.tp:
        raise LayoutError(
            f"--ckpt-format torch has a file for each rank of etp x ep = {layout.etp} x {layout.ep} = {files}, too few for the parts of "
            f"tp = {layout.tp} ranks; take --ep {layout.tp} or more, or torch_dist"
        )
    if saving.save is not None and saving.ckpt_format == "torch" and layout.tp % layout.etp:
        raise LayoutError(
            f"--ckpt-format torch has files by tensor ranks, of which etp = {layout.etp} has to divide tp = {layout.tp}; "
            "take another --expert-tensor-parallel-size, or torch_dist"
        )


def _sample_counts(settings: Settings, sizes: Sizes, progress: Progress) -> list[int]:
    each = settings.training.eval_iters * sizes.batch.full
    if settings.training.train_samples is not None:
        smallest = min(sizes.batch.sizes())
        rounds = settings.training.train_samples // smallest // settings.training.eval_interval + 1
    else:
        rounds = evaluations(settings)
    return [total_samples(settings, sizes, progress) + sizes.batch.full, each * rounds, each]


def _sinks(settings: Settings, place: Place) -> list[Sink]:
    if place.rank:
        return []
    if settings.logging.plot:
        plot.check_installed()
    plain: dict[str, Any] = {}
    for subject in subjects():
        plain |= vars(getattr(settings, subject))
    return open_sinks(settings.logging, plain)


def _saver(
    settings: Settings, place: Place, config: ModelConfig, tokenizer: Tokenizer, start: Start | None
) -> Saver | None:
    saving = settings.checkpointing
    if saving.save is None:
        return None
    beside = sidecars(settings.data, tokenizer, config, None if start is None else start.files)
    return Saver(
        Path(saving.save), "adapter" if settings.lora.wanted else saving.ckpt_format, place.rank, place.save_group, beside,
        saving.keep_last, saving.async_save,
    )  # fmt: skip


def _introduce(run: Run, start: Start | None) -> None:
    sizes, progress = run.sizes, run.progress
    parameters = sum(tensor.numel() for _, _, tensor in run.engine.parameters())
    assert run.engine.optimizer is not None
    model = f"{run.config.family}, {run.config.layer_count} layers of {run.config.hidden}, {run.engine.options.dtype}"
    context = f", CP {sizes.cp}" if sizes.cp > 1 else ""
    run.say(f"{run.place}; {sizes.layout}{context}, DP {sizes.dp}")
    frozen = run.engine.options.lora is not None
    run.say(f"{model}; {parameters:,} parameters on this rank, {'frozen' if frozen else _bytes_each(run)}")
    if start is not None:
        optimizer = "with" if start.with_optimizer else "without"
        run.say(f"weights of {start.path} ({start.header.source}), {optimizer} optimizer state")
    if progress.iteration:
        run.say(f"continuing after step {progress.iteration}, {progress.consumed_samples} samples")
    for dataset, what in zip(run.datasets[1:], ("validation", "test"), strict=True):
        if dataset is None and run.settings.training.eval_iters:
            run.say(f"no data for {what}: none will be made")


def _bytes_each(run: Run) -> str:
    assert run.engine.optimizer is not None
    return f"{run.engine.optimizer.bytes_per_parameter():.2f} bytes each with gradients and optimizer"


def _introduce_adapters(run: Run, start: AdapterStart) -> None:
    options, load = start.options, run.settings.checkpointing.load
    trained = sum(prod(info.native.shape) for infos in run.engine.adapters for info in infos)
    of_what = f"from {start.place}" if start.place is not None else "fresh"
    dropout = f", dropout {options.dropout:g}" if options.dropout else ""
    kind = "rsLoRA" if options.rslora else "LoRA"
    run.say(
        f"{kind} of rank {options.rank}, alpha {options.alpha:g}{dropout} on {' '.join(options.targets)}, {of_what}: "
        f"{trained:,} parameters on this rank, {_bytes_each(run)}"
    )
    if start.base is not None and start.base != load:
        run.say(f"warning: the adapter was trained beside {start.base}; --load is {load}")


def _mention(run: Run, start: Start | None, tokenizer: Tokenizer) -> None:
    """What was decided without being asked, and what is otherwise than in the run that is continued."""
    settings, seq = run.settings, run.sizes.seq
    if settings.training.seq_length is None and seq < run.config.max_positions:
        run.say(
            f"sequences of {seq} tokens, though the model is for {run.config.max_positions}: --seq-length takes more"
        )
    if isinstance(tokenizer, NullTokenizer) and settings.data.tokenizer_type is None:
        run.say(f"without a tokenizer: data are token ids below {tokenizer.vocab_size}")
    if start is None and settings.checkpointing.load is not None:
        run.say(f"no checkpoint in {settings.checkpointing.load} yet: starting from random weights")
    if start is not None:
        for name, before, now in _changes(run, start.arguments):
            run.say(f"changed since the checkpoint: {name} {before} -> {now}")


DATA_PLAN = (
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "finetune_data", "finetune_form",
    "finetune_turns", "mock_data", "split", "seed", "reset_position_ids", "reset_attention_mask", "eod_mask_loss",
    "dpo", "dpo_beta", "dpo_loss", "dpo_label_smoothing", "mask_prob", "short_seq_prob",
    "decoder_seq_length", "vocab_extra_ids", "task", "train_data", "keep_last_batch",
)  # fmt: skip
"""Settings that decide which samples come next."""


def _changes(run: Run, before: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(setting, in the checkpoint, now)."""
    chosen = run.settings.data, run.settings.masked, run.settings.training, run.settings.dpo, run.settings.tasks
    values = {name: value for subject in chosen for name, value in vars(subject).items()}
    now = {name: list(values[name]) if isinstance(values[name], tuple) else values[name] for name in DATA_PLAN}
    now |= {"global_batch_size": run.sizes.batch.full, "seq_length": run.sizes.seq}
    return [(name, before[name], value) for name, value in now.items() if name in before and before[name] != value]
