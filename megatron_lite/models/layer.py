"""One layer: a mixer and an MLP, each of the kind that the model's description names for it."""

from torch import Tensor, nn

from megatron_lite.models import rng
from megatron_lite.models.fp8 import use_fp8
from megatron_lite.models.latent_attention import LatentAttention
from megatron_lite.models.mlp import MLP
from megatron_lite.models.moe.experts import Mixture
from megatron_lite.models.passes import Pass
from megatron_lite.models.plan import Plan
from megatron_lite.models.self_attention import SelfAttention
from megatron_lite.parallel.tensor import Norm, TensorGroup

MIXERS = {"attention": SelfAttention, "latent attention": LatentAttention}
"""What a layer may have to mix tokens, by the words of megaconv.model.config.LayerKind."""


class Residual(nn.Module):
    """What adds to the activations, of which training drops some."""

    ranks: TensorGroup
    dropout: float

    def drop(self, x: Tensor, run: Pass, at: rng.At) -> Tensor:
        if run.seed is None or not self.dropout:
            return x
        dropped: Tensor = run.seed.drop(x, self.dropout, at, self.ranks)
        return dropped


class Layer(Residual):
    """A dense MLP and plain attention have their norms in themselves; experts all take what one norm makes, latent attention likewise."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        self.layer, self.ranks, self.dropout = layer, plan.ranks, plan.options.hidden_dropout
        self.after_attention, self.after_mlp = rng.At(layer, rng.AFTER_ATTENTION), rng.At(layer, rng.AFTER_MLP)
        kind = plan.kind(layer)
        latent = plan.config.latent.kv_rank > 0
        self.input_layernorm = Norm(plan.config.hidden, plan.norm) if latent else None
        self.self_attention = MIXERS[("latent " if latent else "") + kind.mixer](plan, layer)
        mixture = kind.mlp == "experts"
        self.pre_mlp_layernorm = Norm(plan.config.hidden, plan.norm) if mixture else None
        self.mlp = Mixture(plan, layer) if mixture else MLP(plan)
        use_fp8(self, plan, layer)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.drop(self.self_attention(normed, run), run, self.after_attention)
        made = self.mlp(x) if self.pre_mlp_layernorm is None else self.mlp(self.pre_mlp_layernorm(x), run)
        return x + self.drop(made, run, self.after_mlp)
