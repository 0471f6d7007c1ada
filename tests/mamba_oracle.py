"""Hybrids with Mamba layers on the CPU: megatron-core's own MambaModel, of its local layers.

What core 0.16.1 builds such models of needs Transformer Engine, mamba_ssm and einops. Here the same MambaStack gets core's own
linear layers and torch's norms. Three things are ours: the kernel of convolution and scan, computed token by token by the
recurrence of the paper (arXiv 2405.21060, equation 1), the norm behind it, over each group, and the three patterns of axes
that the mixer asks einops for.
"""

import sys
from argparse import Namespace
from copy import copy
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tests import delta_net_oracle

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer import TransformerConfig


PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""The first is of core 0.17 and later, and may have stages and MTP layers."""


def is_hybrid(args: Namespace) -> bool:
    return any(getattr(args, name, None) for name in PATTERNS)


def virtual_stages(args: Namespace) -> int:
    """The number of virtual stages that hybrid_layer_pattern gives, as validate_args of core 0.19 derives it."""
    main = str(getattr(args, "hybrid_layer_pattern", None) or "").partition("/")[0]
    return (main.count("|") + 1) // args.pipeline_model_parallel_size


def build(args: Namespace, config: "TransformerConfig", virtual_stage: int | None) -> Any:
    """One model chunk, as mamba_builders.py of Megatron-LM makes it, or as hybrid.py of core 0.19 does."""
    leave_generation_out()
    replace_kernels()
    if config.moe_latent_size:
        project_for_experts()
    from megatron.core import parallel_state
    from megatron.core.models.mamba import MambaModel

    at: dict[str, Any] = {"ignore_virtual": False, "vp_stage": virtual_stage}
    given = {name: getattr(args, name, None) for name in PATTERNS}
    patterns = {name: pattern for name, pattern in given.items() if pattern}
    if virtual_stage is not None:
        patterns["vp_stage"] = virtual_stage
    return MambaModel(
        config=config,
        mamba_stack_spec=local_stack(args),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=parallel_state.is_pipeline_last_stage(**at),
        **patterns,
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    ).eval()


def project_for_experts() -> None:
    """Core 0.16.1 has projections to a latent width of Transformer Engine's layers alone, and separate experts of the hidden width."""
    import torch
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.moe.experts import SequentialMLP

    class Whole(torch.nn.Linear):
        """A layer that is whole on every rank, like Transformer Engine's `duplicated` layers."""

        def __init__(self, inner: int, outer: int, **settings: Any) -> None:
            super().__init__(inner, outer, bias=settings["bias"])

        def forward(self, hidden: "torch.Tensor") -> Any:
            return super().forward(hidden), None

    made = SequentialMLP.__init__

    def in_latent_width(self: Any, count: int, config: Any, *args: Any, **settings: Any) -> None:
        inside = copy(config)
        inside.hidden_size = config.moe_latent_size or config.hidden_size
        made(self, count, inside, *args, **settings)

    if moe_layer.HAVE_TE:
        return
    moe_layer.HAVE_TE, moe_layer.TELinear, SequentialMLP.__init__ = True, Whole, in_latent_width


def local_stack(args: Namespace) -> Any:
    """The stack of mamba_layer_specs.py with local layers in place of Transformer Engine's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    mixer = ModuleSpec(
        MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    )
    norm = WrappedTorchNorm if args.qk_layernorm else None
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )
    mlp = ModuleSpec(
        MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    experts = get_moe_module_spec(
        use_te=False, num_experts=args.num_experts or 1, moe_grouped_gemm=False
    )
    before_mlp: dict[str, Any] = {
        "pre_mlp_layernorm": WrappedTorchNorm,
        "mlp_bda": get_bias_dropout_add,
    }
    before_attention: dict[str, Any] = {
        "input_layernorm": WrappedTorchNorm,
        "self_attn_bda": get_bias_dropout_add,
    }
    layers = MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add
            ),
        ),
        attention_layer=ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(self_attention=attention, **before_attention),
        ),
        mlp_layer=ModuleSpec(
            MLPLayer, submodules=TransformerLayerSubmodules(mlp=mlp, **before_mlp)
        ),
        moe_layer=ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(mlp=experts, **before_mlp)
        ),
    )
    if hasattr(layers, "gdn_layer"):
        delta_net = TransformerLayerSubmodules(
            self_attention=delta_net_oracle.mixer(), **before_attention
        )
        layers.gdn_layer = ModuleSpec(TransformerLayer, submodules=delta_net)
        layers.mtp_block_spec = predicting_layers()
    return ModuleSpec(MambaStack, submodules=layers)


def predicting_layers() -> Any:
    """The MTP layers of hybrid_layer_specs.py of core 0.19, of local layers."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as predicting
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts = predicting.MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=WrappedTorchNorm,
    )
    layer = ModuleSpec(predicting.MultiTokenPredictionLayer, submodules=parts)
    return ModuleSpec(
        predicting.MultiTokenPredictionBlock,
        submodules=predicting.MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )


def leave_generation_out() -> None:
    """The mixer's module imports functions of generation, which nothing here calls, and which need triton."""
    name = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
    absent = ModuleType(name)
    for function in ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"):
        setattr(absent, function, None)
    sys.modules.setdefault(name, absent)


def replace_kernels() -> None:
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.ssm.mamba_block import MambaStack
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = True
    mamba_mixer.rearrange = rearrange
    mamba_mixer.mamba_split_conv1d_scan_combined = convolve_and_scan
    mamba_mixer.ExtendedRMSNorm = grouped_norm()
    # Core 0.19 has the same class in another module: its hybrid_block.py.
    vars(sys.modules[MambaStack.__init__.__module__])["TENorm"] = WrappedTorchNorm


def rearrange(tensor: "torch.Tensor", pattern: str) -> "torch.Tensor":
    """Raises KeyError for what the mixer doesn't ask for while it trains."""
    swapped = dict.fromkeys(("l b d -> b l d", "b l d -> l b d"), lambda: tensor.transpose(0, 1))
    return {**swapped, "d 1 w -> d w": lambda: tensor.squeeze(1)}[pattern]()


def convolve_and_scan(
    projected: "torch.Tensor",
    conv_weight: "torch.Tensor",
    conv_bias: "torch.Tensor",
    dt_bias: "torch.Tensor",
    decay: "torch.Tensor",
    *,
    headdim: int,
    ngroups: int,
    **settings: Any,
) -> "torch.Tensor":
    """projected: [batch, positions, z + x + B + C + dt]; decay: A, below 0. Returns [batch, positions, heads * headdim], gated by z."""
    import torch
    from torch.nn.functional import conv1d, pad, silu, softplus

    skip: torch.Tensor = settings["D"]
    assert (settings["activation"], settings["norm_before_gate"], settings["seq_idx"]) == (
        "silu",
        False,
        None,
    )
    (heads,), (channels, kernel), (batch, positions, _) = (
        decay.shape,
        conv_weight.shape,
        projected.shape,
    )
    z, mixed, dt = projected.split([heads * headdim, channels, heads], -1)
    padded = pad(mixed.transpose(1, 2), (kernel - 1, 0))
    mixed = silu(conv1d(padded, conv_weight[:, None], conv_bias, groups=channels)).transpose(1, 2)
    state_size = (channels - heads * headdim) // (2 * ngroups)
    x, into, out = mixed.split([heads * headdim, ngroups * state_size, ngroups * state_size], -1)
    x = x.reshape(batch, positions, heads, headdim)
    into, out = (
        each.reshape(batch, positions, ngroups, state_size).repeat_interleave(heads // ngroups, 2)
        for each in (into, out)
    )
    dt = softplus(dt + dt_bias)
    state, outputs = x.new_zeros(batch, heads, headdim, state_size), []
    for position in range(positions):
        now = dt[:, position]
        written = (now[..., None] * x[:, position])[..., None] * into[:, position, :, None]
        state = state * (now * decay).exp()[..., None, None] + written
        outputs.append((state * out[:, position, :, None]).sum(-1) + skip[:, None] * x[:, position])
    return torch.stack(outputs, 1).reshape(z.shape) * silu(z)


def grouped_norm() -> type:
    """RMSNorm over each group of elements; sharded as mamba_mixer.py has its own."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class GroupedNorm(torch.nn.Module):
        def __init__(
            self, width: int, *, eps: float, group_size: int, dtype: Any, **_: Any
        ) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))
            self.eps, self.group_size = eps, group_size

        def forward(self, y: Any) -> Any:
            groups = y.unflatten(-1, (-1, self.group_size))
            scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
            return (groups * scale).flatten(-2) * self.weight

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> Any:
            return make_sharded_tensors_for_checkpoint(
                self.state_dict(prefix="", keep_vars=True),
                prefix,
                {"weight": 0},
                sharded_offsets,
                tp_group=parallel_state.get_tensor_model_parallel_group(),
                dp_cp_group=metadata["dp_cp_group"],
            )

    return GroupedNorm
