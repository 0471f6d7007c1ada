"""One layer: a mixer and an MLP of the kinds that the model's description names."""

from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.models import rng
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.layer_inputs import LayerInput
from megatron_lite.models.mixers.declaration import Mixer
from megatron_lite.models.mixers.table import mixer_of
from megatron_lite.models.mlp import MLP
from megatron_lite.models.moe.experts import Mixture
from megatron_lite.models.moe.own_norms import NormedMixture
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import Norm, TensorGroup
from megatron_lite.products.selection import use_fp8


class Residual(nn.Module):
    """A module with residual connections, and with dropout in training."""

    ranks: TensorGroup
    dropout: float

    def drop(self, x: Tensor, run: Pass, at: rng.At) -> Tensor:
        """Apply hidden dropout; without a seed or dropout, return x."""
        if run.seed is None or not self.dropout:
            return x
        dropped: Tensor = run.seed.drop(x, self.dropout, at, self.ranks)
        return dropped


class Layer(Residual):
    """One layer: a mixer, an MLP, or both. Experts and some mixers need a norm before them; all others contain theirs.

    If the mixer and the MLP share a norm, it is before the mixer.
    """

    input_layernorm: Norm | None
    pre_mlp_layernorm: Norm | None
    attention_sum_norm: Norm | None
    """The norm of the sum of the mixer's input and output (GPT-1); None in all other models."""
    mlp_sum_norm: Norm | None
    mlp: nn.Module | None
    kinds: ClassVar = {"layer_scalar": Kind.UNTRAINED}

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        plan = plan.of_layer(layer)
        config, options = plan.config, plan.options
        self.layer = layer
        self.ranks = plan.ranks
        self.dropout = options.hidden_dropout
        self.scale = config.residual_scale
        self.by_depth = config.residual_by_depth
        self.parallel, self.shares_norm = config.parallel_residual, config.has("shared_norm")
        self.after_attention = rng.At(layer, rng.AFTER_ATTENTION)
        self.after_mlp = rng.At(layer, rng.AFTER_MLP)
        kind = plan.kind(layer)
        self._add_mixer(plan, mixer_of(config, kind))
        self._add_mlp(plan, kind.mlp)
        norms_sums = config.norm.place == "after_sum"
        self.attention_sum_norm = Norm(config.hidden, plan.norm) if norms_sums else None
        self.mlp_sum_norm = Norm(config.hidden, plan.norm) if norms_sums else None
        self.layer_input = LayerInput(plan) if config.has("layer_inputs") else None
        free = nn.Parameter(torch.empty(1), requires_grad=False)
        self.layer_scalar = free if config.layer_scale else None
        use_fp8(self, options.fp8, layer=layer, layers=config.layer_count, tp=plan.ranks.size)

    def _add_mixer(self, plan: Plan, mixer: Mixer | None) -> None:
        """Add the mixer under its own name, after the norm that it needs."""
        self.mixer_name = None if mixer is None else mixer.place
        self.input_layernorm = None
        if mixer is None:
            return
        assert mixer.module is not None, (
            "check_trained refuses models with mixers that can't be computed"
        )
        if mixer.needs_norm or self.shares_norm:
            self.input_layernorm = Norm(plan.config.hidden, plan.norm)
        self.add_module(mixer.place, mixer.module()(plan, self.layer))

    def _add_mlp(self, plan: Plan, kind: str) -> None:
        """Add the dense MLP, the experts after their norm or with norms of their own, or nothing."""
        self.pre_mlp_layernorm, self.mlp = None, None
        self.has_experts = kind == "experts"
        if kind == "experts" and plan.config.experts.own_norms:
            self.mlp = NormedMixture(plan, self.layer)
        elif kind == "experts":
            if plan.config.norm.place != "after" and not self.shares_norm:
                self.pre_mlp_layernorm = Norm(plan.config.hidden, plan.norm)
            self.mlp = Mixture(plan, self.layer)
        elif kind == "dense":
            self.mlp = MLP(plan)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        # torch.compile stops at the attention of packed rows. Without this comparison, their graph would serve other rows too.
        _ = run.packed is None
        entered = normed = x
        if self.mixer_name is not None:
            mixer = getattr(self, self.mixer_name)
            normed = x if self.input_layernorm is None else self.input_layernorm(x)
            mixed = mixer(normed, run)
            x = self._added(x, mixed, run, self.after_attention)
            x = x if self.attention_sum_norm is None else self.attention_sum_norm(x)
        if self.mlp is None:
            return self._ended(x, run)
        # torch.compile stops at experts. In a separate method, the call would be one more compiled part.
        read = self._read_by_mlp(entered, normed, x)
        normed = read if self.pre_mlp_layernorm is None else self.pre_mlp_layernorm(read)
        made = self.mlp(normed, run) if self.has_experts else self.mlp(normed)
        x = self._added(x, made, run, self.after_mlp)
        x = x if self.mlp_sum_norm is None else self.mlp_sum_norm(x)
        return self._ended(x, run)

    def _ended(self, x: Tensor, run: Pass) -> Tensor:
        """Add the layer's own input, scale the sum with the layer's stored number, and add to images, if there are such."""
        if run.pictures is not None:
            added: Tensor = run.pictures.after(self.after_mlp, x, self.ranks)
            x = added
        if self.layer_input is not None:
            assert run.carried is not None
            x = self.layer_input(x, run.carried.input)
        return x if self.layer_scalar is None else x * self.layer_scalar

    def _read_by_mlp(self, entered: Tensor, normed: Tensor, mixed: Tensor) -> Tensor:
        """Return the input of the MLP: the layer's input, its norm, or the sum after the mixer."""
        if not self.parallel:
            return mixed
        return normed if self.shares_norm else entered

    def _added(self, x: Tensor, made: Tensor, run: Pass, at: rng.At) -> Tensor:
        """Add the output of a mixer or an MLP to its input, scaled if the model has a factor."""
        dropped = self.drop(made, run, at)
        if self.by_depth:
            weighted: Tensor = _weighted_by_depth(x, dropped, at)
            return weighted
        return x + (dropped if self.scale is None else dropped * self.scale)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _weighted_by_depth(x: Tensor, made: Tensor, at: rng.At) -> Tensor:
    """Add the output of a mixer or an MLP to its input, with weights by the number of the sum in the model, counted from 2.

    It is not compiled, because each layer would be compiled anew.
    """
    number = 2 * at.layer + (2 if at.place == rng.AFTER_ATTENTION else 3)
    return made * sqrt(1 / number) + x * sqrt((number - 1) / number)
