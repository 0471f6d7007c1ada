"""The arguments that an output takes over from the run that saved its source.

A conversion moves tensors, but doesn't change the settings of the run. Every argument keeps its value, with two
exceptions: arguments in OF_OUTPUT, and arguments that describe the model. The latter are written from the model, which
the tensors show.
"""

from collections.abc import Mapping
from typing import Any

from formats.pickle_records import TorchDtype
from formats.tensor import ITEMSIZE
from megaconv.families.parts.dropouts import ATTENTION, HIDDEN
from megaconv.megatron.arguments.harmless import HARMLESS
from megaconv.megatron.arguments.known import READ, REFUSED
from megaconv.model.ceilings import VOCABULARY

LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "encoder_tensor_model_parallel_size",
    "encoder_pipeline_model_parallel_size", "pipeline_model_parallel_split_rank", "transformer_pipeline_model_parallel_size",
    "model_parallel_size", "standalone_embedding_stage", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "microbatch_group_size_per_vp_stage", "hybrid_layer_pattern",
)  # fmt: skip
"""Arguments on the distribution of the model over ranks. They stay unchanged if the output has the source's layout."""

PROCESS = ("rank", "local_rank")
"""Arguments of the single process that saved a file."""

OF_OUTPUT: Mapping[str, tuple[str, ...]] = {
    "which rank holds what, at another layout": LAYOUT,
    "the processes: the files are those of the smallest run of a layout": (
        "world_size", "data_parallel_size", "context_parallel_size", "hierarchical_context_parallel_sizes", "use_tp_pp_dp_mapping",
        *PROCESS,
    ),
    "the format, and how it names the model's parts": (
        "ckpt_format", "use_dist_ckpt", "dist_ckpt_format", "use_legacy_models", "use_mcore_models", "transformer_impl",
        "moe_grouped_gemm", "moe_use_legacy_grouped_gemm", "spec",
    ),
    "the dtype of the weights": ("fp16", "bf16", "params_dtype"),
    "the vocabulary's padding": ("make_vocab_size_divisible_by", "padded_vocab_size"),
    "whether the output holds training state, and in which form": (
        "no_save_optim", "no_save_rng", "use_distributed_optimizer", "overlap_grad_reduce",
    ),
    "the width of experts, in a model without experts": ("moe_ffn_hidden_size",),
}  # fmt: skip
"""Arguments that a conversion decides, by topic."""

OPTIMIZATION = (
    "optimizer", "lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "start_weight_decay", "end_weight_decay",
    "weight_decay_incr_style", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "clip_grad", "lr_decay_style", "lr_decay_iters",
    "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "train_iters", "train_samples",
    "global_batch_size", "micro_batch_size", "seed", "loss_scale", "initial_loss_scale",
    "accumulate_allreduce_grads_in_fp32",
)  # fmt: skip
"""Arguments on optimization."""
OF_TRAINING = (*OPTIMIZATION, ATTENTION, HIDDEN)
"""Arguments on training, which a model's provider has too."""

_OURS = "megaconv_"
"""The prefix of arguments that only megaconv writes, and writes anew each time."""
_COMPUTED = READ.union(REFUSED) - {name for names in HARMLESS.values() for name in names}


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that every release can load.

    Megatron's own classes, such as AttnBackend, aren't in all releases.
    """
    return {name: value for name, value in arguments.items() if _is_plain(value)}


def vocab_divisor(arguments: Mapping[str, Any]) -> int | None:
    """--make-vocab-size-divisible-by, if the arguments have a possible one."""
    divisor = arguments.get("make_vocab_size_divisible_by")
    return divisor if isinstance(divisor, int) and 0 < divisor <= VOCABULARY else None


def of_run(
    arguments: Mapping[str, Any], *, same_layout: bool, same_modules: bool
) -> dict[str, Any]:
    """The arguments of a run that an output takes over, unless the output has its own value.

    same_layout: True if the output has the run's layout. same_modules: True if the output has the run's modules
    (`transformer_impl`).
    """
    kept = {
        name: value
        for name, value in arguments.items()
        if name not in PROCESS and not name.startswith(_OURS)
    }
    stale = {"hierarchical_context_parallel_sizes", "use_tp_pp_dp_mapping", "dist_ckpt_format"}
    stale.update(() if same_layout else LAYOUT)
    stale.update(() if same_modules else ("spec",))
    return kept | {name: False if kept[name] is True else None for name in stale if kept.get(name)}


def that_compute(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that can change the model's computation."""
    return {name: value for name, value in arguments.items() if name in _COMPUTED}


def _is_plain(value: object) -> bool:
    """True for a plain value. The pickle reader has already limited depth and size of values."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, TorchDtype):
        return value.name in ITEMSIZE
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return value is None or type(value) in (bool, float, str)
