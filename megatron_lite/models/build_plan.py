"""The plan from which all parts of a model are built."""

from dataclasses import dataclass, replace

from torch.distributed import ProcessGroup

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout, padded_vocab
from megaconv.model.predicting import kind_of_layer
from megaconv.model.sharding import rank_sizes
from megaconv.model.subjects import LayerKind
from megaconv.planning.mixers import in_layer
from megatron_lite.models import recompute
from megatron_lite.models.layer_kinds import layer_shares
from megatron_lite.models.trainable import check_trained
from megatron_lite.parallel.tensor import Keep, NormOptions, TensorGroup
from megatron_lite.settings.options import ModelOptions


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """The groups that a layer's tokens are exchanged with; None: no other rank."""

    experts: ProcessGroup | None = None
    """The ranks that share the experts of each layer; experts are numbered in the order of these ranks."""
    parts: ProcessGroup | None = None
    """The ranks that share each expert."""


NO_OTHERS = ExpertRanks()


@dataclass(frozen=True)
class Plan:
    """The options and sizes from which all parts of a model are built."""

    config: ModelConfig
    options: ModelOptions
    ranks: TensorGroup
    sizes: dict[str, int]
    """This tensor rank's share of heads, kv_heads, ffn."""
    vocab_rows: int
    """Rows of the whole vocabulary, padding included."""
    expert_ranks: ExpertRanks = NO_OTHERS
    limit: float | None = None
    """The limit of activations in routed experts, in the plan of a layer; None: no limit."""
    shared_limit: float | None = None
    """The same in the MLP and in the shared expert."""

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer; see kind_of_layer."""
        return kind_of_layer(self.config, layer)

    def of_layer(self, layer: int) -> "Plan":
        """Return the plan of one layer: with its own sizes and limits, and with one place of norms if that depends on the mixer."""
        kind = self.kind(layer)
        config = in_layer(self.config, kind)
        sizes = layer_shares(self.config, layer, self.sizes, self.ranks.size)
        norm = config.norm
        if norm.place == "by_mixer":
            place = "before" if kind.mixer == "linear" else "after"
            config = replace(config, norm=replace(norm, place=place))
        return replace(
            self, config=config, sizes=sizes, limit=kind.limit, shared_limit=kind.shared_limit
        )

    @property
    def norm(self) -> NormOptions:
        """The model's norm."""
        norm = self.config.norm
        return NormOptions(
            norm.epsilon,
            centers=norm.kind == "LayerNorm",
            zero_centered=norm.zero_centered,
            with_weight=norm.weight,
            with_bias=norm.bias,
        )

    @property
    def norm_of_heads(self) -> NormOptions:
        """The norm of queries and keys."""
        return self.norm._replace(with_weight=True, with_bias=self.config.attention.qk_norm_bias)

    @property
    def norm_of_values(self) -> NormOptions | None:
        """The norm of values, which has no weight; None if there is none."""
        has_norm = self.config.attention.v_norm
        return self.norm._replace(with_weight=False, with_bias=False) if has_norm else None

    @property
    def norm_of_latents(self) -> NormOptions:
        """The norm of latent vectors, which may have a different epsilon."""
        own = self.config.latent.norm_epsilon
        norm = self.norm_of_heads._replace(centers=False)
        return norm if own is None else norm._replace(epsilon=own)

    @property
    def norm_after(self) -> NormOptions | None:
        """The norm of a sublayer's output, if there is one."""
        return self.norm if self.config.norm.place in ("both", "after") else None

    @property
    def keep(self) -> Keep:
        """The choice between keeping and recomputing cheap tensors (models/recompute.py)."""
        return (
            recompute.make_again
            if self.options.recompute.granularity == "selective"
            else recompute.keep
        )


def make_plan(
    config: ModelConfig,
    layout: Layout,
    options: ModelOptions,
    ranks: TensorGroup,
    expert_ranks: ExpertRanks = NO_OTHERS,
) -> Plan:
    """Return the plan. Raises the errors of check_trained."""
    check_trained(config, layout, options, sequence=ranks.sequence)
    rows = padded_vocab(config.vocab, options.vocab_divisor, layout.tp)
    return Plan(config, options, ranks, rank_sizes(config, layout), rows, expert_ranks)
