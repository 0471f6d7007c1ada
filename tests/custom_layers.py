"""Modules that Megatron core 0.16 lacks, made of its own, and put where a family needs them: what a user of core writes once.

    norms after sublayers      in the last linear layer of each, called post_layernorm, as Megatron-Bridge has them
    norms of q and k           over all heads: the sum of squares is taken over tensor ranks
    caps                       tanh on attention scores and on logits
    a second base of rope      for layers with a window
    norms without weights      of q and k, in layers that rotate alone: nothing in their place in others

Which family has which norms is written down here, by hand, and not taken from what the converter wrote. Call `modules()` only
where Megatron is imported and patched (tests/megatron_oracle.py).
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Needs:
    """Norms of a family that core has no modules for."""

    norms: str = "before"
    """`before` sublayers, `after` them, or `both`."""
    wide_qk_norms: bool = False


CORES_OWN = Needs()
NEEDS = {
    "olmoe": Needs(wide_qk_norms=True),
    "minimax_m2": Needs(wide_qk_norms=True),
    "olmo2": Needs("after", wide_qk_norms=True),
    "olmo3": Needs("after", wide_qk_norms=True),
    "exaone4": Needs("after"),
    "molmo2_text": Needs("after", wide_qk_norms=True),
    "glm4": Needs("both"),
    "gemma2": Needs("both"),
    "gemma3_text": Needs("both"),
}


def needs_of(checkpoint: Path) -> Needs:
    """The needs of the model that a user has to build, by the config.json beside a checkpoint."""
    path = checkpoint / "hf" / "config.json"
    raw = json.loads(path.read_text()) if path.is_file() else {"model_type": ""}
    if raw["model_type"] == "molmo2_text" and not raw["norm_after"]:
        return CORES_OWN  # a Qwen 3, but for its head
    return NEEDS.get(raw["model_type"], CORES_OWN)


def modules() -> SimpleNamespace:
    """Classes whose bases are Megatron's."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class NormedRowLinear(RowParallelLinear):
        def __init__(
            self, input_size: int, output_size: int, *, config: Any, **options: Any
        ) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = WrappedTorchNorm(
                config, output_size, eps=config.layernorm_epsilon
            )

        def forward(self, x: Any) -> Any:
            output, bias = super().forward(x)
            return self.post_layernorm(output), bias

    class WideNorm(torch.nn.Module):
        """Over all heads of a projection, of which a rank has its share: [sequence, batch, heads, head_dim]."""

        def __init__(self, heads: int, head_dim: int, eps: float) -> None:
            super().__init__()
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            self.whole, self.eps = heads * head_dim, eps
            self.weight = torch.nn.Parameter(torch.empty(heads // ranks * head_dim))

        def forward(self, x: Any) -> Any:
            squares = x.float().square().sum((-2, -1), keepdim=True)
            torch.distributed.all_reduce(
                squares, group=parallel_state.get_tensor_model_parallel_group()
            )
            return x * torch.rsqrt(squares / self.whole + self.eps) * self.weight.view(x.shape[-2:])

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> Any:
            state = self.state_dict(keep_vars=True)
            return make_sharded_tensors_for_checkpoint(
                state, prefix, {"weight": 0}, sharded_offsets
            )

    class WideQNorm(WideNorm):
        def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
            super().__init__(config.num_attention_heads, hidden_size, eps)

    class WideKNorm(WideNorm):
        def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
            super().__init__(config.num_query_groups, hidden_size, eps)

    class CappedAttention(DotProductAttention):
        def __init__(self, config: Any, **options: Any) -> None:
            super().__init__(config, **options)
            cap = config.attn_logit_softcapping

            def capped(module: Any, inputs: Any) -> Any:
                return cap * torch.tanh(inputs[0] / cap), *inputs[1:]

            self.scale_mask_softmax.register_forward_pre_hook(capped)

    ours = (NormedRowLinear, WideQNorm, WideKNorm, CappedAttention)
    return SimpleNamespace(**{each.__name__: each for each in ours})


def adapt(spec: Any, needs: Needs, args: Namespace) -> None:
    """Put the modules into the spec of a layer, or of all layers."""
    from megatron.core.transformer.identity_op import IdentityOp

    ours = modules()
    for layer in (each.submodules for each in getattr(spec, "layer_specs", [spec])):
        attention = layer.self_attention.submodules
        if needs.norms != "before":
            attention.linear_proj = submodules(layer.mlp).linear_fc2 = ours.NormedRowLinear
        if needs.norms == "after":
            layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        if needs.wide_qk_norms:
            attention.q_layernorm, attention.k_layernorm = ours.WideQNorm, ours.WideKNorm
        if getattr(args, "attn_logit_softcapping", None):
            attention.core_attention = ours.CappedAttention


def submodules(spec: Any) -> Any:
    """The submodules of a ModuleSpec, or of the partial class that core 0.19 has in its place for an MLP."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def cap_logits(chunk: Any, cap: float) -> None:
    import torch

    def capped(module: Any, inputs: Any, output: Any) -> Any:
        return cap * torch.tanh(output[0] / cap), output[1]

    chunk.output_layer.register_forward_hook(capped)


def give_windows_their_own_rope(chunk: Any, args: Namespace) -> None:
    """A plain one, which nothing scales, in place of the model's."""
    import copy

    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    local = RotaryEmbedding(
        args.kv_channels,
        args.rotary_percent,
        rotary_base=args.rotary_base[0],
        use_cpu_initialization=True,
    )

    def turned(module: Any, inputs: Any, named: dict[str, Any]) -> Any:
        return inputs, named | {"rotary_pos_emb": local(inputs[0].shape[0])}

    for layer in windowed_layers(chunk, args):
        layer.self_attention.register_forward_pre_hook(turned, with_kwargs=True)
        layer.self_attention.config = copy.copy(layer.self_attention.config)
        for name in [
            name for name in vars(layer.self_attention.config) if name.startswith("yarn_")
        ]:
            delattr(layer.self_attention.config, name)


def windowed_layers(chunk: Any, args: Namespace) -> Iterator[Any]:
    pattern = args.window_attn_skip_freq or [1] * args.num_layers
    return (
        layer
        for layer in chunk.decoder.layers
        if args.window_size and pattern[layer.layer_number - 1]
    )


def norm_only_what_rotates(chunk: Any, args: Namespace) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    for layer in chunk.decoder.layers:
        if args.no_rope_freq[layer.layer_number - 1]:
            layer.self_attention.q_layernorm = layer.self_attention.k_layernorm = IdentityOp()
