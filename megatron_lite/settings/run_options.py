"""Converts the settings of a run to the options of its model and of its optimizer."""

from collections.abc import Mapping

from megaconv.errors import UsageError
from megatron_lite.settings.config import Settings
from megatron_lite.settings.optimization import Optimizer
from megatron_lite.settings.optimizers import OPTIMIZERS
from megatron_lite.settings.options import (
    FP8,
    Balancing,
    LoRA,
    LossScale,
    ModelOptions,
    MuonOptions,
    OptimizerOptions,
    QkClip,
    Recompute,
    RetrievalOptions,
)
from megatron_lite.settings.parallel import Balance


def model_options(settings: Settings, dropouts: Mapping[str, float]) -> ModelOptions:
    """Return the options of the model. dropouts: hidden_dropout and attention_dropout."""
    again = settings.recompute
    recompute = Recompute(
        again.recompute_granularity,
        again.recompute_method or "uniform",
        again.recompute_num_layers or 1,
    )
    return ModelOptions(
        dtype=settings.precision.dtype, sequence_parallel=settings.parallel.sequence_parallel, hidden_dropout=dropouts["hidden_dropout"],
        attention_dropout=dropouts["attention_dropout"], recompute=recompute, compile=again.compile, attention=again.attention_backend,
        offloaded_layers=again.cpu_offloading_num_layers,
        context=settings.parallel.cp_comm_type[0], near=(settings.parallel.hierarchical_context_parallel_sizes or (1,))[0],
        mtp_loss_scale=settings.training.mtp_loss_scaling_factor,
        retrieval=RetrievalOptions(
            settings.retro.retro_attention_gate, settings.retro.retro_encoder_hidden_dropout,
            settings.retro.retro_encoder_attention_dropout,
        ),
        fp8=_fp8(settings), balance=_balancing(settings.balance),
        dispatcher=settings.parallel.moe_token_dispatcher_type,
        vocab_divisor=settings.model.make_vocab_size_divisible_by, seed=settings.training.seed,
        local_layers=settings.checkpointing.transformer_impl == "local",
    )  # fmt: skip


def adapter_options(settings: Settings) -> LoRA | None:
    """Return the options of new adapters; None for a run that trains all weights.

    Raises UsageError for flags of adapters without a rank.
    """
    lora = settings.lora
    rank = lora.lora_rank
    if rank is None:
        for name in vars(lora):
            if name in settings.given:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} requires --lora-rank (or --lora-load)")
        return None
    alpha = 2.0 * rank if lora.lora_alpha is None else lora.lora_alpha
    return LoRA(
        rank, alpha, lora.lora_targets, lora.lora_dropout, lora.lora_rslora, dora=lora.lora_dora
    )


def _fp8(settings: Settings) -> FP8 | None:
    asked = settings.precision
    if asked.fp8_format is None:
        return None
    ends_in_bf16 = asked.first_last_layers_bf16
    return FP8(
        format=asked.fp8_format,
        recipe=asked.fp8_recipe,
        margin=asked.fp8_margin,
        history=asked.fp8_amax_history_len,
        algorithm=asked.fp8_amax_compute_algo,
        weight_gradient=not asked.no_fp8_wgrad,
        first_in_bf16=asked.num_layers_at_start_in_bf16 if ends_in_bf16 else 0,
        last_in_bf16=asked.num_layers_at_end_in_bf16 if ends_in_bf16 else 0,
        transformer_engine=settings.checkpointing.transformer_impl == "transformer_engine",
    )


def _balancing(balance: Balance) -> Balancing:
    named = zip(balance.moe_router_load_balancing_type, balance.moe_aux_loss_coeff, strict=True)
    losses = tuple(
        (name, coefficient) for name, coefficient in named if name != "none" and coefficient
    )
    dtype = {"fp32": "float32", "fp64": "float64", None: None}[balance.moe_router_dtype]
    factor = balance.moe_expert_capacity_factor
    # As in Megatron, a negative factor sets no limit.
    if factor is not None and factor < 0:
        factor = None
    return Balancing(
        losses, balance.moe_z_loss_coeff, balance.moe_router_bias_update_rate, factor,
        balance.moe_token_drop_policy, dtype, balance.moe_pad_expert_input_to_capacity,
    )  # fmt: skip


def _muon(optimizer: Optimizer) -> MuonOptions:
    return MuonOptions(
        optimizer.muon_momentum, optimizer.muon_use_nesterov, optimizer.muon_num_ns_steps, optimizer.muon_coefficient_type,
        optimizer.muon_scale_mode, optimizer.muon_extra_scale_factor, optimizer.muon_fp32_matmul_prec, optimizer.muon_tp_mode,
    )  # fmt: skip


STATE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Values of --exp-avg-dtype, --exp-avg-sq-dtype and --main-grads-dtype -> dtypes."""


def optimizer_options(settings: Settings) -> OptimizerOptions:
    """Return the options of the optimizer."""
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
        distributed=parallel.use_distributed_optimizer or parallel.shards("optim") or OPTIMIZERS[optimizer.optimizer].distributed,
        shards_gradients=parallel.shards("optim_grads"), shards_parameters=parallel.shards("optim_grads_params"),
        bf16_reduce=parallel.grad_reduce_in_bf16, fuses_accumulation=not settings.recompute.no_gradient_accumulation_fusion,
        bucket_elements=parallel.ddp_bucket_size or default.bucket_elements,
        overlap_grad_reduce=parallel.overlap_grad_reduce, overlap_param_gather=parallel.overlap_param_gather, loss_scale=scale,
        qk_clip=QkClip(optimizer.qk_clip_alpha, optimizer.qk_clip_threshold) if optimizer.qk_clip else None,
        log_scores=settings.logging.log_max_attention_logit,
        exp_avg_dtype=STATE_DTYPES[optimizer.exp_avg_dtype], exp_avg_sq_dtype=STATE_DTYPES[optimizer.exp_avg_sq_dtype],
        main_grads_dtype=STATE_DTYPES[optimizer.main_grads_dtype],
    )  # fmt: skip
